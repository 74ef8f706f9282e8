"""The systems that are compared: how each computes a forward and a backward of a problem.

A system that can't take a cell says why. Liger and quack have neither scale nor mask; the article's
kernel has an additive mask of the scores' own size and dtype, and a causality of square scores.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import sms_plugin
from scripts.benchmarks import cuda_library
from scripts.benchmarks.cells import Cell
from scripts.benchmarks.problems import SCALE, Problem
from scripts.benchmarks.timing import Call

ON_CPU = ("fused", "native", "compiled")
NAMES = ("fused", "native", "compiled", "article", "online", "liger", "quack")
ARTICLE_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
ARTICLE_BYTES = 48 * 1024  # of shared memory, which the article doesn't raise
ONLINE_LENGTHS = (512, 1024, 2048)  # of the article's question
LIGER_LENGTH = 65536  # a Triton block has no more


class Unavailable(RuntimeError):
    """A system that can't run here, and why."""


class System(abc.ABC):
    """`note` stands in each of its records."""

    def __init__(self, name: str, note: str = "") -> None:
        self.name = name
        self.note = note

    def refuses(self, cell: Cell, direction: str) -> str | None:
        """Why it can't compute that, or None."""
        return None

    @abc.abstractmethod
    def forward(self, problem: Problem) -> Call:
        """A call that computes the forward."""

    @abc.abstractmethod
    def backward(self, problem: Problem) -> Call:
        """A call that computes the gradients again and again; the forward is done before."""

    @abc.abstractmethod
    def both(self, problem: Problem) -> Call:
        """A call that computes forward and backward."""

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Around everything that concerns one cell."""
        yield


class ModuleSystem(System):
    """`sms_plugin.ScaledMaskSoftmax(impl)`; its gradients come from autograd."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "static shapes" if name == "compiled" else "")
        self.softmax = sms_plugin.ScaledMaskSoftmax(name)

    def forward(self, problem: Problem) -> Call:
        return lambda: self.softmax(**problem.arguments)

    def backward(self, problem: Problem) -> Call:
        probs, wanted, grad = self.softmax(**problem.arguments), problem.wanted, problem.grad
        return lambda: torch.autograd.grad(probs, wanted, grad, retain_graph=True)

    def both(self, problem: Problem) -> Call:
        wanted, grad = problem.wanted, problem.grad
        return lambda: torch.autograd.grad(self.softmax(**problem.arguments), wanted, grad)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        if self.name != "compiled":
            yield
            return
        import torch._dynamo
        import torch._functorch.config

        # A kernel for this length alone, as a model with one length gets it. Donated buffers would
        # forbid a second backward through one graph.
        torch._dynamo.reset()
        with (
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
            torch._functorch.config.patch(donated_buffer=False),
        ):
            yield


class ArticleSystem(System):
    """The article's kernel, with two passes over the row or, "online", with one."""

    def __init__(self, name: str) -> None:
        self.online = name == "online"
        super().__init__(name, "one pass" if self.online else "two passes")
        self.library = cuda_library.load()

    def refuses(self, cell: Cell, direction: str) -> str | None:
        if self.online and (direction, cell.case) != ("forward", "dense"):
            return "asked for in dense forward only"
        if self.online and cell.length not in ONLINE_LENGTHS:
            return f"asked for at {', '.join(map(str, ONLINE_LENGTHS))} only"
        if cell.layout != "contiguous":
            return "takes contiguous scores only"
        if cell.is_causal and cell.shape[-1] != cell.shape[-2]:
            return "its causality is that of square scores"
        for term in cell.terms:
            if term.learned or term.shape != cell.shape or term.dtype != cell.dtype:
                return "its mask is additive, of the scores' own size and dtype, without a gradient"
        if direction == "forward" and (cell.length + 256) * 4 > ARTICLE_BYTES:
            return f"a row of {cell.length} doesn't fit into 48 KB of shared memory"
        return None

    def forward(self, problem: Problem) -> Call:
        return lambda: self._forward(problem)

    def _forward(self, problem: Problem) -> Tensor:
        cell, scores = problem.cell, problem.scores
        probs = torch.empty_like(scores)
        mask = problem.arguments["mask"]
        mask = problem.arguments["bias"] if mask is None else mask
        error = self.library.sms_article_forward(
            ARTICLE_DTYPES[cell.dtype],
            scores.data_ptr(),
            None if mask is None else mask.data_ptr(),
            probs.data_ptr(),
            scores.numel() // cell.length,
            cell.length,
            SCALE,
            int(cell.is_causal),
            int(self.online),
            cuda_library.current_stream(),
        )
        cuda_library.check(error, f"the article's forward of {cell.name}")
        return probs

    def backward(self, problem: Problem) -> Call:
        probs = torch.softmax(problem.scores.detach(), dim=-1)
        return lambda: self._backward(problem, probs)

    def _backward(self, problem: Problem, probs: Tensor) -> Tensor:
        cell, grad_scores = problem.cell, torch.empty_like(probs)
        error = self.library.sms_article_backward(
            ARTICLE_DTYPES[cell.dtype],
            probs.data_ptr(),
            problem.grad.data_ptr(),
            grad_scores.data_ptr(),
            probs.numel() // cell.length,
            cell.length,
            SCALE,
            cuda_library.current_stream(),
        )
        cuda_library.check(error, f"the article's backward of {cell.name}")
        return grad_scores

    def both(self, problem: Problem) -> Call:
        return lambda: self._backward(problem, self._forward(problem))


class PlainSystem(System):
    """A softmax without scale or mask: `softmax(scores [rows, T])`, differentiable."""

    def __init__(self, name: str, softmax: Callable[[Tensor], Tensor], limit: int) -> None:
        super().__init__(name, "no scale, no mask")
        self.softmax, self.limit = softmax, limit

    def refuses(self, cell: Cell, direction: str) -> str | None:
        if cell.is_causal or cell.terms or cell.layout != "contiguous":
            return "has neither masks nor strides"
        if cell.length > self.limit:
            return f"takes rows of up to {self.limit}"
        return None

    def forward(self, problem: Problem) -> Call:
        rows = problem.scores.view(-1, problem.cell.length)
        return lambda: self.softmax(rows)

    def backward(self, problem: Problem) -> Call:
        rows = problem.scores.detach().view(-1, problem.cell.length).requires_grad_()
        probs, grad = self.softmax(rows), problem.grad.view_as(rows)
        return lambda: torch.autograd.grad(probs, rows, grad, retain_graph=True)

    def both(self, problem: Problem) -> Call:
        rows = problem.scores.detach().view(-1, problem.cell.length).requires_grad_()
        grad = problem.grad.view_as(rows)
        return lambda: torch.autograd.grad(self.softmax(rows), rows, grad)


def _peer(name: str, module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{name}: {error}; `pip install {package}` brings it") from error


def make_system(name: str) -> System:
    """Raises Unavailable where it can't run, and ValueError for a name that isn't one."""
    if name in ("fused", "native", "compiled"):
        return ModuleSystem(name)
    if name in ("article", "online"):
        return ArticleSystem(name)
    if name == "liger":
        liger = _peer(name, "liger_kernel.ops.softmax", "liger-kernel")
        return PlainSystem(name, liger.LigerSoftmaxFunction.apply, LIGER_LENGTH)
    if name == "quack":
        quack = _peer(name, "quack.softmax", "quack-kernels")
        return PlainSystem(name, quack.softmax, 2**17)
    raise ValueError(f"there is no system {name!r}: choose from {', '.join(NAMES)}")


def make_systems(names: Sequence[str], say: Callable[[str], None]) -> list[System]:
    """Those that run here; `say` gets a line for each one that doesn't."""
    systems = []
    for name in names:
        try:
            systems.append(make_system(name))
        except Unavailable as error:
            say(f"skipped {error}")
    return systems

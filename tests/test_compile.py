"""torch.compile: one graph, dynamic shapes without a recompilation per length, eager's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cases import make_scores, random_mask
from checkouts import needs_compiler
from compare import DTYPES, check, upstream
from torch import Tensor, func
from torch._dynamo.testing import CompileCounterWithBackend

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attention(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """A softmax with work before and after it, as compiled code has."""
    return softmax(scores + 1, mask, scale, is_causal, bias=bias) * 2


def run(function: object, device: str, length: int, kind: str, scale: float) -> list[Tensor]:
    """[result, gradients]; the scores have the layout that a permute of (B, Tq, H, Tk) leaves."""
    scores = make_scores((2, length, 3, length), torch.float32, device).transpose(1, 2)
    scores = scores.detach().requires_grad_()
    mask = {
        "bool": random_mask((2, 1, 1, length), device),
        "float": torch.zeros(length, length, device=device, requires_grad=True),
    }.get(kind)
    bias = torch.zeros(3, 1, length, device=device, requires_grad=True) if kind == "bias" else None
    out = function(scores, mask, bias, scale, kind == "causal")  # type: ignore[operator]
    wanted = [t for t in (scores, mask, bias) if t is not None and t.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, upstream(out))]


@pytest.mark.parametrize("kind", ["none", "bool", "float", "bias", "causal"])
def test_no_recompilation_per_length(device: str, kind: str) -> None:
    """One graph for the first length, one for all others."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for length in (4, 7, 128, 129, 33):
        got = run(compiled, device, length, kind, 0.5)
        for g, right in zip(got, run(attention, device, length, kind, 0.5), strict=True):
            torch.testing.assert_close(g, right)
            assert g.stride() == right.stride()
    assert counter.frame_count <= 2


def test_another_scale(device: str) -> None:
    """The scale is never baked into a graph that a second scale uses."""
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for scale in (0.5, 0.25, -1.5):
        got = run(compiled, device, 7, "bool", scale)
        for g, right in zip(got, run(attention, device, 7, "bool", scale), strict=True):
            torch.testing.assert_close(g, right)


def test_dynamic_from_the_start(device: str) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=True)
    for length in (4, 7, 128, 129):
        got = run(compiled, device, length, "bool", 0.5)
        for g, right in zip(got, run(attention, device, length, "bool", 0.5), strict=True):
            assert torch.equal(g, right)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy_of_compiled_code(device: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(softmax, backend="aot_eager", fullgraph=True)
    scores = make_scores((2, 3, 9, 20), dtype, device)
    bias = make_scores((3, 9, 20), dtype, device, size=0.1)
    check(compiled, scores, random_mask((2, 1, 1, 20), device), 0.5, True, bias=bias)


@needs_compiler
def test_inductor(device: str) -> None:
    """The default backend, dynamic shapes, forward and backward; operators are really called."""
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    before = sms_plugin.call_counts()
    for length in (7, 128, 129):
        got = run(compiled, device, length, "bool", 0.5)
        for g, right in zip(got, run(attention, device, length, "bool", 0.5), strict=True):
            torch.testing.assert_close(g, right)
    after = sms_plugin.call_counts()
    for op, by_device in after.items():
        assert by_device[device] == before[op][device] + 6  # three compiled, three eager


@needs_compiler
def test_compiled_implementation(device: str) -> None:
    """`compiled` is the native chain under torch.compile, with the same values."""
    scores = make_scores((2, 3, 8, 8), torch.float32, device)
    mask = random_mask((2, 1, 1, 8), device)
    native = sms_plugin.ScaledMaskSoftmax("native")(scores, mask, 0.5)
    compiled = sms_plugin.ScaledMaskSoftmax("compiled")(scores, mask, 0.5)
    torch.testing.assert_close(compiled, native)


def test_module_compiles(device: str) -> None:
    module = torch.compile(
        sms_plugin.ScaledMaskSoftmax("fused"), backend="aot_eager", fullgraph=True
    )
    scores = make_scores((2, 8, 8), torch.float32, device)
    assert torch.equal(module(scores, is_causal=True), softmax(scores, is_causal=True))


def test_wrong_argument_in_compiled_code(device: str) -> None:
    """Under fullgraph the ValueError arrives as dynamo's own, with its text."""
    compiled = torch.compile(softmax, backend="eager", fullgraph=True)
    scores = torch.zeros(2, 3, device=device)
    with pytest.raises(Exception, match=r"broadcast|ValueError"):
        compiled(scores, torch.zeros(7, device=device))


def test_export(device: str) -> None:
    class Attention(torch.nn.Module):
        def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
            return softmax(scores, mask, 0.5, True)

    length = torch.export.Dim("length", min=4, max=4096)
    shapes = {"scores": {1: length, 2: length}, "mask": {0: length}}
    arguments = (make_scores((2, 9, 9), device=device), random_mask((9,), device))
    program = torch.export.export(Attention(), arguments, dynamic_shapes=shapes)
    scores, mask = make_scores((2, 33, 33), device=device), random_mask((33,), device)
    assert torch.equal(program.module()(scores, mask), softmax(scores, mask, 0.5, True))


def _squared(softmax: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda scores: softmax(scores, None, 0.5, True).pow(2).sum()


TRACED = {
    "jvp": lambda f, x: func.jvp(lambda s: f(s, None, 0.5, True), (x,), (x.cos(),))[1],
    "jacfwd": lambda f, x: func.jacfwd(lambda s: f(s, None, 0.5, True))(x),
    "grad": lambda f, x: func.grad(_squared(f))(x),
    "vmap of grad": lambda f, x: func.vmap(func.grad(_squared(f)))(x),
    "jvp of grad": lambda f, x: func.jvp(func.grad(_squared(f)), (x,), (x.cos(),))[1],
    "hessian": lambda f, x: func.hessian(_squared(f))(x),
}


@pytest.mark.parametrize("transform", TRACED)
def test_transforms_inside_compiled_code(device: str, transform: str) -> None:
    """The operator's registered formula alone would give a zero tangent without a word."""
    scores = make_scores((2, 3, 4), torch.float64, device)

    def plain(scores: Tensor, mask: None, scale: float, is_causal: bool) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(2)
        return (scores * scale).masked_fill(later, -torch.inf).softmax(-1)

    right = TRACED[transform](plain, scores)
    compiled = torch.compile(
        lambda x: TRACED[transform](sms_plugin.scaled_mask_softmax, x),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(scores), right, rtol=1e-9, atol=1e-12)
    assert right.abs().max() > 1e-3

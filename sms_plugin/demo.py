"""Half a minute on your own machine: is the fused operator right, how fast is it, what to use?

    python -m sms_plugin.demo [--device cpu|cuda]

Times are medians of forward + backward, with a causal mask; the arms take turns. On a GPU they are
the GPU's own, taken while it is kept busy, so that the host's time doesn't count.

Legend: B batch, H heads, T queries and keys, D head dimension.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sms_plugin import reference
from sms_plugin.extension import LibraryUnavailable
from sms_plugin.functional import scaled_mask_softmax
from sms_plugin.modules import ScaledMaskSoftmax

Shape = tuple[int, int, int, int]  # (B, H, T, D)

ARMS = ("native", "compiled", "fused", "SDPA")
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((4, 8, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64)),
    "cuda": ((16, 12, 512, 64), (8, 16, 1024, 64), (1, 16, 4096, 64)),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of the timings
SECONDS = 2.0  # for the rounds of one line of the table
MOST_ROUNDS = 50
BUSY_CYCLES = 1_500_000  # near a millisecond of the GPU: longer than the host needs for one call


@dataclass(frozen=True)
class Correctness:
    """How far the operator is from float64."""

    comparisons: int
    worst: float  # the largest error, in units of what the contract allows there

    @property
    def passed(self) -> bool:
        return self.worst <= 1  # False for NaN


def check(
    device: str, softmax: Callable[..., Tensor] = scaled_mask_softmax, length: int = 129
) -> Correctness:
    """Compare probs and grad_scores with the reference in float64, over a few masks and dtypes."""
    errors = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for arguments in _cases(dtype, device, length):
            errors += _errors(softmax, **arguments)
    worst = torch.stack(errors).max().item()  # NaN if one is
    return Correctness(len(errors), worst)


def _cases(dtype: torch.dtype, device: str, length: int) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    scores = normal(2, 3, length, length) * 8  # (B, H, T, T)
    kept = torch.tensor([length // 2, 0], device=device).view(2, 1, 1, 1)
    padding = torch.arange(length, device=device) >= kept  # (B, 1, 1, T); B = 1 keeps no key
    yield {"scores": scores, "scale": 0.125, "is_causal": True}
    yield {"scores": scores, "scale": 0.125, "mask": padding}
    yield {
        "scores": scores,
        "scale": 0.125,
        "is_causal": True,
        "mask": padding[:1].float() * -3,
        "bias": normal(1, 3, length, length),
    }


def _errors(softmax: Callable[..., Tensor], scores: Tensor, **options: Any) -> list[Tensor]:
    """The largest error over the allowed one, of probs and of grad_scores; docs/contract.md."""
    is_short = scores.dtype in (torch.float16, torch.bfloat16)
    scores = scores.detach().requires_grad_()
    probs = softmax(scores, **options)
    grad_probs = torch.randn(probs.shape, generator=torch.Generator().manual_seed(1))
    grad_probs = grad_probs.to(probs)
    (grad_scores,) = torch.autograd.grad(probs, scores, grad_probs)

    exact = reference.scaled_mask_softmax(scores.detach(), **options, dtype=torch.float64)
    size = _largest_z(scores, exact, **options)  # D of the contract, (B, H, T, 1)
    relative = 8 * 2.0**-24 * (1 + size)
    if is_short:
        right = exact.to(scores.dtype).double()
        allowed = _ulp(right, scores.dtype) + relative * exact
    else:
        right, allowed = exact, relative * exact + torch.finfo(scores.dtype).tiny
    forward = _over(probs.double() - right, torch.where(exact > 0, allowed, 0))

    p = probs.detach().double() if is_short else exact  # 16 bits: as saved
    g = torch.where(p > 0, grad_probs.double(), 0)
    scale = options["scale"]
    grad_right = scale * p * (g - (p * g).sum(-1, keepdim=True))
    slope = p * (g.abs() + (p * g).abs().sum(-1, keepdim=True))
    unit = torch.finfo(scores.dtype).eps / 2
    allowed = (4 * unit if is_short else relative) * abs(scale) * slope
    allowed = allowed + 2 * torch.finfo(scores.dtype).smallest_normal * 2 * unit
    backward = _over(grad_scores.double() - grad_right, torch.where(p > 0, allowed, 0))
    return [forward, backward]


def _largest_z(
    scores: Tensor,
    exact: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    z = scores.detach().double() * scale
    for term in (mask, bias):
        if term is not None and term.dtype != torch.bool:
            z = z + term.double()
    return torch.where(exact > 0, z.abs(), 0).amax(-1, keepdim=True)


def _ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of each of these float64 values of `dtype`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(values, info.eps / 2), exponent)


def _over(error: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(error == 0, 0, error.abs() / allowed).max()


def fitting(shapes: Sequence[Shape], device: str, dtype: torch.dtype) -> list[Shape]:
    """The shapes for which the GPU has room: the native chain holds ten tensors like the scores."""
    if device == "cpu":
        return list(shapes)
    free, _ = torch.cuda.mem_get_info()
    return [(B, H, T, D) for B, H, T, D in shapes if 10 * B * H * T * T * dtype.itemsize < free]


@dataclass
class Line:
    """One line of the table."""

    what: str  # "softmax" or "attention"
    shape: Shape
    ms: dict[str, float] = field(default_factory=dict)  # medians, by arm
    missing: dict[str, str] = field(default_factory=dict)  # why an arm has no time


def measure(
    shapes: Sequence[Shape],
    device: str,
    dtype: torch.dtype,
    *,
    seconds: float = SECONDS,
) -> Iterator[Line]:
    """Time softmax and attention of each shape; `seconds` is for the rounds of one line."""
    for shape, (what, make) in itertools.product(
        shapes, (("softmax", _softmax_arms), ("attention", _attention_arms))
    ):
        if what == "softmax":
            torch.compiler.reset()  # compiled for this very shape, not for any: that is faster
        arms, line = make(shape, device, dtype), Line(what, shape)
        for arm in list(arms):
            try:
                _warm_up(arms[arm])
            except LibraryUnavailable:
                raise
            except Exception as error:  # torch.compile fails in many ways; memory may be short
                line.missing[arm] = _reason(error)
                del arms[arm]
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        start = time.perf_counter()
        while any(len(taken) < MOST_ROUNDS for taken in times.values()):
            for arm, run in arms.items():
                times[arm].append(_milliseconds(run, device))
            if time.perf_counter() - start > seconds:
                break
        line.ms = {arm: statistics.median(taken) for arm, taken in times.items()}
        yield line


def _warm_up(run: Callable[[], object]) -> None:
    """Twice, for builds, compilations and caches; compilers warn of things that matter to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
        run()


def _softmax_arms(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    B, H, T, D = shape
    scores = torch.randn(B, H, T, T, device=device, dtype=dtype, requires_grad=True)
    grad_probs = torch.randn(B, H, T, T, device=device, dtype=dtype)

    def arm(impl: str) -> Callable[[], object]:
        softmax = ScaledMaskSoftmax(impl)
        return lambda: torch.autograd.grad(
            softmax(scores, scale=D**-0.5, is_causal=True), scores, grad_probs
        )

    return {impl: arm(impl) for impl in ARMS if impl != "SDPA"}


def _attention_arms(
    shape: Shape, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    B, H, T, D = shape
    inputs = [
        torch.randn(B, H, T, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    ]
    grad_out = torch.randn(B, H, T, D, device=device, dtype=dtype)

    def arm(name: str) -> Callable[[], object]:
        softmax = ScaledMaskSoftmax(name) if name != "SDPA" else None

        def run() -> object:
            q, k, v = inputs
            if softmax is None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(-2, -1)  # (B, H, T, T)
                out = softmax(scores, scale=D**-0.5, is_causal=True) @ v  # (B, H, T, D)
            return torch.autograd.grad(out, inputs, grad_out)

        return run

    return {name: arm(name) for name in ARMS}


def _milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _reason(error: Exception) -> str:
    """The first line of an error that says something; compilers print pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def as_text(lines: Sequence[Line]) -> str:
    """The table, and below it why an arm is missing."""
    if not lines:
        return "no shape fits into the GPU's free memory"
    rows = [["", "B x H x T x D", *(f"{arm} ms" for arm in ARMS)]]
    notes: dict[str, str] = {}
    for line in lines:
        cells = []
        for arm in ARMS:
            if arm in line.missing:
                notes.setdefault(line.missing[arm], f"{arm} failed")
            gone = "failed" if arm in line.missing else "-"
            cells.append(f"{line.ms[arm]:.3g}" if arm in line.ms else gone)
        rows.append([line.what, " x ".join(map(str, line.shape)), *cells])
    texts = [f"{a:<11}{b:<20}" + "".join(f"{cell:>13}" for cell in cells) for a, b, *cells in rows]
    return "\n".join([*texts, *(f"{arm}: {reason}" for reason, arm in notes.items())])


def advice(lines: Sequence[Line]) -> str:
    """Which one to use, by the largest shape."""
    by_kind = {line.what: line for line in lines}
    softmax, attention = by_kind["softmax"].ms, by_kind["attention"].ms
    times = ", ".join(f"{arm} {ms:.3g} ms" for arm, ms in sorted(softmax.items(), key=_by_time))
    whole = ", ".join(f"{arm} {ms:.3g} ms" for arm, ms in sorted(attention.items(), key=_by_time))
    return (
        "Use F.scaled_dot_product_attention for plain attention, whose probabilities nobody reads "
        f"(here, in the last shape: {whole}), and the fused operator where you need them, a "
        f"trained bias or odd masks (the softmax alone: {times})."
    )


def _by_time(item: tuple[str, float]) -> float:
    return item[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sms_plugin.demo",
        description="Half a minute: is the fused operator right here, and how fast is it?",
    )
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    device = parser.parse_args(arguments).device
    if device == "cuda" and not has_gpu:
        parser.error("--device cuda: torch sees no GPU (`python -m sms_plugin.doctor` says why)")
    where = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        where = torch.cuda.get_device_name()
    dtype = DTYPES[device]
    print(f"torch {torch.__version__}, {where}", flush=True)
    try:
        found = check(device)
        verdict = "right" if found.passed else "WRONG"
        print(
            f"{verdict}: {found.comparisons} comparisons of probs and gradients with float64, in "
            f"float32, float16 and bfloat16; the largest error is {found.worst:.2f} times the "
            f"contract's bound\n{str(dtype)[6:]}, causal, forward + backward, median milliseconds:",
            flush=True,
        )
        lines = list(measure(fitting(SHAPES[device], device, dtype), device, dtype))
    except LibraryUnavailable as error:
        print(f"{error}\n`python -m sms_plugin.doctor` says more", file=sys.stderr)
        return 1
    print(as_text(lines))
    if lines:
        print(advice(lines))
    has_all = bool(lines) and not any("fused" in line.missing for line in lines)
    return 0 if found.passed and has_all else 1


if __name__ == "__main__":
    sys.exit(main())

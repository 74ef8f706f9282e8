"""A first timing of the fused operator against the native chain.

    python scripts/time_softmax.py [--device cpu|cuda] [--out FILE.csv]

GPU: CUDA events around one call, while the GPU is kept busy so that the host's time doesn't count;
cold buffers of 256 MB or more in rotation, past every L2 cache; medians. Effective TB/s are the
bytes that must move over the time: scores, probs, gradients, mask and bias once each, of a causal
square half of what is read. CPU: [8, 16, 512, 512] forward + backward, fused and native in turn.

Legend: B batch, H heads, T queries and keys.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

import sms_plugin  # noqa: E402

LENGTHS = (256, 512, 1000, 1023, 1024, 1025, 2048, 4096, 8192, 16384)
CASES = ("dense", "causal", "padding", "bias")
SYSTEMS = ("fused", "native")
BUFFER_BYTES = 256 * 2**20
BUSY_CYCLES = 1_500_000  # near a millisecond: longer than the host needs for one call
ROUNDS = 15


@dataclass
class Timing:
    machine: str
    torch: str
    dtype: str
    case: str
    shape: str
    direction: str
    system: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    tb_per_s: float


def percentiles(times: list[float]) -> tuple[float, float, float]:
    """(p20, p50, p80)"""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def make_inputs(
    case: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> dict[str, Any]:
    """The arguments of one call; scores and bias want a gradient."""
    B, H, T, _ = shape
    scores = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
    arguments: dict[str, Any] = {"scores": scores, "scale": 0.125, "is_causal": case == "causal"}
    if case == "padding":
        lengths = T - torch.arange(B, device=device) * (T // 4) // B
        arguments["mask"] = torch.arange(T, device=device) >= lengths.view(
            B, 1, 1, 1
        )  # (B, 1, 1, T)
    if case == "causal mask":
        arguments["mask"] = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    if case == "bias":
        bias = torch.randn(1, H, T, T, dtype=dtype, device=device)
        arguments["bias"] = bias.requires_grad_()
    return arguments


def wanted(arguments: dict[str, Any]) -> list[Tensor]:
    return [v for v in arguments.values() if isinstance(v, Tensor) and v.requires_grad]


def ideal_bytes(arguments: dict[str, Any], direction: str) -> float:
    """What must be read and written: each operand once."""
    scores = arguments["scores"]
    moved = (1.5 if arguments["is_causal"] else 2.0) * scores.nbytes
    if direction == "backward":
        moved = (2.0 if arguments["is_causal"] else 3.0) * scores.nbytes
        return moved + (arguments["bias"].nbytes if "bias" in arguments else 0)
    return moved + sum(arguments[name].nbytes for name in ("mask", "bias") if name in arguments)


def on_gpu(calls: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each call but the first of each buffer set, which warm up."""
    times = []
    for index in range(ROUNDS + len(calls)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        result = calls[index % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        del result
        if index >= len(calls):
            times.append(begin.elapsed_time(end))
    return times


def time_gpu(dtype: torch.dtype, case: str, length: int) -> Iterator[Timing]:
    rows = max(1, BUFFER_BYTES // (length * length * dtype.itemsize))  # B * H
    heads = min(8, rows)
    shape = (rows // heads, heads, length, length)
    sets = [make_inputs(case, dtype, shape, "cuda") for _ in range(2)]
    grads = [torch.randn_like(s["scores"]).detach() for s in sets]
    for system in SYSTEMS:
        softmax = sms_plugin.ScaledMaskSoftmax(system)

        def forward(arguments: dict[str, Any], softmax: Any = softmax) -> Callable[[], object]:
            return lambda: softmax(**arguments)

        def backward(arguments: dict[str, Any], grad: Tensor, softmax: Any = softmax) -> Any:
            probs, inputs = softmax(**arguments), wanted(arguments)
            return lambda: torch.autograd.grad(probs, inputs, grad, retain_graph=True)

        for direction in ("forward", "backward"):
            if direction == "forward":
                calls = [forward(s) for s in sets]
            else:
                calls = [backward(s, g) for s, g in zip(sets, grads, strict=True)]
            p20, p50, p80 = percentiles(on_gpu(calls))
            del calls
            yield timing(dtype, case, shape, direction, system, (p20, p50, p80), sets[0])


def timing(
    dtype: torch.dtype,
    case: str,
    shape: tuple[int, ...],
    direction: str,
    system: str,
    ms: tuple[float, float, float],
    arguments: dict[str, Any],
) -> Timing:
    moved = sum(ideal_bytes(arguments, d) for d in ("forward", "backward") if d in direction)
    on_cuda = arguments["scores"].is_cuda
    return Timing(
        machine=torch.cuda.get_device_name() if on_cuda else cpu_name(),
        torch=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
        case=case,
        shape="x".join(str(n) for n in shape),
        direction=direction,
        system=system,
        ms_p20=round(ms[0], 4),
        ms_p50=round(ms[1], 4),
        ms_p80=round(ms[2], 4),
        tb_per_s=float(f"{moved / ms[1] / 1e9:.4g}"),
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def time_cpu(
    dtype: torch.dtype, case: str, shape: tuple[int, ...], rounds: int
) -> Iterator[Timing]:
    arguments = make_inputs(case, dtype, shape, "cpu")
    inputs, grad = wanted(arguments), torch.randn(shape).to(dtype)
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for index in range(rounds + 1):
        for system in SYSTEMS:
            softmax = sms_plugin.ScaledMaskSoftmax(system)
            start = time.perf_counter()
            torch.autograd.grad(softmax(**arguments), inputs, grad)
            if index > 0:
                times[system].append((time.perf_counter() - start) * 1e3)
    for system in SYSTEMS:
        p = percentiles(times[system])
        yield timing(dtype, case, shape, "forward + backward", system, p, arguments)


def report(timings: list[Timing]) -> None:
    """One line for each pair: fused, native, and how many times faster fused is."""
    natives = {key(t): t for t in timings if t.system == "native"}
    pairs = [(t, natives[key(t)]) for t in timings if t.system == "fused"]
    form = "{:<9} {:<12} {:<18} {:<19} {:>10} {:>10} {:>7} {:>7}"
    columns = ("dtype", "case", "shape", "direction", "fused ms", "native ms", "times", "TB/s")
    print(form.format(*columns))
    ratios = []
    for ours, theirs in pairs:
        ratios.append(theirs.ms_p50 / ours.ms_p50)
        numbers = (f"{ours.ms_p50:.3f}", f"{theirs.ms_p50:.3f}", f"{ratios[-1]:.2f}")
        line = form.format(*key(ours), *numbers, f"{ours.tb_per_s:.3g}")
        print(line if ratios[-1] >= 1 else line + "  slower than native")
    slower = sum(ratio < 1 for ratio in ratios)
    print(
        f"fused is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the native chain, "
        f"slower in {slower} of {len(ratios)} timings"
    )


def key(timing: Timing) -> tuple[str, str, str, str]:
    return timing.dtype, timing.case, timing.shape, timing.direction


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Times the fused operator against the native chain."
    )
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="write every timing there")
    parser.add_argument("--rounds", type=int, default=9, help="of each system on the CPU")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: torch.cuda.is_available() is False; use --device cpu")

    timings: list[Timing] = []
    if options.device == "cuda":
        for dtype in (torch.bfloat16, torch.float32):
            for case in CASES:
                for length in LENGTHS:
                    timings += time_gpu(dtype, case, length)
                    torch.cuda.empty_cache()
    else:
        for dtype in (torch.float32, torch.bfloat16):
            for case in ("dense", "causal", "causal mask"):
                timings += time_cpu(dtype, case, (8, 16, 512, 512), options.rounds)
    print(f"{timings[0].machine}, torch {torch.__version__}")
    report(timings)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Timing)])
            writer.writeheader()
            writer.writerows(asdict(t) for t in timings)
    return 0


if __name__ == "__main__":
    sys.exit(main())

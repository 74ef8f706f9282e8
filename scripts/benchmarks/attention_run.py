"""Measures attentions with a learned bias: every system and the floor, in one run.

Legend: B batch, H heads, T queries and keys, D width of a head.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from scripts.benchmarks.attention_record import (
    BIAS_CASE,
    BOTH,
    FLOOR_GOAL,
    NOT_RUN,
    AttentionRecord,
    failure,
)
from scripts.benchmarks.attention_rows import (
    AttentionRow,
    Inputs,
    bytes_of_call,
    make_inputs,
    products,
    softmax_traffic,
)
from scripts.benchmarks.attention_systems import Attention, make_attention
from scripts.benchmarks.roofs import Roofs, Stream
from scripts.benchmarks.timing import Percentiles, buffers_needed, time_cpu, time_cuda

FLOOR = "floor"


def measure_row(
    row: AttentionRow,
    dtype: torch.dtype,
    device: str,
    systems: Sequence[str],
    rounds: int,
    roofs: Roofs,
) -> Iterator[AttentionRecord]:
    """Forward and backward of one row by each system; the floor comes first."""
    floor = floor_of(row, dtype, device, rounds, roofs)
    name = str(dtype).removeprefix("torch.")
    describe = functools.partial(
        AttentionRecord, name, BIAS_CASE + row.model, row.shape, BOTH, floor_ms=floor.ms_p50
    )
    yield describe(FLOOR, floor)
    count = buffers_needed(bytes_of_call(row, dtype)) if device == "cuda" else 1
    sets = [make_inputs(row, dtype, device, seed) for seed in range(count)]
    for system in systems:
        torch.compiler.reset()  # for this very shape, not for any: that is faster
        goal = FLOOR_GOAL if system == "fused" and device == "cuda" else None
        try:
            calls = make_calls(make_attention(system, sets[0]), sets)
            peak = peak_gib(calls[0]) if device == "cuda" else None
            ms = timed(calls, device, rounds)
        except Exception as error:  # compilers fail in many ways; the table says how
            yield describe(system, NOT_RUN, goal=goal, note=failure(error))
        else:
            yield describe(system, ms, goal=goal, peak_gib=peak)
        calls = []
        release(device)


def make_calls(attention: Attention, sets: Sequence[Inputs]) -> list[Callable[[], object]]:
    """Forward and backward of each set of inputs."""

    def call(inputs: Inputs) -> object:
        return torch.autograd.grad(attention(inputs), inputs.wanted, inputs.grad_out)

    return [functools.partial(call, inputs) for inputs in sets]


def timed(calls: Sequence[Callable[[], object]], device: str, rounds: int) -> Percentiles:
    if device == "cuda":
        return time_cuda(calls, rounds=rounds)
    return time_cpu({"": calls[0]}, max(2, rounds))[""]


def peak_gib(call: Callable[[], object]) -> float:
    """GiB that a call holds at most, beyond what was there before."""
    for _ in range(2):  # the first one compiles, and makes cuBLAS its workspace
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def release(device: str) -> None:
    """Give what the last system held back, so that each one begins with the same memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def floor_of(
    row: AttentionRow, dtype: torch.dtype, device: str, rounds: int, roofs: Roofs
) -> Percentiles:
    """The six matrix products as torch runs them, and the softmax's bytes at a stream's speed."""
    count = buffers_needed(bytes_of_call(row, dtype)) if device == "cuda" else 1
    with torch.no_grad():
        ms = timed([products(row, dtype, device) for _ in range(count)], device, rounds)
    release(device)
    moved = softmax_traffic(row, dtype)
    softmax = sum(traffic.total / roofs.tb_per_s(traffic) / 1e9 for traffic in moved)  # ms
    note = f"products {ms.ms_p50:.3g} ms, softmax {softmax:.3g} ms"
    return Percentiles(ms.ms_p20 + softmax, ms.ms_p50 + softmax, ms.ms_p80 + softmax, note)


def make_roofs(device: str, rounds: int) -> Roofs:
    return Roofs(rounds) if device == "cuda" else Roofs(rounds, measure=_cpu_stream)


def _cpu_stream(stream: Stream) -> float:
    """TB/s of a copy of as many bytes."""
    source = torch.randn(stream.total // 8)
    target = torch.empty_like(source)
    ms = time_cpu({"": lambda: target.copy_(source)}, 2)[""].ms_p50
    return stream.total / ms / 1e9

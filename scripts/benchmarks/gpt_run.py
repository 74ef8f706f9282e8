"""Measures training steps of the GPT: time, peak memory, seconds to the first step.

Legend: B batch, T positions, H heads, D width of a head.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.attention_record import (
    BOTH,
    CHANGING_CASE,
    GPT_CASE,
    GPT_GOALS,
    NOT_RUN,
    AttentionRecord,
    failure,
)
from scripts.benchmarks.attention_run import release
from scripts.benchmarks.gpt import GPT, Size
from scripts.benchmarks.timing import Percentiles, percentiles

# system: (attention, whether the whole model is compiled)
SYSTEMS = {
    "native": ("native", False),
    "compiled": ("native", True),
    "fused": ("fused", False),
    "fused + compiled": ("fused", True),
    "SDPA": ("SDPA", False),
    "SDPA + compiled": ("SDPA", True),
}
LENGTHS = (512, 1024, 2048, 4096)
CHANGING_LENGTH = 1024  # where lengths change, they are from about half of it up to it
DIFFERENT_LENGTHS = 8
Batch = tuple[Tensor, Tensor]  # inputs and targets, (B, T) each
CPU_SIZE = Size(layers=2, heads=2, width=32, max_len=256)


def tokens_per_step(T: int) -> int:
    return 8192 if T >= 4096 else 16384


def different_lengths(T: int) -> list[int]:
    """T, and shorter ones down to 9/16 of it: multiples of 8, as batches are padded."""
    steps = range(1, DIFFERENT_LENGTHS)
    return [T, *(T - max(8, i * T // 16 // 16 * 16 + 8) for i in steps)]


def measure_gpt(
    T: int, system: str, device: str, *, size: Size, tokens: int, rounds: int, changing: bool
) -> Iterator[AttentionRecord]:
    """Steps of length T, then, if wanted, steps whose lengths change.

    A failure is a record with a note. Every compiled system starts with empty caches of torch's
    compiler, so that its seconds to the first step are those of a new machine.
    """
    shape = f"{tokens // T}x{size.heads}x{T}x{size.width // size.heads}"
    goal = GPT_GOALS.get(T) if system == "fused" else None
    cases = (GPT_CASE, CHANGING_CASE) if changing else (GPT_CASE,)
    done = 0
    try:
        for fields in _with_empty_caches(
            _cases(T, system, device, size, tokens // T, rounds, changing)
        ):
            fixed = cases[done] == GPT_CASE
            done += 1
            yield AttentionRecord(
                "bfloat16", cases[done - 1], shape, BOTH, system, goal=goal if fixed else None,
                **fields,
            )  # fmt: skip
    except Exception as error:  # compilers fail in many ways, and memory may be short
        for case in cases[done:]:
            yield AttentionRecord(
                "bfloat16", case, shape, BOTH, system, NOT_RUN, note=failure(error)
            )
    torch.compiler.reset()
    release(device)


def _with_empty_caches(fields: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from torch._inductor.utils import fresh_cache  # no public name empties all of them

    torch.compiler.reset()
    with fresh_cache():
        yield from fields


def _cases(
    T: int, system: str, device: str, size: Size, B: int, rounds: int, changing: bool
) -> Iterator[dict[str, Any]]:
    attention, is_compiled = SYSTEMS[system]
    others = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0
    step = Step(attention, is_compiled, size, device)
    batch = make_batch(B, T, size, device)
    first = seconds_of(lambda: step(batch), device)
    ms, peak = time_steps([lambda: step(batch)], device, rounds)
    yield {"ms": ms, "peak_gib": peak and peak - others, "first_step_s": first}
    if changing:
        lengths = different_lengths(T)
        batches = [make_batch(B, length, size, device) for length in lengths]
        steps: list[Callable[[], None]] = [lambda b=b: step(b) for b in batches]  # type: ignore[misc]
        first += seconds_of(lambda: [run() for run in steps], device)
        ms, peak = time_steps(steps, device, max(2, rounds // 4))
        note = f"mean step over {len(lengths)} lengths from {lengths[-1]} to {T}"
        memory = peak and peak - others
        yield {"ms": ms, "peak_gib": memory, "first_step_s": first, "note": note}


class Step:
    """Forward and backward of one batch under bfloat16 autocast; gradients begin as None."""

    def __init__(self, attention: str, is_compiled: bool, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(attention, size).to(device)
        self.loss_of: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(self.model) if is_compiled else self.model
        )
        self.device = device

    def __call__(self, batch: Batch) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss_of(*batch)
        loss.backward()


def make_batch(B: int, T: int, size: Size, device: str) -> Batch:
    """(B, T) random tokens, and the same shifted as targets.

    They are cut here: torch 2.11 compiles a model that cuts them for one length only, and fails at
    the second ("shape ... is invalid for input of size 0").
    """
    generator = torch.Generator(device).manual_seed(T)
    tokens = torch.randint(size.vocabulary, (B, T + 1), generator=generator, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def seconds_of(call: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def time_steps(
    steps: Sequence[Callable[[], None]], device: str, rounds: int
) -> tuple[Percentiles, float | None]:
    """Milliseconds of a step in a running training, and the peak in GiB on a GPU.

    Steps follow one another without a synchronization, so the host runs ahead of the GPU where it
    is the faster one, and counts where it isn't, as in a training. Of several steps a round is all
    of them in turn, and counts by its mean.
    """

    def one_round() -> None:
        for step in steps:
            step()

    warm_up = 3 if len(steps) == 1 else 1
    for _ in range(warm_up):
        one_round()
    if device == "cpu":
        times = [seconds_of(one_round, device) * 1e3 / len(steps) for _ in range(rounds)]
        return percentiles(times), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    one_round()  # the GPU is at work when the first timed step is queued
    marks = []
    for _ in range(rounds + 1):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
        if len(marks) <= rounds:
            one_round()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / len(steps) for a, b in itertools.pairwise(marks)]
    return percentiles(times), torch.cuda.max_memory_allocated() / 2**30

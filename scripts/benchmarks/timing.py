"""How a call is timed: cold on a GPU, in turn on a CPU, warm and small, and on the host alone."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], object]

COLD_BYTES = 256 * 2**20  # four times the L2 of the largest card
CHUNK = 20  # calls between two synchronizations: fewer than the launch queue holds
UNCAPTURED_CALLS = 20  # of which the launch queue holds every kernel
TRIES = 8  # each holds the GPU back twice as long as the one before


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds of one call: 20th, 50th and 80th percentile of all rounds."""

    ms_p20: float
    ms_p50: float
    ms_p80: float
    note: str = ""  # how it was measured, where there is more than one way


class HostTooSlow(RuntimeError):
    """The GPU ran out of work while a call was timed: the host's time would be in the result."""


class Clock(Protocol):
    """What `time_cuda` asks of a device; a test passes one of its own."""

    def mark(self) -> Any: ...  # a point in the device's stream

    def hold(self, seconds: float) -> None: ...  # keep the device busy for that long

    def passed(self, mark: Any) -> bool: ...  # whether the device is past it

    def wait(self) -> None: ...  # until the device has done everything

    def ms_between(self, begin: Any, end: Any) -> float: ...

    def host_seconds(self) -> float: ...


class CudaClock:
    """Events in torch's current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _cycles_per_second(torch.cuda.current_device())))

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait(self) -> None:
        torch.cuda.synchronize()

    def ms_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def host_seconds(self) -> float:
        return time.perf_counter()


@functools.cache
def _cycles_per_second(device: int) -> float:
    clock, cycles = CudaClock(), 10_000_000
    torch.cuda._sleep(cycles)  # loads the kernel, and wakes the card
    begin = clock.mark()
    torch.cuda._sleep(cycles)
    end = clock.mark()
    clock.wait()
    return cycles / (clock.ms_between(begin, end) * 1e-3)


def percentiles(times: Sequence[float], note: str = "") -> Percentiles:
    """Of milliseconds, two or more."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return Percentiles(cuts[1], cuts[4], cuts[7], note)


def buffers_needed(bytes_per_call: float) -> int:
    """How many sets of buffers, used in turn, are out of the L2 when their turn comes."""
    return max(2, math.ceil(COLD_BYTES / bytes_per_call))


def time_cuda(
    calls: Sequence[Call],
    *,
    warm_up: int = 10,
    rounds: int = 100,
    chunk: int = CHUNK,
    clock: Clock | None = None,
) -> Percentiles:
    """Milliseconds that the GPU takes for one call, with cold operands.

    An event before and one after each call, calls in rotation. A chunk of calls is queued while the
    GPU is held back, so that the host's time isn't in between; where the GPU was let go too early,
    the chunk is repeated and held back for longer.

    Args:
        calls: the same call on operands of its own each, as many as `buffers_needed` says. What
            they return is kept until the other calls have run: results are cold, too.
        warm_up: calls that aren't counted; at least one each.
        rounds: timed calls.
        chunk: calls between two synchronizations.

    Raises:
        HostTooSlow: the GPU could not be kept busy; a call that waits for the GPU is of that kind.
    """
    clock = clock or CudaClock()
    kept: deque[object] = deque(maxlen=len(calls) - 1)

    def run(index: int) -> None:
        kept.append(calls[index % len(calls)]())

    count = max(warm_up, len(calls))
    for index in range(count):  # compilers, caches and the allocator
        run(index)
    clock.wait()
    began = clock.host_seconds()
    for index in range(len(calls)):
        run(index)
    per_call = (clock.host_seconds() - began) / len(calls) + 20e-6  # two events
    clock.wait()

    times: list[float] = []
    done = 0
    hold = 2 * chunk * per_call
    tries = 0
    while done < rounds:
        size = min(chunk, rounds - done)
        clock.hold(hold)
        released = clock.mark()
        marks = []
        for index in range(done, done + size):
            begin = clock.mark()
            run(index)
            marks.append((begin, clock.mark()))
        starved = clock.passed(released)
        clock.wait()
        if starved:
            tries += 1
            if tries == TRIES:
                raise HostTooSlow(
                    f"{size} calls could not be queued within {hold * 1e3:.0f} ms: the call waits "
                    "for the GPU, or the host is overloaded; time it with fewer programs beside it"
                )
            hold *= 2
            continue
        times += [clock.ms_between(begin, end) for begin, end in marks]
        done += size
    return percentiles(times)


def time_cpu(
    calls: dict[str, Call],
    rounds: int = 9,
    warm_up: int = 1,
    *,
    repeats: int = 1,
    wait: Call | None = None,
) -> dict[str, Percentiles]:
    """Milliseconds of the calling thread for one call of each system.

    Args:
        calls: timed in turn: what disturbs one disturbs all.
        rounds: over which the percentiles are.
        warm_up: rounds before those.
        repeats: calls of one system in a row, of which the mean counts. They are small enough for a
            device to keep up with the host.
        wait: what ends them, such as `torch.cuda.synchronize`; outside of the time.
    """
    times: dict[str, list[float]] = {system: [] for system in calls}
    for index in range(warm_up + rounds):
        for system, call in calls.items():
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            took = time.perf_counter() - began
            if wait is not None:
                wait()
            if index >= warm_up:
                times[system].append(took / repeats * 1e3)
    note = f"loops of {repeats} calls, in turn" if repeats > 1 else ""
    return {system: percentiles(of_system, note) for system, of_system in times.items()}


def wake_up(seconds: float = 0.5) -> None:
    """Keep the GPU copying for a while: its clocks are those of work from then on."""
    source = torch.randn(2**26, device="cuda")
    target = torch.empty_like(source)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            target.copy_(source)
        torch.cuda.synchronize()


@functools.cache
def side_stream(device: int = 0) -> torch.cuda.Stream:
    """The stream of `time_latency`: a backward runs in the stream of its forward."""
    return torch.cuda.Stream(device)


def time_latency(call: Call, *, calls: int = 50, rounds: int = 20) -> Percentiles:
    """Milliseconds of one call in a stream of equal calls: warm, small problems.

    The calls are captured into a CUDA graph, so that the host plays no part; the note says so. What
    can't be captured runs back to back behind a GPU that is held back, and the note says that.
    A call that runs a backward must have had its forward within `with torch.cuda.stream(
    side_stream())`, and is best timed in there.
    """
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    chunk = CHUNK
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        replay: Call
        try:
            replay, note = _captured(call, calls, stream), f"CUDA graph of {calls} calls"
        except RuntimeError as error:  # also torch's own subclasses: not capturable
            torch.cuda.synchronize()
            reason = str(error).strip().splitlines()[0][:80] if str(error).strip() else "?"
            calls, chunk = UNCAPTURED_CALLS, 1
            replay, note = (lambda: _repeat(call, calls)), f"back to back, no graph: {reason}"
        measured = time_cuda([replay], warm_up=3, rounds=rounds, chunk=chunk)
    torch.cuda.current_stream().wait_stream(stream)
    ms = (measured.ms_p20 / calls, measured.ms_p50 / calls, measured.ms_p80 / calls)
    return Percentiles(*ms, note)


def _repeat(call: Call, calls: int) -> None:
    for _ in range(calls):
        call()


def _captured(call: Call, calls: int, stream: torch.cuda.Stream) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _repeat(call, calls)
    return graph.replay

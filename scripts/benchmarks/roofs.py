"""What the memory can do: streams with a cell's own mix and number of bytes, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.benchmarks import cuda_library
from scripts.benchmarks.ideal import Traffic
from scripts.benchmarks.timing import Call, buffers_needed, time_cuda

ALIGNMENT = 256  # bytes; as torch's allocator has it
SAME = 0.02  # streams whose reads and writes differ by less are one and the same
MIX = 0.02  # how near to 1:1, 2:1 and 1:2 a torch operation must be to serve


@dataclass(frozen=True)
class Stream:
    """How many bytes are read from one and from another buffer, and written to a third."""

    first: int
    second: int
    out: int

    @property
    def total(self) -> int:
        return self.first + self.second + self.out


def stream_of(traffic: Traffic) -> Stream:
    """More reads than writes come from two buffers, as those of a backward do."""
    reads, writes = _whole(traffic.reads), _whole(traffic.writes)
    if reads <= 1.25 * writes:
        return Stream(reads, 0, writes)
    first = _whole(reads / 2)
    return Stream(first, reads - first, writes)


def _whole(count: float) -> int:
    """A multiple of the alignment, at least one."""
    return max(1, round(count / ALIGNMENT)) * ALIGNMENT


def torch_operation(stream: Stream) -> str | None:
    """The operation of torch with that mix: "copy" 1:1, "add" 2:1, "widen" 1:2 (to float32)."""
    reads, writes = stream.first + stream.second, stream.out
    for name, mix in (("copy", 1.0), ("add", 2.0), ("widen", 0.5)):
        if abs(reads / writes / mix - 1) < MIX:
            return name
    return None


class Roofs:
    """Measures each stream once and remembers it.

    Args:
        rounds: timed calls of each.
        measure: TB/s of a stream; a test passes its own.
    """

    def __init__(self, rounds: int = 100, measure: Callable[[Stream], float] | None = None) -> None:
        self.rounds = rounds
        self._measure = measure or self._fastest
        self._known: list[tuple[Traffic, float]] = []
        self._pool: Tensor | None = None

    def tb_per_s(self, traffic: Traffic) -> float:
        """The speed of the fastest stream with these reads and writes."""
        for known, speed in self._known:
            if _near(known.reads, traffic.reads) and _near(known.writes, traffic.writes):
                return speed
        speed = self._measure(stream_of(traffic))
        self._known.append((traffic, speed))
        return speed

    def _fastest(self, stream: Stream) -> float:
        sets = list(self._sets(stream))
        candidates = [[_kernel_call(stream, part, wide) for part in sets] for wide in (False, True)]
        operation = torch_operation(stream)
        if operation is not None:
            candidates.append([_torch_call(operation, part) for part in sets])
        best = min(time_cuda(calls, rounds=self.rounds).ms_p50 for calls in candidates)
        return stream.total / best / 1e9

    def _sets(self, stream: Stream) -> Iterator[Tensor]:
        """The bytes of each call: parts of one pool of random values, which stay random."""
        count = buffers_needed(max(stream.first, stream.out))
        if self._pool is None or self._pool.numel() < count * stream.total:
            self._pool = None  # freed before a larger one is made
            self._pool = torch.randn(count * stream.total // 4, device="cuda").view(torch.uint8)
        for index in range(count):
            yield self._pool[index * stream.total : (index + 1) * stream.total]


def _near(one: int, other: int) -> bool:
    return abs(one - other) <= SAME * max(one, other)


def _kernel_call(stream: Stream, part: Tensor, wide: bool) -> Call:
    library = cuda_library.load()
    first = part.data_ptr()
    second, out = first + stream.first, first + stream.first + stream.second
    arguments = (first, stream.first, second, stream.second, out, stream.out, int(wide))

    def call() -> None:
        error = library.sms_benchmark_stream(*arguments, cuda_library.current_stream())
        cuda_library.check(error, f"a stream of {stream}")

    return call


def _torch_call(operation: str, part: Tensor) -> Call:
    """On as many bytes as the stream has in all, each operand aligned."""
    if operation == "copy":
        source, target = part.view(torch.float32).chunk(2)
        return lambda: target.copy_(source)
    third = part.numel() // (3 * ALIGNMENT) * ALIGNMENT
    if operation == "add":
        one, other, total = (part[k * third :][:third].view(torch.float32) for k in range(3))
        return lambda: torch.add(one, other, out=total)
    narrow, wide = part[:third].view(torch.bfloat16), part[third : 3 * third].view(torch.float32)
    return lambda: wide.copy_(narrow)

"""A GPU on a clock of its own, for the protocol of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeGpu:
    """A clock whose device takes `call_ms` for a call; the host takes `host_seconds_per_call`."""

    call_ms: float = 2.0
    host_seconds_per_call: float = 1e-3
    never_ahead: bool = False
    host: float = 0.0
    device: float = 0.0  # when it will have done what is queued, in seconds
    holds: list[float] = field(default_factory=list)
    waits: int = 0
    calls: list[int] = field(default_factory=list)

    def mark(self) -> float:
        return self.device

    def hold(self, seconds: float) -> None:
        self.holds.append(seconds)
        self.device = max(self.device, self.host) + seconds

    def passed(self, mark: float) -> bool:
        return self.never_ahead or self.host > mark

    def wait(self) -> None:
        self.waits += 1
        self.host = max(self.host, self.device)

    def ms_between(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def host_seconds(self) -> float:
        return self.host

    def call(self, index: int) -> object:
        self.calls.append(index)
        self.host += self.host_seconds_per_call
        self.device = max(self.device, self.host) + self.call_ms * 1e-3
        return object()

"""Marks in time: on a GPU's stream without waiting for it, or by the host's monotonic clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A moment that was noted."""

    host_ns: int  # when the host noted it

    def is_known(self) -> bool:
        """Whether the moment has passed, so that it can be read without waiting."""

    def wait(self) -> None:
        """Block until the moment has passed."""


class Clock(Protocol):
    """Takes marks, and tells the time between two of them."""

    name: str

    def mark(self) -> Mark: ...

    def elapsed_ms(self, start: Mark, end: Mark) -> float: ...


@dataclass
class HostMark:
    host_ns: int

    def is_known(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostClock:
    """The host's monotonic clock: right where the work is done when a call returns."""

    name = "host"

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter_ns())

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        return host_ms(start, end)


@dataclass
class CudaMark:
    host_ns: int
    event: torch.cuda.Event

    def is_known(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaClock:
    """Events on the current stream of a device.

    An interval is what passes on the stream, so it includes its idle time while the host is late.
    """

    name = "cuda events"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return CudaMark(time.perf_counter_ns(), event)

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        assert isinstance(start, CudaMark) and isinstance(end, CudaMark)
        return start.event.elapsed_time(end.event)


def clock_for(device: torch.device) -> Clock:
    """Events where the work of `device` is asynchronous, else the host's clock."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def host_ms(start: Mark, end: Mark) -> float:
    return (end.host_ns - start.host_ns) / 1e6

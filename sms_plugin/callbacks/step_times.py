"""One training batch on the clock: which phase each moment belongs to, and the row it becomes."""

from __future__ import annotations

import csv
import enum
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from sms_plugin.callbacks.clock import Clock, Mark, host_ms
from sms_plugin.callbacks.whole_file import whole_file


class Phase(enum.Enum):
    """What a batch is doing; other time (zero_grad, hooks, logging) belongs to none."""

    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"


STEADY = "steady"  # the label of the rows that a summary is made of


@dataclass(frozen=True)
class StepRow:
    """A row of timing.csv; times in milliseconds by the device's clock, unless they say host."""

    fit: int  # 0 for the first `fit` that this callback saw in this folder
    epoch: int
    batch: int
    step: int  # optimizer steps before this batch
    label: str  # steady, or why a summary leaves the row out
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    step_ms: float  # from the start to the end of the batch
    forward_intervals: int  # how many were added up
    backward_intervals: int
    optimizer_intervals: int
    host_ms: float  # of the whole batch, as the host saw it
    data_wait_host_ms: float  # from the end of the batch (or validation) before to its start


@dataclass
class StepTimer:
    """Follows one batch from mark to mark.

    A phase that is open when another begins ends there. What follows a backward or an optimizer
    step is a further forward (manual optimization) only if a backward ends it. An optimizer that
    evaluates its closure again (LBFGS) does so within its own time: no hook tells that forward.
    """

    fit: int
    epoch: int
    batch: int
    step: int
    label: str
    data_wait_host_ms: float
    start: Mark
    end: Mark | None = None
    intervals: list[tuple[Phase, Mark, Mark]] = field(default_factory=list)
    _open: tuple[Phase, Mark] | None = None

    def __post_init__(self) -> None:
        self._open = (Phase.forward, self.start)

    def begin(self, phase: Phase, mark: Mark) -> None:
        """`phase` starts here: a backward, or an optimizer step."""
        if phase is Phase.optimizer:
            self._drop_further_forward()
        self._close(mark)
        self._open = (phase, mark)

    def finish(self, phase: Phase, mark: Mark) -> None:
        """`phase` ends here, if it is open; a further forward may follow."""
        if self._open is not None and self._open[0] is phase:
            self._close(mark)
            self._open = (Phase.forward, mark)

    def zero_grad(self, mark: Mark) -> None:
        """Ends the forward before it."""
        self._close(mark)

    def close(self, mark: Mark) -> None:
        """The batch ends here."""
        self._drop_further_forward()
        self._close(mark)
        self.end = mark

    def _close(self, mark: Mark) -> None:
        if self._open is not None:
            self.intervals.append((*self._open, mark))
            self._open = None

    def _drop_further_forward(self) -> None:
        if self.intervals and self._open is not None and self._open[0] is Phase.forward:
            self._open = None

    def row(self, clock: Clock) -> StepRow:
        """Read the clock; every mark must be known."""
        assert self.end is not None
        total = dict.fromkeys(Phase, 0.0)
        count = dict.fromkeys(Phase, 0)
        for phase, start, end in self.intervals:
            total[phase] += clock.elapsed_ms(start, end)
            count[phase] += 1
        return StepRow(
            fit=self.fit,
            epoch=self.epoch,
            batch=self.batch,
            step=self.step,
            label=self.label,
            forward_ms=total[Phase.forward],
            backward_ms=total[Phase.backward],
            optimizer_ms=total[Phase.optimizer],
            step_ms=clock.elapsed_ms(self.start, self.end),
            forward_intervals=count[Phase.forward],
            backward_intervals=count[Phase.backward],
            optimizer_intervals=count[Phase.optimizer],
            host_ms=host_ms(self.start, self.end),
            data_wait_host_ms=self.data_wait_host_ms,
        )


def write_rows(rows: Iterable[StepRow], path: Path) -> None:
    """Write timing.csv, whole or not at all."""
    with whole_file(path) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(StepRow)])
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
            )


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the middle of some times, and what nine in ten stay below."""

    median: float
    p90: float


def summarise(rows: Sequence[StepRow]) -> tuple[list[StepRow], dict[str, Spread]]:
    """The rows that count, and the spread of each column of times over them.

    Rows labelled otherwise than steady are left out; where there are no others, all count.
    """
    counted = [row for row in rows if row.label == STEADY] or list(rows)
    times: dict[str, Spread] = {}
    for column in fields(StepRow):
        if column.name.endswith("_ms") and counted:
            values = sorted(getattr(row, column.name) for row in counted)
            p90 = values[min(len(values) - 1, round(0.9 * (len(values) - 1)))]
            times[column.name] = Spread(statistics.median(values), p90)
    return counted, times

"""`ForwardBackwardTimer`: forward, backward and optimizer time of every training step."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sms_plugin.callbacks.clock import Clock, Mark, clock_for, host_ms
from sms_plugin.callbacks.lightning_base import Callback
from sms_plugin.callbacks.step_times import (
    STEADY,
    Phase,
    Spread,
    StepRow,
    StepTimer,
    summarise,
    write_rows,
)
from sms_plugin.tables import text_table

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch.utils.hooks import RemovableHandle


class ForwardBackwardTimer(Callback):
    """Time each step by CUDA events on a GPU and by a monotonic clock on a CPU.

    On a GPU no step waits for another: events are queued and read when they are done, and waited
    for only before a validation, at the end and on an exception.

        trainer = Trainer(callbacks=[sms_plugin.callbacks.ForwardBackwardTimer()])

    Forward is from the start of the batch to the earlier of zero_grad and backward; backward (with
    DDP's all-reduce) as Lightning calls it; optimizer from `on_before_optimizer_step`, so with
    gradient clipping, to the end of the optimizer's step. Under CUDA, a step whose time on the
    device is no more than its time on the host is bound by launches.

    Args:
        folder: where timing.csv goes; default: the Trainer's log folder. Ranks above 0 write
            timing-rank<N>.csv.
        warmup_steps: batches at the start of each fit that are labelled "warmup" and left out of
            the summary: compilation, allocation, first touch.

    Attributes:
        rows: one `StepRow` for each batch that was read so far.

    Raises:
        ValueError: for a negative `warmup_steps`.
    """

    def __init__(self, folder: str | Path | None = None, *, warmup_steps: int = 3) -> None:
        super().__init__()
        if warmup_steps < 0:
            raise ValueError(
                f"ForwardBackwardTimer: warmup_steps must be at least 0, got {warmup_steps}"
            )
        self.folder, self.warmup_steps = folder, warmup_steps
        self.rows: list[StepRow] = []
        self.path: Path | None = None
        self._fit = -1
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock | None = None  # set while a fit runs
        self._current: StepTimer | None = None
        self._unread: deque[StepTimer] = deque()
        self._handles: list[RemovableHandle] = []
        self._batches = 0  # in this fit
        self._pause: str | None = None  # what came between the last batch and the next
        self._idle_since: Mark | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Only what a copy can use: rows and settings, no events or hooks of a running fit."""
        names = ("folder", "warmup_steps", "rows", "path", "_fit")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # The start and the end of a fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        folder = self.folder or trainer.log_dir or trainer.default_root_dir
        rank = trainer.global_rank
        path = Path(folder) / ("timing.csv" if rank == 0 else f"timing-rank{rank}.csv")
        if path != self.path:
            self.path, self.rows, self._fit = path, [], -1
        self._fit += 1
        self._clock = clock_for(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_post_hook(self._after_optimizer_step))
        self._idle_since = self._mark()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._clock is not None:
            self._flush(wait=True)
            self._write()
            self._print_summary(trainer)
            self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._clock is None:
            return
        try:
            self._flush(wait=True)
        except RuntimeError as error:  # a broken CUDA context must not hide the first exception
            warnings.warn(
                f"ForwardBackwardTimer: {len(self._unread)} step(s) could not be read: {error}",
                stacklevel=2,
            )
        self._write()
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._reset()

    # One batch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        start = self._mark()
        assert self._idle_since is not None
        self._current = StepTimer(
            fit=self._fit,
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            label=self._label(trainer),
            data_wait_host_ms=host_ms(self._idle_since, start),
            start=start,
        )
        self._batches, self._pause = self._batches + 1, None

    def on_before_zero_grad(self, *args: Any) -> None:
        if self._current is not None:
            self._current.zero_grad(self._mark())

    def on_before_backward(self, *args: Any) -> None:
        if self._current is not None:
            self._current.begin(Phase.backward, self._mark())

    def on_after_backward(self, *args: Any) -> None:
        if self._current is not None:
            self._current.finish(Phase.backward, self._mark())

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self._current is not None:
            self._current.begin(Phase.optimizer, self._mark())

    def _after_optimizer_step(self, *args: Any) -> None:
        if self._current is not None:
            self._current.finish(Phase.optimizer, self._mark())

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._current is None:
            return
        self._idle_since = self._mark()
        self._current.close(self._idle_since)
        self._unread.append(self._current)
        self._current = None
        self._flush(wait=False)

    # What lies between batches

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._flush(wait=True)
            self._write()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._pause, self._idle_since = "after_validation", self._mark()

    def on_save_checkpoint(self, *args: Any) -> None:
        if self._clock is not None:
            self._pause = self._pause or "after_checkpoint"

    def _label(self, trainer: Trainer) -> str:
        if self._batches < self.warmup_steps:
            return "warmup"
        if self._pause is not None:
            return self._pause
        return "last_of_epoch" if trainer.is_last_batch else STEADY  # it may be a smaller batch

    def _mark(self) -> Mark:
        assert self._clock is not None
        return self._clock.mark()

    def _flush(self, *, wait: bool) -> None:
        """Turn finished steps into rows: those that are known by now, or with `wait` all."""
        assert self._clock is not None
        while self._unread:
            end = self._unread[0].end
            assert end is not None
            if wait:
                end.wait()
            elif not end.is_known():
                return
            self.rows.append(self._unread[0].row(self._clock))
            self._unread.popleft()

    def _write(self) -> None:
        assert self.path is not None
        write_rows(self.rows, self.path)

    def _print_summary(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or self._clock is None:
            return
        rows = [row for row in self.rows if row.fit == self._fit]
        counted, times = summarise(rows)
        kind = STEADY if any(row.label == STEADY for row in counted) else "all of them, none steady"
        headings = ("ms", "median", "p90")
        cells = [
            (column.removesuffix("_ms"), f"{spread.median:.3f}", f"{spread.p90:.3f}")
            for column, spread in times.items()
        ]
        print(f"{len(rows)} steps, {len(counted)} counted ({kind}), by {self._clock.name}:")
        print(text_table(headings, cells, right=headings[1:]))

    def summary(self) -> dict[str, Spread]:
        """Spread of each column of times over the steady rows of the last fit."""
        return summarise([row for row in self.rows if row.fit == self._fit])[1]

"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint of just then."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from train.metrics import MetricsRecorder

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopBetweenSteps(Callback):
    """Lets the step at hand end, saves a checkpoint and ends the run; asked twice, ends it at once.

    Only in between are weights, optimizer and random numbers those of one step, so that the run can
    be gone on with to the bit. With several processes nothing is done: they would have to agree on
    the step, by a message in every one of them.

    Args:
        recorder: comes before this in the Trainer's callbacks; no weights are saved after a loss
            that isn't finite.
        path: of the checkpoint.
    """

    def __init__(self, recorder: MetricsRecorder, path: Path) -> None:
        self.recorder, self.path = recorder, path
        self._asked = self._is_between = False
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("\nending after this step, with a checkpoint; again: at once", file=sys.stderr)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._asked and batch_idx % trainer.accumulate_grad_batches == 0:
            self._is_between = True
            raise KeyboardInterrupt

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._is_between and trainer.global_step > 0 and self.recorder.is_finite():
            # The batch at hand was counted as fetched, and won't be trained on.
            batches = trainer.fit_loop.epoch_loop.batch_progress
            batches.total.ready, batches.current.ready = (
                batches.total.completed,
                batches.current.completed,
            )
            trainer.save_checkpoint(self.path, weights_only=False)
        self._is_between = False

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

"""Losses and speed of a run: recorded without waiting for the device, written as metrics.csv."""

from __future__ import annotations

import csv
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, TQDMProgressBar
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from sms_plugin.callbacks.whole_file import whole_file


@dataclass
class MetricsRow:
    """What is known of the weights after `step` optimizer steps."""

    step: int
    train_loss: float | None = None  # of the next batch(es), mean nats a token
    val_loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None  # since the validation before; in its rows only


class LossError(RuntimeError):
    """A training loss that isn't finite."""


class MetricsRecorder(Callback):
    """Keeps a row for each step and writes them at each validation and at the end.

    Args:
        path: metrics.csv.
        max_steps: optimizer steps of the run.
        tokens_per_step: tokens that an optimizer step learns from, over all devices.

    Attributes:
        rows: by step.
        tokens_per_s_at_peak: what the device would do if it did nothing but the model's products;
            the share of it is shown as MFU. None: not known.
        train_seconds: spent training so far, validation left out.

    Raises:
        LossError: at a validation or the end, when a training loss before isn't finite.
    """

    def __init__(self, path: Path, *, max_steps: int, tokens_per_step: int) -> None:
        self.path, self.max_steps, self.tokens_per_step = path, max_steps, tokens_per_step
        self.rows: dict[int, MetricsRow] = {}
        self.tokens_per_s_at_peak: float | None = None
        self.train_seconds = 0.0
        self._losses = torch.zeros(0)  # (max_steps,) on the device
        self._read = 0  # steps whose loss is in its row
        self._started: float | None = None  # while the clock runs
        self._step = 0  # that runs, or ran last
        self._live = (0, 0.0)  # finished steps and time when the progress bar last asked
        self._shown: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        rows = [asdict(self.rows[step]) for step in sorted(self.rows)]
        return {"rows": rows, "train_seconds": self.train_seconds, "read": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = {row["step"]: MetricsRow(**row) for row in state_dict["rows"]}
        self.train_seconds, self._read = state_dict["train_seconds"], state_dict["read"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._losses = torch.zeros(self.max_steps, device=pl_module.device)
        self._started = time.perf_counter()
        self._live = (trainer.global_step, self._started)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._step = trainer.global_step
        row = self.rows.setdefault(self._step, MetricsRow(self._step))
        row.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        # Divided by accumulate_grad_batches already, so that the sum is the mean over the step.
        self._losses[self._step] += outputs["loss"].detach()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._started is not None:
            self._pause(trainer, are_together=True)
            self._check_losses()  # before anything is validated or saved

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        row = self.rows.setdefault(trainer.global_step, MetricsRow(trainer.global_step))
        row.val_loss = float(trainer.callback_metrics["val_loss"])
        if trainer.is_global_zero:
            self.write()
            bar = trainer.progress_bar_callback
            (print if bar is None else bar.print)(self.line(row))
        if trainer.state.fn is TrainerFn.FITTING:
            self._started = time.perf_counter()
            self._live = (trainer.global_step, self._started)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, are_together=True)
        self._check_losses()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._finish(trainer, are_together=False)

    def _finish(self, trainer: pl.Trainer, *, are_together: bool) -> None:
        if self._started is not None:
            self._pause(trainer, are_together=are_together)
        if trainer.is_global_zero:
            self.write()

    def _pause(self, trainer: pl.Trainer, *, are_together: bool) -> None:
        """Read what the device has computed, which waits for it, and stop the clock.

        Losses are the mean over all processes where those are together here.
        """
        step = trainer.global_step
        first, self._read = self._read, step
        losses = self._losses[first:step]
        if are_together:
            losses = trainer.strategy.reduce(losses, reduce_op="mean")
        for at, loss in enumerate(losses.tolist(), start=first):
            self.rows[at].train_loss = loss
            rate = self.rows[at].learning_rate
            self._log(trainer, {"train_loss": loss, "learning_rate": rate}, at)
        assert self._started is not None
        seconds = time.perf_counter() - self._started
        self._started = None
        if step > first:
            self.train_seconds += seconds
            row = self.rows.setdefault(step, MetricsRow(step))
            row.tokens_per_s = (step - first) * self.tokens_per_step / seconds
            self._log(trainer, {"tokens_per_s": row.tokens_per_s}, step)

    @staticmethod
    def _log(trainer: pl.Trainer, values: dict[str, float | None], step: int) -> None:
        """To Lightning's loggers, which would each wait for the device if a step logged."""
        known = {name: value for name, value in values.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(known, step)

    def is_finite(self) -> bool:
        """Whether all training losses that were read are."""
        return self._first_lost() is None

    def _first_lost(self) -> MetricsRow | None:
        rows = (self.rows[step] for step in sorted(self.rows))
        losses = ((row, row.train_loss) for row in rows if row.train_loss is not None)
        return next((row for row, loss in losses if not math.isfinite(loss)), None)

    def _check_losses(self) -> None:
        lost = self._first_lost()
        if lost is not None:
            raise LossError(
                f"the training loss of step {lost.step} is {lost.train_loss}: the weights are lost "
                "from there on; start again with a lower model.learning_rate, or with gradients "
                "clipped (trainer.gradient_clip_val=1.0)"
            )

    def live(self) -> dict[str, str]:
        """Loss of the last step and tokens/s since the call before; waits for the device."""
        done, (before, since) = self._step + 1, self._live
        if done > before:
            loss, now = float(self._losses[self._step]), time.perf_counter()
            speed = (done - before) * self.tokens_per_step / (now - since)
            self._live = (done, now)
            self._shown = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
            if self.tokens_per_s_at_peak is not None:
                self._shown["MFU"] = f"{speed / self.tokens_per_s_at_peak:.1%}"
        return self._shown

    def line(self, row: MetricsRow) -> str:
        """A row as text, with the training loss of the step before, which is known by then."""
        before = self.rows.get(row.step - 1)
        parts = [f"step {row.step:>{len(str(self.max_steps))}}/{self.max_steps}"]
        if before is not None and before.train_loss is not None:
            parts.append(f"train loss {before.train_loss:.3f}")
        if row.val_loss is not None:
            parts.append(f"validation loss {row.val_loss:.3f}")
        if row.tokens_per_s is not None:
            parts.append(f"{row.tokens_per_s:,.0f} tokens/s")
        return "   ".join(parts)

    def write(self) -> None:
        with whole_file(self.path) as unfinished, unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, [column.name for column in fields(MetricsRow)])
            writer.writeheader()
            writer.writerows(asdict(self.rows[step]) for step in sorted(self.rows))


class LossBar(TQDMProgressBar):
    """Lightning's bar with the recorder's loss and tokens/s; waits for the device when it redraws.

    Args:
        recorder: where they come from.
        refresh_rate: steps from one redraw to the next.
    """

    def __init__(self, recorder: MetricsRecorder, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._recorder = recorder

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        return dict(self._recorder.live())

"""A Trainer on a fake clock: modules, data and marks whose time a test moves on."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import train.adapter  # noqa: F401  registers the core
from sms_plugin.callbacks import timer as timer_module

ROOT = Path(__file__).resolve().parents[1]
BATCHES = 7
FORWARD, BACKWARD, OPTIMIZER, WAIT = 5.0, 7.0, 3.0, 11.0  # ms that each takes on the fake clock


class Time:
    """The fake present, in ms."""

    now = 0.0


@dataclass
class FakeMark:
    host_ns: int
    at: float
    clock: FakeClock

    def is_known(self) -> bool:
        return not self.clock.is_late

    def wait(self) -> None:
        self.clock.waits += 1


class FakeClock:
    """Reads `Time.now`; `is_late` stands for a GPU that has done nothing until it is waited for."""

    name = "fake"

    def __init__(self, is_late: bool = False) -> None:
        self.is_late = is_late
        self.waits = 0

    def mark(self) -> FakeMark:
        return FakeMark(int(Time.now * 1e6), Time.now, self)

    def elapsed_ms(self, start: FakeMark, end: FakeMark) -> float:
        return end.at - start.at


def install_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(timer_module, "clock_for", lambda device: fake)
    return fake


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        Time.now += OPTIMIZER
        super().step()
        return loss


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Time.now += BACKWARD
        return grad


class Module(pl.LightningModule):
    """A linear layer whose phases move the fake clock on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def loss(self, batch: Tensor) -> Tensor:
        Time.now += FORWARD
        return SlowBackward.apply(self.layer(batch).square().mean())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), lr=0.01)


class NoLossOnOddBatches(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx % 2 else loss


class FailsAtTheFifthBatch(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx == 4:
            raise RuntimeError("as planned")
        return self.loss(batch)


class TwoOptimizers(Module):
    """Manual optimization: two losses and two steps in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SlowSGD(self.parameters(), lr=0.01), SlowSGD(self.parameters(), lr=0.01)]


class LBFGS(Module):
    """Evaluates its closure three times in each step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=-1
        )


class SlowLoader:
    """Batches that have to be waited for."""

    def __init__(self, batches: int = BATCHES) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        for seed in range(self.batches):
            Time.now += WAIT
            yield torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))


def make_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **(settings | options))


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))

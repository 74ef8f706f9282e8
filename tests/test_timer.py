"""ForwardBackwardTimer in real Trainers; time is a number that the test moves on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from fake_time import (
    BACKWARD,
    BATCHES,
    FORWARD,
    LBFGS,
    OPTIMIZER,
    WAIT,
    FailsAtTheFifthBatch,
    FakeClock,
    Module,
    NoLossOnOddBatches,
    SlowLoader,
    TwoOptimizers,
    make_trainer,
    read,
)
from torch import Tensor
from torch.utils.data import DataLoader

import train.adapter  # noqa: F401  registers the core
from sms_plugin.callbacks import ForwardBackwardTimer
from sms_plugin.callbacks.step_times import StepRow, summarise

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_each_phase_gets_its_time(tmp_path: Path, clock: FakeClock, accumulate: int) -> None:
    timer = ForwardBackwardTimer(warmup_steps=2)
    trainer = make_trainer(tmp_path, timer, accumulate_grad_batches=accumulate)
    trainer.fit(Module(), SlowLoader())
    assert [row.batch for row in timer.rows] == list(range(BATCHES))
    for row in timer.rows:
        assert (row.forward_ms, row.backward_ms) == (FORWARD, BACKWARD)
        assert (row.forward_intervals, row.backward_intervals) == (1, 1)
        assert row.optimizer_ms == OPTIMIZER * row.optimizer_intervals
        assert row.step_ms == row.forward_ms + row.backward_ms + row.optimizer_ms
        assert row.host_ms == row.step_ms
    assert sum(row.optimizer_intervals for row in timer.rows) == math.ceil(BATCHES / accumulate)
    assert [row.label for row in timer.rows] == [
        *["warmup"] * 2,
        *["steady"] * (BATCHES - 3),
        "last_of_epoch",
    ]
    assert {row.data_wait_host_ms for row in timer.rows} <= {0.0, WAIT, 2 * WAIT}  # prefetched
    written = read(tmp_path / "timing.csv")
    assert [float(row["backward_ms"]) for row in written] == [BACKWARD] * BATCHES


def test_a_missing_loss_has_no_backward(tmp_path: Path, clock: FakeClock) -> None:
    for accumulate in (1, 2):
        timer = ForwardBackwardTimer()
        trainer = make_trainer(tmp_path, timer, accumulate_grad_batches=accumulate)
        trainer.fit(NoLossOnOddBatches(), SlowLoader())
        assert [row.backward_intervals for row in timer.rows] == [1, 0, 1, 0, 1, 0, 1]
        assert [row.forward_ms for row in timer.rows] == [FORWARD] * BATCHES


def test_manual_optimization_adds_up(tmp_path: Path, clock: FakeClock) -> None:
    timer = ForwardBackwardTimer()
    make_trainer(tmp_path, timer).fit(TwoOptimizers(), SlowLoader())
    assert len(timer.rows) == BATCHES
    for row in timer.rows:
        assert (row.forward_ms, row.forward_intervals) == (2 * FORWARD, 2)
        assert (row.backward_ms, row.backward_intervals) == (2 * BACKWARD, 2)
        assert (row.optimizer_ms, row.optimizer_intervals) == (2 * OPTIMIZER, 2)


def test_lbfgs_backwards_are_all_counted(tmp_path: Path, clock: FakeClock) -> None:
    timer = ForwardBackwardTimer()
    make_trainer(tmp_path, timer).fit(LBFGS(), SlowLoader())
    for row in timer.rows:
        assert row.backward_intervals == 3
        assert row.backward_ms == 3 * BACKWARD
        assert row.forward_ms == FORWARD  # the first; the others lie inside the optimizer
        assert row.optimizer_ms == 2 * FORWARD
        assert row.step_ms == row.forward_ms + row.backward_ms + row.optimizer_ms


def test_validation_between_is_labelled_and_not_waited(tmp_path: Path, clock: FakeClock) -> None:
    timer = ForwardBackwardTimer(warmup_steps=0)
    trainer = make_trainer(tmp_path, timer, val_check_interval=3)
    trainer.fit(Module(), SlowLoader(), SlowLoader(2))
    assert [row.label for row in timer.rows] == [
        "steady",
        "steady",
        "steady",
        "after_validation",
        "steady",
        "steady",
        "after_validation",
    ]
    assert max(row.data_wait_host_ms for row in timer.rows) <= 2 * WAIT


def test_no_step_waits_for_the_device(tmp_path: Path, clock: FakeClock) -> None:
    clock.is_late = True
    waits = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            waits.append(clock.waits)

    timer = ForwardBackwardTimer()
    make_trainer(tmp_path, timer, Watch()).fit(Module(), SlowLoader())
    assert waits == [0] * BATCHES
    assert len(timer.rows) == BATCHES  # read at the end


def test_an_exception_leaves_the_steps_before_it(tmp_path: Path, clock: FakeClock) -> None:
    clock.is_late = True
    timer = ForwardBackwardTimer()
    trainer = make_trainer(tmp_path, timer)
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.fit(FailsAtTheFifthBatch(), SlowLoader())
    assert [row["batch"] for row in read(tmp_path / "timing.csv")] == ["0", "1", "2", "3"]
    make_trainer(tmp_path, timer).fit(Module(), SlowLoader())  # it can be used again
    assert len(read(tmp_path / "timing.csv")) == 4 + BATCHES


def test_no_hook_stays_on_the_optimizer(tmp_path: Path, clock: FakeClock) -> None:
    optimizers = []

    class Keep(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            optimizers.extend(trainer.optimizers)
            assert optimizers[0]._optimizer_step_post_hooks

    make_trainer(tmp_path, ForwardBackwardTimer(), Keep()).fit(Module(), SlowLoader())
    assert not optimizers[0]._optimizer_step_post_hooks


def test_second_trainer_that_only_tests(
    tmp_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = ForwardBackwardTimer()
    make_trainer(tmp_path, timer).fit(Module(), SlowLoader())
    assert f"{BATCHES} steps" in capsys.readouterr().out
    make_trainer(tmp_path, timer).test(Module(), SlowLoader(2), verbose=False)
    assert capsys.readouterr().out == ""
    assert len(read(tmp_path / "timing.csv")) == BATCHES


def test_second_fit_is_told_from_the_first(tmp_path: Path, clock: FakeClock) -> None:
    timer = ForwardBackwardTimer()
    for _ in range(2):
        make_trainer(tmp_path, timer).fit(Module(), SlowLoader())
    assert [row["fit"] for row in read(tmp_path / "timing.csv")] == ["0"] * BATCHES + [
        "1"
    ] * BATCHES
    make_trainer(tmp_path / "elsewhere", timer).fit(Module(), SlowLoader())
    assert [row["fit"] for row in read(tmp_path / "elsewhere" / "timing.csv")] == ["0"] * BATCHES


def test_resuming_a_finished_run_reports_no_steps(
    tmp_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Module(), SlowLoader())
    trainer.save_checkpoint(tmp_path / "done.ckpt")
    capsys.readouterr()
    timer = ForwardBackwardTimer()
    make_trainer(tmp_path, timer).fit(Module(), SlowLoader(), ckpt_path=tmp_path / "done.ckpt")
    assert "0 steps" in capsys.readouterr().out
    assert read(tmp_path / "timing.csv") == []


def test_timer_in_barebones_trainer(tmp_path: Path) -> None:
    timer = ForwardBackwardTimer(tmp_path)
    trainer = pl.Trainer(barebones=True, accelerator="cpu", max_epochs=1, callbacks=[timer])
    trainer.fit(Module(), SlowLoader())
    for row in timer.rows:
        assert min(row.forward_ms, row.backward_ms, row.optimizer_ms) > 0
        assert row.forward_ms + row.backward_ms + row.optimizer_ms <= row.step_ms


def test_summary_leaves_the_warmup_out() -> None:
    def row(label: str, ms: float) -> StepRow:
        return StepRow(0, 0, 0, 0, label, ms, ms, ms, 3 * ms, 1, 1, 1, 3 * ms, 0.0)

    rows = [row("warmup", 1000.0), *(row("steady", float(ms)) for ms in range(1, 12))]
    counted, times = summarise(rows)
    assert len(counted) == 11
    assert times["forward_ms"].median == 6.0
    assert times["forward_ms"].p90 == 10.0
    assert summarise(rows[:1])[1]["forward_ms"].median == 1000.0
    assert summarise([]) == ([], {})


def test_timer_refuses_negative_warmup() -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        ForwardBackwardTimer(warmup_steps=-1)


# A GPU


class SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return grad, None


class SleepsOnTheGPU(Module):
    """The GPU is busy for a known time in forward, and for twice that in backward."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.cuda._sleep(self.cycles)
        return SleepBackward.apply(self.layer(batch).square().mean(), 2 * self.cycles)


def milliseconds_asleep(cycles: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # the clock of the GPU goes up with the first work
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.cuda
def test_gpu_time_is_that_of_the_gpu(tmp_path: Path, cuda: str) -> None:
    cycles = int(1e7 * 20 / milliseconds_asleep(int(1e7)))  # 20 ms
    right = milliseconds_asleep(cycles)
    timer = ForwardBackwardTimer()
    batches = [torch.randn(4, 2) for _ in range(10)]
    make_trainer(tmp_path, timer, accelerator="gpu", devices=1).fit(
        SleepsOnTheGPU(cycles), DataLoader(batches, batch_size=None)
    )
    steady = [row for row in timer.rows if row.label == "steady"]
    assert len(timer.rows) == 10
    assert len(steady) == 6
    for row in steady:
        assert row.forward_ms == pytest.approx(right, rel=0.1)
        assert row.backward_ms == pytest.approx(2 * right, rel=0.1)
        assert row.forward_ms + row.backward_ms + row.optimizer_ms <= row.step_ms * 1.001

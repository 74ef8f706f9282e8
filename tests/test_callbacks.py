"""The callbacks in real Trainers; time is a number that the test's own module moves on."""

from __future__ import annotations

import copy
import csv
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sms_plugin
import train.adapter  # noqa: F401  registers the core
from sms_plugin.callbacks import ForwardBackwardTimer, FusedSoftmaxCallback
from sms_plugin.callbacks import timer as timer_module
from sms_plugin.callbacks.step_times import StepRow, summarise
from sms_plugin.callbacks.whole_file import whole_file
from sms_plugin.patch import PatchError
from train.model import AttentionCore

ROOT = Path(__file__).resolve().parents[1]
BATCHES = 7
FORWARD, BACKWARD, OPTIMIZER, WAIT = 5.0, 7.0, 3.0, 11.0  # ms that each takes on the fake clock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
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


# ForwardBackwardTimer


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


@pytest.mark.parametrize("make", [ForwardBackwardTimer, FusedSoftmaxCallback])
def test_callbacks_can_be_copied(tmp_path: Path, make: type[pl.Callback]) -> None:
    callback = make()
    for _ in range(2):  # before and after a fit
        for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert isinstance(twin, make)
        make_trainer(tmp_path, callback).fit(AttentionModule(), SlowLoader(2))


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


# FusedSoftmaxCallback


class AttentionModule(pl.LightningModule):
    """Two cores, one of which is built late where asked for."""

    def __init__(self, late: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.late, self.unused = late, unused
        self.layer = nn.Linear(2, 2)
        if not late:
            self.core = AttentionCore(2, 8, 0.0)

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "core"):
            self.core = AttentionCore(2, 8, 0.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.layer(batch).unsqueeze(0)  # (1, T, D)
        out = x if self.unused else self.core(x, x, x, None, True)[0]
        return out.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class WatchesTheCore(pl.Callback):
    """Notes the class of the core at each batch."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.add(type(pl_module.core).__name__)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.add(type(pl_module.core).__name__)


@pytest.mark.parametrize("late", [False, True], ids=["built at once", "configure_model"])
def test_patched_while_training_and_restored(tmp_path: Path, late: bool) -> None:
    callback, watch = FusedSoftmaxCallback(), WatchesTheCore()
    module = AttentionModule(late=late)
    make_trainer(tmp_path, callback, watch).fit(module, SlowLoader(3))
    assert watch.seen == {"SoftmaxCore"}
    assert type(module.core) is AttentionCore
    assert callback.report is not None
    assert [done.name for done in callback.report.patched] == ["core"]
    assert callback.calls == {"scaled_mask_softmax": 3, "scaled_mask_softmax_backward": 3}


def test_patched_in_a_bare_validation(tmp_path: Path) -> None:
    callback, watch = FusedSoftmaxCallback(), WatchesTheCore()
    module = AttentionModule(late=True)
    make_trainer(tmp_path, callback, watch).validate(module, SlowLoader(2), verbose=False)
    assert watch.seen == {"SoftmaxCore"}
    assert callback.calls["scaled_mask_softmax"] == 2
    assert type(module.core) is AttentionCore


def test_restored_after_an_exception(tmp_path: Path) -> None:
    class Fails(AttentionModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise RuntimeError("as planned")

    callback, module = FusedSoftmaxCallback(), Fails()
    with pytest.raises(RuntimeError, match="as planned"):
        make_trainer(tmp_path, callback).fit(module, SlowLoader(2))
    assert type(module.core) is AttentionCore
    assert callback.calls["scaled_mask_softmax"] == 1


def test_what_the_user_patched_stays(tmp_path: Path) -> None:
    module = AttentionModule()
    sms_plugin.patch_attention(module)
    make_trainer(tmp_path, FusedSoftmaxCallback()).fit(module, SlowLoader(2))
    assert type(module.core).__name__ == "SoftmaxCore"


def test_warns_when_the_operator_is_never_called(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="never called"):
        make_trainer(tmp_path, FusedSoftmaxCallback()).fit(
            AttentionModule(unused=True), SlowLoader(2)
        )
    with warnings.catch_warnings(record=True) as caught:
        make_trainer(tmp_path, FusedSoftmaxCallback()).fit(AttentionModule(), SlowLoader(2))
    assert not [warning for warning in caught if "never called" in str(warning.message)]


def test_nothing_to_patch_raises_before_the_first_step(tmp_path: Path) -> None:
    module = Module()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(PatchError, match="nothing to patch"):
        make_trainer(tmp_path, FusedSoftmaxCallback()).fit(module, SlowLoader(2))
    assert torch.equal(module.layer.weight, before["layer.weight"])
    with pytest.raises(ValueError, match="matches no attention"):
        make_trainer(tmp_path, FusedSoftmaxCallback(modules=["encoder"])).fit(
            AttentionModule(), SlowLoader(2)
        )
    with pytest.raises(ValueError, match="fuesd"):
        FusedSoftmaxCallback("fuesd")


def test_counts_go_to_the_logger(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    make_trainer(tmp_path, FusedSoftmaxCallback(), logger=logger).fit(
        AttentionModule(), SlowLoader(3)
    )
    rows = read(Path(logger.log_dir) / "metrics.csv")
    assert float(rows[-1]["calls/scaled_mask_softmax"]) == 3.0


def test_two_spawned_processes(tmp_path: Path) -> None:
    callbacks = (FusedSoftmaxCallback(), ForwardBackwardTimer(tmp_path))
    trainer = make_trainer(tmp_path, *callbacks, strategy="ddp_spawn", devices=2)
    batches = [torch.randn(4, 2) for _ in range(6)]
    trainer.fit(AttentionModule(), DataLoader(batches, batch_size=None))
    for name in ("timing.csv", "timing-rank1.csv"):
        assert len(read(tmp_path / name)) == 3


# The base class and files


LIGHTNING_STUB = "class Callback:\n    flavour = 'lightning'\n"


@pytest.mark.parametrize(
    ("first", "bases"),
    [
        ("import lightning.pytorch.callbacks", ["lightning.pytorch.callbacks"]),
        ("import pytorch_lightning", ["pytorch_lightning.callbacks.callback"]),
        (
            "import pytorch_lightning, lightning.pytorch.callbacks",
            ["lightning.pytorch.callbacks", "pytorch_lightning.callbacks.callback"],
        ),
        ("", ["lightning.pytorch.callbacks"]),
    ],
    ids=["lightning", "pytorch_lightning", "both", "neither yet"],
)
def test_base_class_is_of_what_is_imported(tmp_path: Path, first: str, bases: list[str]) -> None:
    package = tmp_path / "lightning" / "pytorch"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "callbacks.py").write_text(LIGHTNING_STUB)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {first}\n"
        "import sms_plugin, pickle\n"
        "for name in ('ForwardBackwardTimer', 'FusedSoftmaxCallback'):\n"
        "    cls = getattr(sms_plugin.callbacks, name)\n"
        "    assert type(pickle.loads(pickle.dumps(cls()))) is cls\n"
        "    print([base.__module__ for base in cls.__mro__[2:-1]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(bases)] * 2


def test_without_lightning_the_error_says_what_to_do() -> None:
    script = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import sms_plugin\n"
        "sms_plugin.callbacks.ForwardBackwardTimer\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install pytorch-lightning" in done.stderr.splitlines()[-1]


def test_whole_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.txt"
    with whole_file(path) as unfinished:
        unfinished.write_text("one")
        assert not path.exists()
    with pytest.raises(RuntimeError), whole_file(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]


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

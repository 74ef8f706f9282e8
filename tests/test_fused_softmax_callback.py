"""FusedSoftmaxCallback in real Trainers."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from fake_time import Module, SlowLoader, make_trainer, read
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sms_plugin
import train.adapter  # noqa: F401  registers the core
from sms_plugin.callbacks import ForwardBackwardTimer, FusedSoftmaxCallback
from sms_plugin.patch import PatchError
from train.models import AttentionCore

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


@pytest.mark.parametrize("make", [ForwardBackwardTimer, FusedSoftmaxCallback])
def test_callbacks_can_be_copied(tmp_path: Path, make: type[pl.Callback]) -> None:
    callback = make()
    for _ in range(2):  # before and after a fit
        for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert isinstance(twin, make)
        make_trainer(tmp_path, callback).fit(AttentionModule(), SlowLoader(2))

"""AttentionMaps in real Trainers."""

from __future__ import annotations

import copy
import csv
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_runs import small_config
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sms_plugin.callbacks import AttentionMaps, FusedSoftmaxCallback
from train import run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
B, H, T, E = 3, 2, 5, 8


class Reader(pl.LightningModule):
    """An attention whose heads look at everything alike, or at one key."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)
        nn.init.zeros_(self.attention.in_proj_weight)
        self.mask = mask

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.attention(batch, batch, batch, attn_mask=self.mask)[0].square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> None:
        return None


def validate(module: pl.LightningModule, folder: Path, callback: pl.Callback, n: int = 1) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(torch.randn(4 * B, T, E), batch_size=B)
    for _ in range(n):
        trainer.validate(module, loader, verbose=False)


def entropies(folder: Path) -> list[float]:
    with (folder / "entropy.csv").open() as file:
        return [float(row["entropy"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("mask", "entropy"),
    [
        (None, math.log(T)),
        (~torch.eye(T, dtype=torch.bool), 0.0),
        (torch.arange(T).expand(T, T) > 1, math.log(2)),
    ],
)
def test_values_by_hand(tmp_path: Path, mask: Tensor | None, entropy: float) -> None:
    validate(Reader(mask), tmp_path, AttentionMaps(examples=2))
    folder = tmp_path / "attention"
    assert entropies(folder) == pytest.approx([entropy] * H, abs=1e-6)
    maps = torch.load(folder / "step-000000" / "maps.pt", weights_only=True)
    kept = torch.ones(T, T) if mask is None else (~mask).float()
    right = (kept / kept.sum(-1, keepdim=True)).expand(2, T, T)
    torch.testing.assert_close(maps["attention"], right)
    assert (folder / "step-000000" / "attention.png").read_bytes()[:4] == b"\x89PNG"


def test_the_module_is_what_it_was(tmp_path: Path) -> None:
    module = Reader()
    validate(module, tmp_path, AttentionMaps())
    assert type(module.attention) is nn.MultiheadAttention


def test_not_every_validation(tmp_path: Path) -> None:
    validate(Reader(), tmp_path, AttentionMaps(tmp_path / "own", every_n_validations=2), n=3)
    assert len(entropies(tmp_path / "own")) == 2 * H


def test_chosen_layers_of_a_training(tmp_path: Path) -> None:
    """The native run stays one: the operator is never called."""
    maps = AttentionMaps(modules=["*blocks.1.*"], softmax="native")
    cfg = small_config(tmp_path, "softmax=native", "trainer.max_steps=4", "trainer.val_every=2")
    summary = run.train(cfg, callbacks=[maps])
    assert summary["patched"] is None
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("att*/*/*.png"))
    name = "model.blocks.1.attention.core.png"
    assert found == [f"attention/step-000002/{name}", f"attention/step-000004/{name}"]
    with (tmp_path / "attention" / "entropy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["head"]) for row in rows] == [
        ("2", "0"),
        ("2", "1"),
        ("4", "0"),
        ("4", "1"),
    ]


def test_beside_the_other_callback(tmp_path: Path) -> None:
    module = Reader()
    trainer_callbacks: list[Any] = [FusedSoftmaxCallback(), AttentionMaps(tmp_path)]
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=trainer_callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(module, DataLoader(torch.randn(B, T, E), batch_size=B), verbose=False)
    assert entropies(tmp_path) == pytest.approx([math.log(T)] * H)
    assert type(module.attention) is nn.MultiheadAttention


def test_an_exception_restores(tmp_path: Path) -> None:
    class Breaks(Reader):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            raise KeyError("broken")

    module = Breaks()
    with pytest.raises(KeyError, match="broken"):
        validate(module, tmp_path, AttentionMaps())
    assert type(module.attention) is nn.MultiheadAttention
    assert not (tmp_path / "attention").exists()


def test_copies(tmp_path: Path) -> None:
    callback = AttentionMaps(tmp_path)
    validate(Reader(), tmp_path, callback)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert other.entropies == callback.entropies
        validate(Reader(), tmp_path, other)
        assert len(other.entropies) == 2 * H


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"softmax": "sdpa"}, "has no probabilities"),
        ({"softmax": "fuesd"}, "must be one of"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"every_n_validations": 0}, "every_n_validations must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        AttentionMaps(**arguments)

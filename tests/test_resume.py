"""Going on from a checkpoint: the run is what it would have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ROOT, read_metrics, small_config, train_losses

from train import run
from train.checks import SettingError
from train.config import load_config
from train.data.batches import RankSampler
from train.module import LanguageModel
from train.resume import check_same_run, find_checkpoint, runs_left_out

STEPS = ["trainer.max_steps=16", "trainer.val_every=4", "model.dropout=0.1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end."""
    folder = tmp_path_factory.mktemp("whole")
    run.train(small_config(folder, *STEPS))
    return folder


KILLED = """
import os, signal, sys
from small_runs import small_config
from train import run
from train.module import LanguageModel

training_step = LanguageModel.training_step

def killed_at_seven(self, batch, batch_idx):
    if self.global_step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(self, batch, batch_idx)

LanguageModel.training_step = killed_at_seven
run.train(small_config(sys.argv[1], *sys.argv[2:]))
"""


def killed_run(folder: Path, *overrides: str) -> None:
    """The same run, killed without warning in its eighth step."""
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), *overrides],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_goes_on_exactly(tmp_path: Path, accumulate: int) -> None:
    overrides = [*STEPS, f"trainer.accumulate_grad_batches={accumulate}"]
    run.train(small_config(tmp_path / "whole", *overrides))
    killed_run(tmp_path / "killed", *overrides)
    summary = run.train(small_config(tmp_path / "killed", *overrides, "ckpt_path=last"))
    assert train_losses(tmp_path / "killed") == train_losses(tmp_path / "whole")  # to the bit
    ours, right = read_metrics(tmp_path / "killed"), read_metrics(tmp_path / "whole")
    for key in ("step", "val_loss", "learning_rate"):
        assert [row[key] for row in ours] == [row[key] for row in right]
    assert summary["steps"] == 16


@pytest.mark.parametrize(("number", "accumulate"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_ends_the_run_between_steps(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, accumulate: int
) -> None:
    """Step 6 is asked to be the last one: 7 steps are saved, though no validation is near."""
    overrides = [*STEPS, f"trainer.accumulate_grad_batches={accumulate}"]
    if accumulate > 1:
        whole = tmp_path / "whole"
        run.train(small_config(whole, *overrides))
    training_step = LanguageModel.training_step

    def asked(self: LanguageModel, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 6 * accumulate:
            os.kill(os.getpid(), number)
        return training_step(self, batch, batch_idx)

    before = signal.getsignal(number)
    monkeypatch.setattr(LanguageModel, "training_step", asked)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.train(small_config(tmp_path / "ended", *overrides))
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    saved = torch.load(tmp_path / "ended" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 7
    run.train(small_config(tmp_path / "ended", *overrides, "ckpt_path=last"))
    assert train_losses(tmp_path / "ended") == train_losses(whole)  # to the bit
    ours, right = read_metrics(tmp_path / "ended"), read_metrics(whole)
    assert [row["val_loss"] for row in ours] == [row["val_loss"] for row in right]


def test_asked_twice_it_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def asked(self: LanguageModel, batch: Any, batch_idx: int) -> None:
        steps.append(batch_idx)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LanguageModel, "training_step", asked)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.train(small_config(tmp_path, *STEPS))
    assert steps == [0] and not (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_runs_that_are_left_out_are_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for age, (name, status) in enumerate(
        [("failed", "failed"), ("with", "finished"), ("older", "failed")]
    ):
        folder = runs / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").touch()
        (folder / "status.json").write_text(json.dumps({"status": status}))
        os.utime(folder / "status.json", (1000 - age, 1000 - age))
    checkpoint = runs / "with" / "checkpoints" / "last.ckpt"
    checkpoint.touch()
    assert runs_left_out(checkpoint) == [
        f"left out: {runs / 'failed'}, which is newer (failed) but has no checkpoint"
    ]


def test_nothing_left_to_train(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"has 16 steps, trainer.max_steps is 16: nothing is l"):
        run.train(small_config(whole, *STEPS, "ckpt_path=last"))
    assert json.loads((whole / "status.json").read_text())["status"] == "finished"  # as it was


def test_the_last_run_is_found(whole: Path, tmp_path: Path) -> None:
    last = whole / "checkpoints" / "last.ckpt"
    assert find_checkpoint(small_config(whole, "ckpt_path=last")) == last
    assert find_checkpoint(small_config(whole)) is None
    assert find_checkpoint(small_config(tmp_path, f"ckpt_path={last}")) == last
    runs = tmp_path / "runs"
    # The newest is an arm of a comparison, which is no run of the user's.
    for age, name in ((20, "older"), (10, "newer"), (0, "comparison/arms/native")):
        checkpoint = runs / "today" / name / "checkpoints" / "last.ckpt"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        os.utime(checkpoint, (1000 - age, 1000 - age))
    found = find_checkpoint(small_config(runs / "today" / "now", "ckpt_path=last"))
    assert found is not None and found.parts[-3] == "newer"
    with pytest.raises(FileNotFoundError, match="no checkpoints/last"):
        find_checkpoint(small_config(tmp_path / "elsewhere", "ckpt_path=last"))
    with pytest.raises(FileNotFoundError, match="a checkpoint or last, got none"):
        find_checkpoint(small_config(tmp_path, "ckpt_path=none.ckpt"))


def test_another_training_is_refused(whole: Path, tmp_path: Path) -> None:
    last = whole / "checkpoints" / "last.ckpt"
    same = ["trainer.max_steps=99", "softmax=native", "data.num_workers=1", f"ckpt_path={last}"]
    notes = check_same_run(small_config(tmp_path, *STEPS, *same), last)
    assert [note.split(" was ")[0] for note in notes] == ["softmax.name", "trainer.max_steps"]
    assert "is 99 from here on, where the learning rate's decay ends" in notes[1]
    with pytest.raises(ValueError, match=r"model.n_layer: 2 there, 3 here; seed: 1337 there, 1 he"):
        check_same_run(small_config(tmp_path, *STEPS, "model.n_layer=3", "seed=1"), last)


def test_checkpoints_are_plain(whole: Path) -> None:
    checkpoint = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 16
    assert load_config([f"run_dir={whole}"]).ckpt_path is None


def test_ranks_share_the_batches() -> None:
    samplers = [RankSampler(10, rank=rank, world_size=3) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [len(sampler) for sampler in samplers] == [3, 3, 3]
    resumed = RankSampler(10, rank=1, world_size=3, start=2)
    assert list(resumed) == [7] and len(resumed) == 3

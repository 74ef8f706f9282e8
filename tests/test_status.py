"""A run folder says what became of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import read_metrics, small_config

from train import run
from train.module import LanguageModel
from train.status import run_status

STEPS = ["trainer.max_steps=12", "trainer.val_every=4"]


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """Training raises `error` in this step, or its loss becomes NaN."""
    training_step = LanguageModel.training_step

    def failing(self: LanguageModel, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == step and error is not None:
            raise error
        loss = training_step(self, batch, batch_idx)
        return loss * float("nan") if self.global_step == step else loss

    monkeypatch.setattr(LanguageModel, "training_step", failing)


def test_finished(tmp_path: Path) -> None:
    run.train(small_config(tmp_path, "trainer.max_steps=1"))
    assert status(tmp_path)["status"] == "finished"


def test_running_until_it_ends(tmp_path: Path) -> None:
    with run_status(tmp_path):
        assert status(tmp_path)["status"] == "running"


@pytest.mark.parametrize("error", [OSError("disk is full"), torch.OutOfMemoryError("too much")])
def test_a_failure_says_why_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_at(6, monkeypatch, error)
    with pytest.raises(type(error)):
        run.train(small_config(tmp_path, *STEPS))
    said = status(tmp_path)
    assert said["status"] == "failed" and said["error"].endswith(str(error))
    assert ("batch_size" in said.get("advice", "")) == isinstance(error, torch.OutOfMemoryError)
    checkpoint = Path(said["go_on"].partition("ckpt_path=")[2])
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4
    assert len(read_metrics(tmp_path)) >= 6  # what was known is there
    monkeypatch.undo()
    assert run.train(small_config(tmp_path, *STEPS, f"ckpt_path={checkpoint}"))["steps"] == 12
    assert status(tmp_path)["status"] == "finished"


def test_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(6, monkeypatch, KeyboardInterrupt())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.train(small_config(tmp_path, *STEPS))
    said = status(tmp_path)
    assert said["status"] == "interrupted" and "last.ckpt" in said["go_on"]
    assert f"interrupted; to go on: {said['go_on']}" in capsys.readouterr().err


def test_a_nan_loss_ends_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(5, monkeypatch, None)
    with pytest.raises(RuntimeError, match="training loss of step 5 is nan"):
        run.train(small_config(tmp_path, *STEPS))
    assert status(tmp_path)["status"] == "failed"
    assert "go_on" not in status(tmp_path)  # the same settings would lose the weights again
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 4
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


def test_a_mistake_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run.train(small_config(tmp_path, "data=text", "data.path=/no/such/text"))
    said = status(tmp_path)
    assert said["status"] == "failed" and "/no/such/text" in said["error"] and "go_on" not in said

"""A run folder says what became of its run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from small_runs import read_metrics, small_config

from train import run
from train.checks import SettingError, check_settings
from train.module import LanguageModel
from train.run_folder import read_status
from train.status import command_to_go_on, one_line_errors, run_status

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
    checkpoint = Path(said["go_on"].partition("ckpt_path=")[2].strip("\"'"))
    assert str(error) in (tmp_path / "traceback.txt").read_text()
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4
    assert len(read_metrics(tmp_path)) >= 6  # what was known is there
    monkeypatch.undo()
    assert run.train(small_config(tmp_path, *STEPS, f"ckpt_path={checkpoint}"))["steps"] == 12
    assert status(tmp_path)["status"] == "finished" and not (tmp_path / "traceback.txt").exists()


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


def test_a_killed_run_is_told_from_one_that_runs(tmp_path: Path) -> None:
    with run_status(tmp_path):
        assert read_status(tmp_path) == "running"
        ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
        gone = {**status(tmp_path), "process": int(ended.stdout)}
        (tmp_path / "status.json").write_text(json.dumps(gone))
        assert read_status(tmp_path) == "killed"
        (tmp_path / "status.json").write_text(json.dumps(gone | {"host": "elsewhere"}))
        assert read_status(tmp_path) == "running"  # as far as can be known
    assert read_status(tmp_path) == "finished" and read_status(tmp_path / "none") is None


def test_the_command_to_go_on_can_be_pasted() -> None:
    checkpoint = Path("/runs/a=b c/checkpoints/last.ckpt")
    typed = ["train/run.py", "softmax=fused", "data.path=my text.txt", "ckpt_path=last"]
    words = shlex.split(command_to_go_on(typed, checkpoint))
    assert words[:4] == ["python", "train/run.py", "softmax=fused", "data.path=my text.txt"]
    override = OverridesParser.create().parse_override(words[4])
    assert override.key_or_group == "ckpt_path" and override.value() == str(checkpoint)
    assert command_to_go_on(["pytest"], checkpoint).startswith("the same settings with ckpt_path=")


def test_an_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    for error, said in (
        (ValueError("seed must be a number"), ": seed must be a number"),
        (KeyError("seed"), ": KeyError: 'seed'"),
    ):
        with pytest.raises(SystemExit) as end, one_line_errors(tmp_path):
            raise error
        assert end.value.code == 1
        first, last = capsys.readouterr().err.splitlines()
        assert first.endswith(said) and str(tmp_path) in last
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(KeyError), one_line_errors(tmp_path):
        raise KeyError("seed")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.warmup_steps=-1", "optimizer.warmup_steps must be at least 0, got -1"),
        ("data.batch_size=0", "data.batch_size must be at least 1, got 0"),
        ("model.dropout=1.0", "model.dropout must be at least 0 and below 1, got 1.0"),
        ("model.learning_rate=nan", "model.learning_rate must be a number above 0, got nan"),
        ("trainer.strategy=dpp", "trainer.strategy must be one of auto, ddp, fsdp"),
        ("data.seq_len=9000000", "the attention scores of one layer take"),
    ],
)
def test_settings_that_break_a_rule(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        run.train(small_config(tmp_path, override))
    assert said in status(tmp_path)["error"]


def test_long_texts_are_no_matter_to_sdpa(tmp_path: Path) -> None:
    check_settings(small_config(tmp_path, "data.seq_len=9000000", "softmax=sdpa"))

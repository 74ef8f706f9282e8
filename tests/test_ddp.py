"""Two processes train as one does that accumulates two batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import ROOT, SMALL, read_metrics, small_config, train_losses

from train import run

STEPS = ["trainer.max_steps=6", "trainer.val_every=3"]


def test_two_processes_are_one(tmp_path: Path) -> None:
    one = tmp_path / "one"
    run.train(small_config(one, *STEPS, "trainer.accumulate_grad_batches=2"))
    two = tmp_path / "two"
    settings = [setting for setting in SMALL if setting != "trainer=cpu"]
    command = [
        *(sys.executable, "train/run.py", *settings, *STEPS),
        *("trainer=ddp", "trainer.accelerator=cpu", f"hydra.run.dir={two}"),
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert train_losses(two) == pytest.approx(train_losses(one), abs=1e-5)
    ours, right = read_metrics(two)[-1]["val_loss"], read_metrics(one)[-1]["val_loss"]
    assert float(ours) == pytest.approx(float(right), abs=1e-5)
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (one, two)
    ]
    for name, weight in states[0].items():
        torch.testing.assert_close(states[1][name], weight, atol=1e-5, rtol=0)
    assert json.loads((two / "status.json").read_text())["status"] == "finished"
    assert (two / "timing-rank1.csv").exists()


def test_a_sweep_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "train/run.py", "-m", "seed=1,2", "trainer=ddp"]
    ended = subprocess.run(
        [*command, f"hydra.sweep.dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "start the runs one after the other" in ended.stderr
    assert not list(tmp_path.rglob("metrics.csv"))

"""The trainer: equal starts, what ran is what was asked for, and a run folder that tells."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkouts import needs_compiler
from omegaconf import OmegaConf
from small_runs import ROOT, SMALL, read_metrics, small_config, train_losses

import sms_plugin
from train import run
from train.config import (
    CONF_DIR,
    Softmax,
    load_config,
)
from train.data import Corpus, TrainBatches, load_corpus
from train.module import LanguageModel
from train.overrides import OverrideError, check_overrides


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(load_config(["run_dir=unused"]).data, seed=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of 20 steps for each softmax that needs no compiler of its own."""
    folders = {}
    for softmax in ("native", "fused", "sdpa"):
        folders[softmax] = tmp_path_factory.mktemp(softmax)
        overrides = [f"softmax={softmax}", "trainer.max_steps=20", "trainer.val_every=8"]
        run.train(small_config(folders[softmax], *overrides))
    return folders


@pytest.mark.parametrize("softmax", ["fused", "sdpa"])
def test_every_softmax_starts_equal(runs: dict[str, Path], softmax: str) -> None:
    ours, native = train_losses(runs[softmax]), train_losses(runs["native"])
    assert len(ours) == len(native) == 20
    assert abs(ours[0] - native[0]) <= 1e-6
    assert max(abs(a - b) for a, b in zip(ours, native, strict=True)) <= 1e-4
    assert native[0] - native[-1] > 0.1  # it learns, so equal losses say something


@pytest.mark.parametrize("model", ["encoder_small", "t5_encoder_small"])
def test_encoders_learn_and_start_equal(tmp_path: Path, model: str) -> None:
    """Real padding masks, and a learned bias whose gradient runs through the operator."""
    losses = {}
    for softmax in ("native", "fused", "sdpa"):
        folder = tmp_path / softmax
        overrides = [f"model={model}", f"softmax={softmax}", "trainer.max_steps=12"]
        run.train(small_config(folder, *overrides))
        losses[softmax] = train_losses(folder)
    native = losses.pop("native")
    assert native[0] - native[-1] > 0.05
    for ours in losses.values():
        assert abs(ours[0] - native[0]) <= 1e-6
        assert max(abs(a - b) for a, b in zip(ours, native, strict=True)) <= 1e-4


@needs_compiler
def test_compiled_is_used(tmp_path: Path, runs: dict[str, Path]) -> None:
    overrides = ["softmax=compiled", "trainer.max_steps=2"]
    summary = run.train(small_config(tmp_path, *overrides))
    assert summary["patched"]["softmax"] == "compiled"
    assert abs(train_losses(tmp_path)[0] - train_losses(runs["native"])[0]) <= 1e-6


@pytest.mark.parametrize("softmax", ["native", "fused", "sdpa"])
def test_run_folder(runs: dict[str, Path], softmax: str) -> None:
    folder = runs[softmax]
    assert {file.name for file in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "environment.json",
        "losses.png",
        "metrics.csv",
        "status.json",
        "summary.json",
        "timing.csv",
    }
    rows = read_metrics(folder)
    assert [int(row["step"]) for row in rows] == list(range(21))
    validated = [int(row["step"]) for row in rows if row["val_loss"]]
    assert validated == [8, 16, 20]  # the last weights too, though 8 does not divide 20
    assert all(row["tokens_per_s"] for row in rows if row["val_loss"])
    with (folder / "timing.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 20
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == float(rows[-1]["val_loss"])
    assert summary["val_loss_over_unigram_entropy"] == (
        summary["val_loss"] / summary["unigram_entropy"]
    )
    calls = summary["call_counts"]
    batches = 20 + 3 * 2  # training, and three validations of two batches
    assert calls["scaled_mask_softmax"]["cpu"] == (2 * batches if softmax == "fused" else 0)
    assert calls["scaled_mask_softmax_backward"]["cpu"] == (2 * 20 if softmax == "fused" else 0)
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.softmax.name, config.run_dir) == (softmax, str(folder))
    assert (folder / "losses.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_say_that_they_started_equal(runs: dict[str, Path]) -> None:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in runs.values()]
    for key in ("initial_weights_sha256", "data_sha256", "unigram_entropy"):
        assert len({summary[key] for summary in summaries}) == 1


def test_checkpoints_are_plain_and_free_of_the_softmax(runs: dict[str, Path]) -> None:
    keys = []
    for folder in runs.values():
        names = {file.name for file in (folder / "checkpoints").iterdir()}
        assert names == {"best.ckpt", "last.ckpt"}
        checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        keys.append(list(checkpoint["state_dict"]))
        assert checkpoint["hyper_parameters"]["config"]["model"]["positions"] == "rotary"
    assert keys[0] == keys[1] == keys[2]


def test_repeated_run_is_bitwise_equal(runs: dict[str, Path], tmp_path: Path) -> None:
    overrides = ["softmax=fused", "trainer.max_steps=20", "trainer.val_every=8"]
    run.train(small_config(tmp_path, *overrides, "data.num_workers=1"))
    assert train_losses(tmp_path) == train_losses(runs["fused"])


def test_accumulated_loss_is_not_divided(tmp_path: Path, corpus: Corpus) -> None:
    overrides = ["trainer.max_steps=3", "trainer.accumulate_grad_batches=2"]
    config = small_config(tmp_path, *overrides, "softmax=native")
    summary = run.train(config)
    assert summary["steps"] == 3
    torch.manual_seed(config.seed)
    module = LanguageModel(config, corpus.vocab_size)
    assert module.weights_sha256() == summary["initial_weights_sha256"]
    batches = TrainBatches(corpus.train, config.data, seed=config.seed, batches=6)
    with torch.no_grad():
        right = (module.loss(batches[0]) + module.loss(batches[1])).item() / 2
    assert summary["first_train_loss"] == pytest.approx(right, rel=1e-6)
    assert len(train_losses(tmp_path)) == 3


@pytest.mark.cuda
def test_every_softmax_starts_equal_on_a_gpu(tmp_path: Path, cuda: str) -> None:
    losses = {}
    for softmax in ("native", "fused", "compiled", "sdpa"):
        overrides = [f"softmax={softmax}", "trainer=gpu", "trainer.max_steps=20"]
        summary = run.train(small_config(tmp_path / softmax, *overrides))
        losses[softmax] = train_losses(tmp_path / softmax)
        calls = summary["call_counts"]["scaled_mask_softmax"]
        assert calls["cpu"] == 0
        assert (calls["cuda"] > 0) is (softmax == "fused")
    for ours in losses.values():
        assert abs(ours[0] - losses["native"][0]) <= 1e-6
        assert max(abs(a - b) for a, b in zip(ours, losses["native"], strict=True)) <= 1e-4


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_shows_loss_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    overrides = ["softmax=native", "trainer.max_steps=20", "trainer.val_every=10"]
    run.train(small_config(tmp_path, *overrides))
    shown = re.findall(r"20/20 .*loss=(\S+), tokens/s=([\d,-]+)", screen.getvalue())
    assert shown
    assert float(shown[-1][0]) == pytest.approx(train_losses(tmp_path)[-1], abs=1e-3)
    speeds = re.findall(r"tokens/s=([\d,-]+)", screen.getvalue())
    assert all(int(speed.replace(",", "")) > 0 for speed in speeds)


# What ran is what was asked for


def counts(forward: int, backward: int) -> dict[str, dict[str, int]]:
    return {
        "scaled_mask_softmax": {"cpu": forward, "cuda": 0},
        "scaled_mask_softmax_backward": {"cpu": backward, "cuda": 0},
    }


def test_counters_are_compared_with_the_configuration() -> None:
    run.check_calls(Softmax.fused, counts(3, 2), "cpu")
    run.check_calls(Softmax.native, counts(0, 0), "cpu")
    for forward, backward in ((0, 0), (3, 0)):
        with pytest.raises(RuntimeError, match="was not called on cpu"):
            run.check_calls(Softmax.fused, counts(forward, backward), "cpu")
    with pytest.raises(RuntimeError, match="was not called on cuda"):
        run.check_calls(Softmax.fused, counts(3, 2), "cuda")
    with pytest.raises(RuntimeError, match="operator was called"):
        run.check_calls(Softmax.sdpa, counts(1, 0), "cpu")


def test_fused_run_without_a_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = sms_plugin.patch_attention

    def patch_to_the_wrong_one(model: torch.nn.Module, *, softmax: str) -> Any:
        return patch(model, softmax="native")

    monkeypatch.setattr(sms_plugin, "patch_attention", patch_to_the_wrong_one)
    with pytest.raises(RuntimeError, match="softmax=fused, but the fused operator was not called"):
        run.train(small_config(tmp_path, "softmax=fused", "trainer.max_steps=1"))
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("trainer.val_every=0", "trainer.val_every must be at least 1, got 0"),
        ("data.path=my.txt", "read with data=text only, got data.source=stdlib"),
    ],
)
def test_what_would_not_be_done_is_refused(tmp_path: Path, override: str, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        run.train(small_config(tmp_path, override))


def test_zero_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        run.train(small_config(tmp_path, "trainer.max_steps=0"))


# Configuration


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("softmax=fuesd", "compiled, fused, native, sdpa; did you mean fused"),
        ("softmax=null", "compiled, fused, native, sdpa"),
        ("+softmax=native", "softmax=<one of: compiled, fused, native, sdpa>"),
        ("~softmax", "softmax=<one of: compiled, fused, native, sdpa>"),
        ("softmax=fused,native", "compiled, fused, native, sdpa; for several, add -m"),
        ("softmx=fused", "softmax, model, data.*did you mean softmax"),
        ("trainer.max_stps=3", "in trainer.*max_steps.*did you mean max_steps"),
        ("model=gpt3", "gpt2"),
        ("softmax.name=fuesd", "native, fused, compiled, sdpa; did you mean fused"),
        ("model.positions=null", "learned, rotary"),
        ("seed.x=1", "seed has no parts"),
        ("run_dir=a=b", "quotes of its own"),
    ],
)
def test_mistakes_are_answered_with_the_choices(override: str, answer: str) -> None:
    with pytest.raises(OverrideError, match=answer):
        check_overrides(["seed=1", override])


@pytest.mark.parametrize(
    "arguments",
    [
        ["softmax=native", "softmax.name=sdpa", "hydra.run.dir=a b", "--cfg", "job"],
        ["-m", "softmax=fused,native", "seed=1,2"],
        ["--multirun", "softmax=glob(*)"],
        ["hydra/launcher=basic", "run_dir='a=b'"],
    ],
)
def test_what_hydra_understands_passes(arguments: list[str]) -> None:
    check_overrides(arguments)


@pytest.mark.parametrize("group", ["softmax", "model", "data", "trainer"])
def test_every_file_of_conf_is_complete(group: str) -> None:
    for file in (CONF_DIR / group).glob("*.yaml"):
        config = load_config([f"{group}={file.stem}", "run_dir=x"])
        assert config.run_dir == "x"
        if group == "softmax":
            assert config.softmax.name.name == file.stem


def test_command_line_from_another_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train" / "run.py")]
    settings = [*SMALL, "softmax=fused", "trainer.max_steps=2"]
    done = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "softmax=fused: 2 attention module(s) patched" in done.stdout
    assert "calls of the fused operator: scaled_mask_softmax 8 on cpu" in done.stdout
    (folder,) = tmp_path.glob("runs/*/*-fused")
    assert (folder / "summary.json").exists()
    assert "=" not in folder.name
    wrong = subprocess.run(
        [*command, "softmax=fuesd"], cwd=tmp_path, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "compiled, fused, native, sdpa" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_relative_paths_count_from_where_they_were_typed(tmp_path: Path) -> None:
    (tmp_path / "my text.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    command = [
        *(sys.executable, str(ROOT / "train" / "run.py"), *SMALL, "data=text"),
        *("data.path=my text.txt", "hydra.job.chdir=true", "trainer.val_every=2"),
    ]
    for more in (
        ["hydra.run.dir=a run", "trainer.max_steps=2"],
        ["hydra.run.dir=on", "trainer.max_steps=4", "ckpt_path=a run/checkpoints/last.ckpt"],
    ):
        done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "going on from" in done.stdout
    assert [int(row["step"]) for row in read_metrics(tmp_path / "on")] == [0, 1, 2, 3, 4]

"""The trainer: equal starts, what ran is what was asked for, and a run folder that tells."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

import sms_plugin
from train import run
from train.config import (
    CONF_DIR,
    Config,
    DataConfig,
    ModelConfig,
    Positions,
    Softmax,
    load_config,
)
from train.data import VOCAB_SIZE, Corpus, TextData, TrainBatches, ValBatches, read_stdlib
from train.metrics import MetricsRow
from train.model import GPT
from train.module import LanguageModel
from train.overrides import OverrideError, check_overrides
from train.plots import plot_losses

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "trainer=cpu",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "data.seq_len=24",
    "data.batch_size=4",
    "data.val_batches=2",
]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_stdlib(0.1)


@pytest.fixture(autouse=True)
def read_once(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_stdlib", lambda val_fraction: corpus)


def small_config(run_dir: Path, *overrides: str) -> Config:
    return load_config([*SMALL, f"run_dir={run_dir}", *overrides])


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def train_losses(run_dir: Path) -> list[float]:
    return [float(row["train_loss"]) for row in read_metrics(run_dir) if row["train_loss"]]


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of 20 steps for each softmax that needs no compiler of its own."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "read_stdlib", lambda val_fraction: corpus)
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
        "losses.png",
        "metrics.csv",
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
    assert summary["val_loss_over_byte_entropy"] == summary["val_loss"] / summary["byte_entropy"]
    calls = summary["call_counts"]
    batches = 20 + 3 * 2  # training, and three validations of two batches
    assert calls["scaled_mask_softmax"]["cpu"] == (2 * batches if softmax == "fused" else 0)
    assert calls["scaled_mask_softmax_backward"]["cpu"] == (2 * 20 if softmax == "fused" else 0)
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.softmax.name, config.run_dir) == (softmax, str(folder))
    assert (folder / "losses.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_say_that_they_started_equal(runs: dict[str, Path]) -> None:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in runs.values()]
    for key in ("initial_weights_sha256", "data_sha256", "byte_entropy"):
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
    module = LanguageModel(config, VOCAB_SIZE)
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


# Data


def data_config(**changes: Any) -> DataConfig:
    settings = {
        "seq_len": 16,
        "batch_size": 3,
        "val_batches": 2,
        "val_fraction": 0.1,
        "num_workers": 0,
    }
    return DataConfig(**(settings | changes))


def test_corpus_is_the_same_each_time(corpus: Corpus) -> None:
    again = read_stdlib(0.1)
    assert again.sha256 == corpus.sha256
    assert torch.equal(again.val, corpus.val)
    share = len(corpus.val) / (len(corpus.train) + len(corpus.val))
    assert 0.05 < share < 0.2
    assert 2.5 < corpus.byte_entropy < 4
    with pytest.raises(ValueError, match="val_fraction"):
        read_stdlib(0.0)


def test_byte_entropy_of_known_text() -> None:
    text = torch.tensor([1, 1, 2, 2], dtype=torch.uint8)
    known = Corpus(text, text, "", 1, Path())
    assert known.byte_entropy == pytest.approx(math.log(2))


def test_batches_depend_on_seed_and_index_alone(corpus: Corpus) -> None:
    def make(seed: int, batches: int = 9) -> TrainBatches:
        return TrainBatches(corpus.train, data_config(), seed=seed, batches=batches)

    batches = make(1)
    fifth = batches[5]
    assert fifth.shape == (3, 17)
    assert torch.equal(make(1, batches=100)[5], fifth)
    assert torch.equal(batches[5], fifth)
    assert not torch.equal(batches[6], fifth)
    assert not torch.equal(make(2)[5], fifth)
    assert not torch.equal(make(2)[4], fifth)
    loaders = [
        TextData(corpus, data_config(num_workers=n), seed=1, train_batches=4).train_dataloader()
        for n in (0, 2)
    ]
    for one, other in zip(*loaders, strict=True):
        assert torch.equal(one, other)


def test_validation_covers_its_part_evenly() -> None:
    tokens = torch.arange(200, dtype=torch.uint8)
    val = ValBatches(tokens, data_config())
    assert val.starts == [0, 37, 73, 110, 146, 183]
    assert val[1][-1].tolist() == list(range(183, 200))
    with pytest.raises(ValueError, match="seq_len"):
        ValBatches(tokens[:10], data_config())


# Model


@pytest.mark.parametrize("positions", list(Positions))
def test_model_is_causal_and_knows_positions(positions: Positions) -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(2, 2, 16, positions, 0.0, 1e-3), vocab_size=11, max_len=8).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(swapped)[:, -1], before[:, -1], atol=1e-7)
    assert model(tokens).shape == (2, 8, 11)


def test_model_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"multiple of model\.n_head, got n_embd=10"):
        GPT(ModelConfig(1, 4, 10, Positions.learned, 0.0, 1e-3), 11, 8)
    with pytest.raises(ValueError, match="rotary needs an even"):
        GPT(ModelConfig(1, 2, 6, Positions.rotary, 0.0, 1e-3), 11, 8)
    model = GPT(ModelConfig(1, 2, 8, Positions.learned, 0.0, 1e-3), 11, 8)
    with pytest.raises(ValueError, match="max_len=8 positions, got 9"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_first_loss_is_that_of_a_uniform_guess(tmp_path: Path) -> None:
    module = LanguageModel(small_config(tmp_path), VOCAB_SIZE)
    tokens = torch.randint(VOCAB_SIZE, (4, 25), dtype=torch.uint8)
    assert module.loss(tokens).item() == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)
    logits = module(tokens[:, :-1].long())
    right = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:].long())
    torch.testing.assert_close(module.loss(tokens), right)


def test_learning_rate_goes_up_and_comes_down(tmp_path: Path) -> None:
    overrides = ["trainer.max_steps=100", "optimizer.warmup_steps=10"]
    module = LanguageModel(small_config(tmp_path, *overrides), VOCAB_SIZE)
    factors = [module.learning_rate_factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == max(factors) == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)


def test_plot_of_a_run_that_ended_early(tmp_path: Path) -> None:
    plot_losses(
        [MetricsRow(0, train_loss=5.0)], byte_entropy=3.0, title="early", path=tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").stat().st_size > 1000

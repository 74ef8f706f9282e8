"""The trainer's data and model by themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import small_config

from train.config import (
    DataConfig,
    ModelConfig,
    Positions,
)
from train.data import VOCAB_SIZE, Corpus, TextData, TrainBatches, ValBatches, read_stdlib
from train.metrics import MetricsRow
from train.model import GPT
from train.module import LanguageModel
from train.plots import plot_losses


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_stdlib(0.1)


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

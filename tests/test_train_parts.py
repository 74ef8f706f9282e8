"""The trainer's model by itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_runs import small_config

from train.config import ModelConfig, ModelKind, Positions
from train.metrics import MetricsRow
from train.models import RelativePositionBias, Transformer
from train.module import LanguageModel
from train.plots import plot_losses

VOCAB_SIZE = 256


@pytest.mark.parametrize("positions", list(Positions))
def test_model_is_causal_and_knows_positions(positions: Positions) -> None:
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(ModelKind.decoder, 2, 2, 16, positions, 0.0, 1e-3), vocab_size=11, max_len=8
    ).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(swapped)[:, -1], before[:, -1], atol=1e-7)
    assert model(tokens).shape == (2, 8, 11)


def decoder(n_head: int, n_embd: int, positions: Positions) -> ModelConfig:
    return ModelConfig(ModelKind.decoder, 1, n_head, n_embd, positions, 0.0, 1e-3)


def test_model_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"multiple of model\.n_head, got n_embd=10"):
        Transformer(decoder(4, 10, Positions.learned), 11, 8)
    with pytest.raises(ValueError, match="rotary needs an even"):
        Transformer(ModelConfig(ModelKind.decoder, 1, 2, 6, Positions.rotary, 0.0, 1e-3), 11, 8)
    model = Transformer(
        ModelConfig(ModelKind.decoder, 1, 2, 8, Positions.learned, 0.0, 1e-3), 11, 8
    )
    with pytest.raises(ValueError, match="max_len=8 positions, got 9"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("positions", list(Positions))
def test_an_encoder_sees_both_ways_and_no_padding(positions: Positions) -> None:
    torch.manual_seed(0)
    config = ModelConfig(ModelKind.encoder, 2, 2, 16, positions, 0.0, 1e-3)
    model = Transformer(config, vocab_size=11, max_len=8).eval()
    tokens = torch.randint(11, (2, 8))
    padding = torch.arange(8) >= torch.tensor([[8], [5]])
    right = model(tokens, padding)
    later = tokens.clone()
    later[:, 4] = (later[:, 4] + 1) % 11
    assert not torch.allclose(model(later, padding)[:, 0], right[:, 0], atol=1e-7)
    behind = tokens.clone()
    behind[1, 5:] = (behind[1, 5:] + 1) % 11  # what isn't there
    assert torch.equal(model(behind, padding)[1, :5], right[1, :5])
    assert torch.equal(model(behind, padding)[0], right[0])
    torch.testing.assert_close(model(tokens[1:, :5])[0], right[1, :5])


def test_buckets_of_relative_positions() -> None:
    bias = RelativePositionBias(2)
    distances = torch.tensor([0, -1, -7, -8, -15, -16, -127, -128, -9999, 1, 7, 8, 128])
    right = [0, 1, 7, 8, 9, 10, 15, 15, 15, 17, 23, 24, 31]
    assert bias.buckets(distances).tolist() == right
    one_way = RelativePositionBias(2, is_bidirectional=False)
    assert one_way.buckets(torch.tensor([5, 0, -1, -15, -16, -9999])).tolist() == [
        *(0, 0, 1, 15, 16, 31),
    ]
    table = bias(40)
    assert table.shape == (2, 40, 40)
    assert torch.equal(table[:, 3, 1], table[:, 30, 28]) and table.requires_grad
    assert torch.equal(table[1, 5, 5], bias.table.weight[0, 1])


def test_first_loss_is_that_of_a_uniform_guess(tmp_path: Path) -> None:
    module = LanguageModel(small_config(tmp_path), VOCAB_SIZE)
    tokens = torch.randint(VOCAB_SIZE, (4, 25))
    assert module.loss(tokens).item() == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)
    logits = module(tokens[:, :-1])
    right = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
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
        [MetricsRow(0, train_loss=5.0)], unigram_entropy=3.0, title="early", path=tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").stat().st_size > 1000

"""A model with attention, a user's own attention with its adapter, and how two of them compare."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sms_plugin
from train.adapter import SoftmaxCore
from train.config import ModelConfig, ModelKind, Positions
from train.models import AttentionCore, Transformer

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HEADS, WIDTH, LENGTH = 2, 2, 16, 12


# A user's own attention, and the adapter that they would write for it.


class PairBiasAttention(nn.Module):
    """One head over (B, T, C) with a learned bias for each pair of positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.pair_bias = nn.Parameter(torch.randn(length, length))
        self.scale = width**-0.5

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # (B, T, C) each
        scores = q @ k.transpose(-2, -1) * self.scale + self.pair_bias  # (B, T, T)
        probs = scores.masked_fill(masked, float("-inf")).softmax(dim=-1)
        return probs @ v


class FusedPairBiasAttention(PairBiasAttention):
    scaled_mask_softmax: sms_plugin.ScaledMaskSoftmax

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        return self.scaled_mask_softmax(scores, masked, self.scale, bias=self.pair_bias) @ v


class WrongScaleAttention(PairBiasAttention):
    """What a comparison has to notice: the scale is off by 1 %."""

    scaled_mask_softmax: sms_plugin.ScaledMaskSoftmax

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        return self.scaled_mask_softmax(scores, masked, self.scale * 1.01, bias=self.pair_bias) @ v


class OwnCore(AttentionCore):
    """A subclass of a known class, which may compute something else."""


class OwnAttention(nn.Module):
    """Looks like attention, and has no adapter."""


class SomeSoftmaxCore(SoftmaxCore):
    """Another adapter's class for the same original."""


def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adapters that a test registers are forgotten after it."""
    from sms_plugin.patch import registry as module

    monkeypatch.setattr(module, "_by_original", dict(module._by_original))
    monkeypatch.setattr(module, "_by_patched", dict(module._by_patched))
    yield


def make_gpt(dropout: float = 0.0) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(ModelKind.decoder, LAYERS, HEADS, WIDTH, Positions.rotary, dropout, 1e-3)
    model = Transformer(config, vocab_size=11, max_len=LENGTH)
    for weight in model.parameters():  # far from zero, so that attention matters to the output
        nn.init.normal_(weight, std=0.3)
    return model


def tokens() -> Tensor:
    return torch.randint(11, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def output_and_gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output, and every parameter's gradient for a random upstream gradient."""
    model.zero_grad()
    out = model(*inputs)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def are_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal up to float32's rounding over a handful of layers."""
    assert len(ours) == len(theirs)
    return all(
        bool((a - b).abs().max() <= 2e-5 * b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )


def copy_by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


by_every_copy = pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy_by_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)


def forward_calls() -> int:
    return sum(sms_plugin.call_counts()["scaled_mask_softmax"].values())


def count_calls(forward: Callable[[], object]) -> int:
    """How often the operator runs forward in it."""
    before = forward_calls()
    forward()
    return forward_calls() - before

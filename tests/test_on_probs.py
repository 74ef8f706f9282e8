"""What is done with the probabilities of a patched model, and for how long it is patched."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from patched_attention import LAYERS, LENGTH, forward_calls, make_gpt, tokens
from torch import Tensor, nn

import sms_plugin
from train.models import AttentionCore

NAMES = [f"blocks.{layer}.attention.core" for layer in range(LAYERS)]


def test_each_layer_is_handed_over_and_freed() -> None:
    model = make_gpt()
    alive: list[weakref.ref[Tensor]] = []
    most_alive = 0
    seen: dict[str, Tensor] = {}

    def keep_copy(name: str, probs: Tensor) -> None:
        nonlocal most_alive
        gc.collect()
        most_alive = max(most_alive, sum(other() is not None for other in alive))
        alive.append(weakref.ref(probs))
        seen[name] = probs.detach().clone()

    report = sms_plugin.patch_attention(model, on_probs=keep_copy)
    with torch.no_grad():
        model(tokens())
    assert list(seen) == NAMES == [module.name for module in report.patched]
    assert most_alive == 0  # those of the layer before are gone
    for probs in seen.values():
        assert probs.shape[-2:] == (LENGTH, LENGTH)
        torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:-1]))
        assert bool((probs.triu(1) == 0).all())


def test_a_loss_on_them_trains_the_model() -> None:
    model = make_gpt()
    collected: list[Tensor] = []
    sms_plugin.patch_attention(model, on_probs=lambda name, probs: collected.append(probs))
    model(tokens())
    sum(probs.square().sum() for probs in collected).backward()  # type: ignore[union-attr]
    grad = model.blocks[0].attention.qkv.weight.grad
    assert grad is not None and bool((grad != 0).any())


def test_patching_again_exchanges_the_listener() -> None:
    model = make_gpt()
    first: list[str] = []
    second: list[str] = []
    sms_plugin.patch_attention(model, on_probs=lambda name, probs: first.append(name))
    sms_plugin.patch_attention(model, on_probs=lambda name, probs: second.append(name))
    model(tokens())
    assert (first, second) == ([], NAMES)
    sms_plugin.patch_attention(model)
    model(tokens())
    assert (first, second) == ([], NAMES)


def test_only_what_was_chosen() -> None:
    model = make_gpt()
    seen: list[str] = []
    sms_plugin.patch_attention(
        model, modules=[NAMES[1]], on_probs=lambda name, probs: seen.append(name)
    )
    model(tokens())
    assert seen == [NAMES[1]]


def test_sdpa_has_none() -> None:
    model = make_gpt()
    with pytest.raises(ValueError, match="no probabilities for on_probs"):
        sms_plugin.patch_attention(model, softmax="sdpa", on_probs=print)
    assert sms_plugin.unpatch_attention(model) == ()


def collect(name: str, probs: Tensor) -> None:
    collect.names.append(name)  # type: ignore[attr-defined]


def test_a_copy_has_the_listener_too() -> None:
    collect.names = []  # type: ignore[attr-defined]
    model = make_gpt()
    sms_plugin.patch_attention(model, on_probs=collect)
    copy.deepcopy(model)(tokens())
    assert collect.names == NAMES  # type: ignore[attr-defined]


# For the time of a block


def test_within_a_block() -> None:
    model = make_gpt()
    right = model(tokens())
    calls = forward_calls()
    with sms_plugin.patched_attention(model) as report:
        assert len(report.patched) == LAYERS
        model(tokens())
        assert forward_calls() == calls + LAYERS
    assert torch.equal(model(tokens()), right)
    assert forward_calls() == calls + LAYERS
    assert type(model.blocks[0].attention.core) is AttentionCore


def test_an_exception_ends_it_too() -> None:
    model = make_gpt()
    with pytest.raises(KeyError), sms_plugin.patched_attention(model):
        raise KeyError
    assert type(model.blocks[0].attention.core) is AttentionCore


def test_blocks_within_blocks() -> None:
    model = make_gpt()
    outer: list[str] = []
    inner: list[str] = []
    with sms_plugin.patched_attention(model, on_probs=lambda name, probs: outer.append(name)):
        with sms_plugin.patched_attention(
            model, modules=[NAMES[0]], on_probs=lambda name, probs: inner.append(name)
        ):
            model(tokens())
        assert (outer, inner) == (NAMES[1:], NAMES[:1])
        outer.clear()
        with sms_plugin.patched_attention(model, softmax="native"):
            calls = forward_calls()
            model(tokens())
            assert forward_calls() == calls
        model(tokens())
        assert outer == NAMES
        assert forward_calls() == calls + LAYERS
    calls = forward_calls()
    model(tokens())
    assert forward_calls() == calls


def test_mode_of_the_slot_follows_the_model() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    sms_plugin.patch_attention(model)
    with sms_plugin.patched_attention(model, softmax="native"):
        model.eval()
    assert not any(module.training for module in model.modules())

"""patch_attention: the same results, every module called, and as if it had never been."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkouts import needs_compiler
from patched_attention import (
    LAYERS,
    LENGTH,
    ROOT,
    WIDTH,
    FusedPairBiasAttention,
    PairBiasAttention,
    WrongScaleAttention,
    are_close,
    by_every_copy,
    forward_calls,
    make_gpt,
    output_and_gradients,
    tokens,
)
from torch import Tensor

import sms_plugin
from sms_plugin.patch import SOFTMAX_NAMES, register_adapter
from train.adapter import SDPACore, SoftmaxCore
from train.models import AttentionCore


@pytest.mark.parametrize(
    "softmax",
    [pytest.param(n, marks=needs_compiler) if n == "compiled" else n for n in SOFTMAX_NAMES],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_patched_equals_unpatched(softmax: str, mode: str) -> None:
    model = make_gpt().train(mode == "train")
    before = output_and_gradients(model, tokens())
    keys = list(model.state_dict())
    report = sms_plugin.patch_attention(model, softmax=softmax)
    assert [module.name for module in report.patched] == [
        f"blocks.{layer}.attention.core" for layer in range(LAYERS)
    ]
    assert list(model.state_dict()) == keys
    calls = forward_calls()
    assert are_close(output_and_gradients(model, tokens()), before)
    assert forward_calls() - calls == (LAYERS if softmax == "fused" else 0)


def test_the_comparison_notices_a_wrong_scale(registry: None) -> None:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    masked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for cls, right in ((FusedPairBiasAttention, True), (WrongScaleAttention, False)):
        torch.manual_seed(0)
        model = PairBiasAttention(WIDTH, LENGTH)
        before = output_and_gradients(model, x, masked)
        from sms_plugin.patch import registry as module

        module._by_original.pop(PairBiasAttention, None)
        register_adapter(PairBiasAttention, cls)
        sms_plugin.patch_attention(model)
        assert are_close(output_and_gradients(model, x, masked), before) is right


@pytest.mark.parametrize("core", [SoftmaxCore, SDPACore])
@pytest.mark.parametrize("queries", [5, 2], ids=["square", "cached"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_core_with_every_mask(
    core: type[AttentionCore], queries: int, is_causal: bool, kind: str | None
) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator) for n in (queries, 5, 5))
    mask: Tensor | None = None
    if kind == "bool":
        mask = torch.tensor([False, False, False, True, False]).expand(2, 1, 1, 5)
    elif kind == "float":
        mask = torch.randn(1, 3, queries, 5, generator=generator)
    module = AttentionCore(head_dim=4, max_len=8, dropout=0.0)
    right, probs = module(q, k, v, mask, is_causal)
    sms_plugin.patch_attention(module, softmax="sdpa" if core is SDPACore else "fused")
    assert type(module) is core
    out, ours = module(q, k, v, mask, is_causal)
    torch.testing.assert_close(out, right, rtol=2e-6, atol=1e-6)
    if core is SDPACore:
        assert ours is None
    else:
        torch.testing.assert_close(ours, probs, rtol=2e-6, atol=1e-7)


def test_dropout_is_the_same_at_equal_seeds() -> None:
    model = make_gpt(dropout=0.3).train()
    torch.manual_seed(5)
    right = model(tokens())
    sms_plugin.patch_attention(model)
    torch.manual_seed(5)
    assert are_close([model(tokens())], [right])


def test_second_patch_changes_nothing_and_another_name_exchanges() -> None:
    model = make_gpt()
    sms_plugin.patch_attention(model)
    slots = [block.attention.core.scaled_mask_softmax for block in model.blocks]
    again = sms_plugin.patch_attention(model)
    assert all(module.already for module in again.patched)
    assert [block.attention.core.scaled_mask_softmax for block in model.blocks] == slots
    other = sms_plugin.patch_attention(model, softmax="sdpa")
    assert not any(module.already for module in other.patched)
    core = model.blocks[0].attention.core
    assert type(core) is SDPACore
    assert not hasattr(core, "scaled_mask_softmax")


def test_unpatched_is_as_if_it_had_never_been() -> None:
    model = make_gpt()
    core = model.blocks[1].attention.core
    attributes = dict(vars(core))
    buffers, children = dict(core._buffers), dict(core._modules)
    right = model(tokens())
    sms_plugin.patch_attention(model)
    restored = sms_plugin.unpatch_attention(model)
    assert restored == tuple(f"blocks.{layer}.attention.core" for layer in range(LAYERS))
    assert type(core) is AttentionCore
    assert vars(core).keys() == attributes.keys()
    assert core._buffers == buffers
    assert core._modules == children
    assert torch.equal(model(tokens()), right)
    assert sms_plugin.unpatch_attention(model) == ()


def test_only_this_model_changes() -> None:
    softmax, functional = torch.softmax, F.softmax
    ours, other = make_gpt(), make_gpt()
    sms_plugin.patch_attention(ours)
    calls = forward_calls()
    other(tokens())
    assert forward_calls() == calls
    assert type(other.blocks[0].attention.core) is AttentionCore
    assert torch.softmax is softmax
    assert F.softmax is functional


@by_every_copy
def test_a_copy_keeps_the_patch_and_its_own_weights(duplicate) -> None:
    model = make_gpt()
    sms_plugin.patch_attention(model)
    right = model(tokens())
    twin = duplicate(model)
    calls = forward_calls()
    assert torch.equal(twin(tokens()), right)
    assert forward_calls() - calls == LAYERS
    with torch.no_grad():
        twin.blocks[0].attention.qkv.weight.mul_(2)
    assert not torch.equal(twin(tokens()), right)
    assert torch.equal(model(tokens()), right)
    sms_plugin.unpatch_attention(twin)
    assert type(model.blocks[0].attention.core) is SoftmaxCore


def test_a_pickled_model_is_patched_in_a_new_process(tmp_path: Path) -> None:
    model = make_gpt()
    sms_plugin.patch_attention(model)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    script = (
        "import pickle, sys, torch, sms_plugin\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert type(model.blocks[0].attention.core).__name__ == 'SoftmaxCore'\n"
        "assert len(sms_plugin.unpatch_attention(model)) == 2\n"
        "assert type(model.blocks[0].attention.core).__name__ == 'AttentionCore'\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pkl")], cwd=ROOT, check=True
    )


def test_checkpoints_go_both_ways() -> None:
    patched, plain = make_gpt(), make_gpt()
    sms_plugin.patch_attention(patched)
    plain.load_state_dict(patched.state_dict())
    patched.load_state_dict(plain.state_dict())


def test_compiled_model_uses_the_patch() -> None:
    model = make_gpt()
    right = model(tokens())
    compiled = torch.compile(model, backend="eager")
    report = sms_plugin.patch_attention(compiled)
    assert len(report.patched) == LAYERS
    calls = forward_calls()
    assert are_close([compiled(tokens())], [right])
    assert forward_calls() > calls

"""patch_attention: the same results, every module called, and as if it had never been."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sms_plugin
from sms_plugin.patch import SOFTMAX_NAMES, PatchError, register_adapter
from sms_plugin.patch.registry import adapter_of
from train.adapter import SDPACore, SoftmaxCore
from train.config import ModelConfig, Positions
from train.model import GPT, AttentionCore

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


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adapters that a test registers are forgotten after it."""
    from sms_plugin.patch import registry as module

    monkeypatch.setattr(module, "_by_original", dict(module._by_original))
    monkeypatch.setattr(module, "_by_patched", dict(module._by_patched))
    yield


def make_gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(LAYERS, HEADS, WIDTH, Positions.rotary, dropout, 1e-3)
    model = GPT(config, vocab_size=11, max_len=LENGTH)
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


def forward_calls() -> int:
    return sum(sms_plugin.call_counts()["scaled_mask_softmax"].values())


@pytest.mark.parametrize("softmax", SOFTMAX_NAMES)
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


def copy_by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy_by_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
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


def test_modules_restricts_and_the_rest_is_reported() -> None:
    model = make_gpt()
    report = sms_plugin.patch_attention(model, modules=["blocks.0.*"])
    assert [module.name for module in report.patched] == ["blocks.0.attention.core"]
    assert [module.name for module in report.skipped] == ["blocks.1.attention.core"]
    assert "modules=" in report.skipped[0].reason
    assert type(model.blocks[1].attention.core) is AttentionCore
    with pytest.raises(ValueError, match=r"encoder.*blocks\.0\.attention\.core"):
        sms_plugin.patch_attention(model, modules=["encoder.*"])
    with pytest.raises(TypeError, match="list"):
        sms_plugin.patch_attention(model, modules="blocks.0.attention.core")


def test_report_names_what_looks_like_attention() -> None:
    model = nn.ModuleDict({"gpt": make_gpt(), "other": OwnAttention()})
    report = sms_plugin.patch_attention(model)
    assert [(module.name, module.blocking) for module in report.skipped] == [("other", False)]
    table = str(report)
    assert "gpt.blocks.1.attention.core" in table
    assert "no adapter" in table
    assert json.loads(report.to_json())["patched"][0]["name"] == "gpt.blocks.0.attention.core"


def replaced_forward(core: AttentionCore) -> AttentionCore:
    core.forward = lambda *args: None  # type: ignore[method-assign]
    return core


@pytest.mark.parametrize(
    ("core", "reason"),
    [
        (OwnCore(4, 8, 0.0), "subclass of AttentionCore"),
        (replaced_forward(AttentionCore(4, 8, 0.0)), "replaced on the instance"),
    ],
    ids=["subclass", "forward replaced"],
)
def test_strict_is_all_or_nothing(core: AttentionCore, reason: str) -> None:
    model = nn.ModuleList([AttentionCore(4, 8, 0.0), core])
    with pytest.raises(PatchError, match=reason) as caught:
        sms_plugin.patch_attention(model)
    assert [module.name for module in caught.value.report.skipped] == ["1"]
    assert type(model[0]) is AttentionCore
    report = sms_plugin.patch_attention(model, strict=False)
    assert [module.name for module in report.patched] == ["0"]
    assert type(model[0]) is SoftmaxCore


def test_nothing_patched_always_raises() -> None:
    for strict in (True, False):
        with pytest.raises(PatchError, match="nothing to patch"):
            sms_plugin.patch_attention(nn.Linear(2, 2), strict=strict)
        with pytest.raises(PatchError, match="no adapter"):
            sms_plugin.patch_attention(OwnAttention(), strict=strict)


def test_adapter_can_decline(registry: None) -> None:
    register_adapter(
        PairBiasAttention,
        FusedPairBiasAttention,
        decline=lambda module, softmax: "too wide" if module.qkv.in_features > 8 else None,
    )
    sms_plugin.patch_attention(PairBiasAttention(8, 4))
    with pytest.raises(PatchError, match="too wide"):
        sms_plugin.patch_attention(PairBiasAttention(16, 4))
    with pytest.raises(PatchError, match="no class for softmax=sdpa"):
        sms_plugin.patch_attention(PairBiasAttention(8, 4), softmax="sdpa")


def test_unknown_softmax_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"fused, native, compiled, reference, sdpa.*'fuesd'"):
        sms_plugin.patch_attention(make_gpt(), softmax="fuesd")


def test_register_adapter_checks_its_classes(registry: None) -> None:
    class LocalCore(AttentionCore):
        pass

    with pytest.raises(TypeError, match="subclass"):
        register_adapter(PairBiasAttention, SoftmaxCore)
    with pytest.raises(TypeError, match="subclass"):
        register_adapter(PairBiasAttention, PairBiasAttention)
    with pytest.raises(ValueError, match="top level"):
        register_adapter(AttentionCore, LocalCore)
    with pytest.raises(ValueError, match="already has the adapter"):
        register_adapter(AttentionCore, SomeSoftmaxCore)
    known = adapter_of(AttentionCore(4, 8, 0.0))
    assert known is not None
    assert known.patched is SoftmaxCore


def test_importing_the_package_loads_no_trainer() -> None:
    script = (
        "import sys, sms_plugin\n"
        "sms_plugin.patch_attention, sms_plugin.callbacks\n"
        "heavy = {'pytorch_lightning', 'lightning', 'hydra', 'omegaconf', 'rich', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)

"""What patch_attention reports and refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from patched_attention import (
    ROOT,
    FusedPairBiasAttention,
    OwnAttention,
    OwnCore,
    PairBiasAttention,
    SomeSoftmaxCore,
    make_gpt,
)
from torch import nn

import sms_plugin
from sms_plugin.patch import PatchError, register_adapter
from sms_plugin.patch.registry import adapter_of
from train.adapter import SoftmaxCore
from train.config import load_config
from train.models import AttentionCore
from train.module import LanguageModel


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


def test_modules_for_sdpa_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    gpt = make_gpt()
    report = sms_plugin.patch_attention(gpt)
    assert [module.unread for module in report.patched] == [True, True]
    said = "SDPA would be faster here, nobody reads the probabilities: blocks.0.attention.core, b"
    assert said in capsys.readouterr().out and "fused; SDPA would be faster" in str(report)
    assert json.loads(report.to_json())["patched"][0]["unread"] is True
    # Somebody reads them, or may; there are none.
    for options in ({"on_probs": print}, {"softmax": "sdpa"}):
        assert not sms_plugin.patch_attention(gpt, **options).advice()
    alone = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    assert not sms_plugin.patch_attention(alone).advice()
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 5)
    (advice,) = sms_plugin.patch_attention(layers).advice()
    assert advice.endswith("layers.2.self_attn and 2 more")


def test_a_trained_bias_is_nothing_for_sdpa() -> None:
    cfg = load_config(["run_dir=.", "model=t5_encoder_small"])
    model = LanguageModel(cfg, 16)
    assert not sms_plugin.patch_attention(model).advice()

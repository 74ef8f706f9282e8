"""What the adapters for Hugging Face transformers refuse, by name, and that they stay optional."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hf_models import FAMILIES, IS_4, LAYERS, TEXT, transformers
from patched_attention import ROOT, count_calls
from torch import nn

import sms_plugin
from sms_plugin.patch import PatchError


def refused(model: nn.Module, match: str, **settings: object) -> None:
    """Strictly an error, leniently a line of its report, and nothing is changed in either case."""
    classes = [type(module) for module in model.modules()]
    for strict in (True, False):
        with pytest.raises(PatchError, match=match) as error:
            sms_plugin.patch_attention(model, strict=strict, **settings)
        assert any(module.blocking for module in error.value.report.skipped)
    assert [type(module) for module in model.modules()] == classes


def test_attention_sinks() -> None:
    config = transformers.GptOssConfig(
        **TEXT,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation="eager",
    )
    refused(transformers.GptOssModel(config), "attention sinks")


def test_scores_in_float32() -> None:
    refused(FAMILIES["gpt2"].build(reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True")


@pytest.mark.skipif(not IS_4, reason="transformers 5 has no relative positions in BERT")
def test_relative_positions_of_bert() -> None:
    refused(FAMILIES["bert"].build(position_embedding_type="relative_key"), "'relative_key'")


def test_relative_positions_of_esm() -> None:
    refused(FAMILIES["esm"].build(position_embedding_type="relative_key"), "'relative_key'")


def test_masks_of_another_implementation() -> None:
    model = FAMILIES["llama"].build("flex_attention")
    refused(model, r"attn_implementation='flex_attention' .*set_attn_implementation\('eager'\)")
    model.set_attn_implementation("eager")
    inputs = FAMILIES["llama"].inputs("left")
    sms_plugin.patch_attention(model)
    model(**inputs)
    model.set_attn_implementation("flex_attention")  # afterwards: said when it is called
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        model(input_ids=inputs["input_ids"], attention_mask=torch.ones(3, 1, 9, 9))


def test_sdpa_is_transformers_own() -> None:
    refused(FAMILIES["llama"].build(), "no class for softmax=sdpa", softmax="sdpa")


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from sms_plugin.patch.adapters import huggingface

    monkeypatch.setattr(huggingface, "OLDEST", (6, 0))
    for name in ("llama", "bert", "t5", "swin"):
        refused(FAMILIES[name].build(), "is older than 6.0; upgrade it")


def test_a_version_with_another_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter would not be called, or would not know what it is called with."""
    from transformers.models.llama import modeling_llama

    model = FAMILIES["llama"].build()
    original = modeling_llama.eager_attention_forward

    def with_sinks(module, query, key, value, attention_mask, scaling, dropout=0.0, sinks=None):
        return original(module, query, key, value, attention_mask, scaling, dropout)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", with_sinks)
        refused(model, "its attention takes sinks: not supported")
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaAttention, "forward", nn.Identity.forward)
        refused(model, "so a patch isn't called")


def test_a_class_without_an_adapter_is_named() -> None:
    config = transformers.Qwen2Config(**TEXT, num_key_value_heads=4)
    with pytest.raises(PatchError, match=r"layers.0.self_attn: no adapter for this class"):
        sms_plugin.patch_attention(transformers.Qwen2Model(config))


def test_some_layers_of_t5() -> None:
    """In 4.57 a layer hands its bias on with the mask in it, unless it is patched."""
    family = FAMILIES["t5"]
    model, inputs = family.build(), family.inputs("left")
    right = model(**inputs)[0]
    pattern = ["encoder.block.1.*"]
    if IS_4:
        refused(model, "all are patched or none", modules=pattern)
        sms_plugin.patch_attention(model)
        with pytest.raises(ValueError, match=r"encoder\.block\.1.*all are patched or none"):
            sms_plugin.unpatch_attention(model, modules=pattern)
        assert count_calls(lambda: model(**inputs)) == 3 * LAYERS
    else:
        sms_plugin.patch_attention(model, modules=pattern)
        outputs = []
        assert count_calls(lambda: outputs.append(model(**inputs)[0])) == 1
        torch.testing.assert_close(outputs[0], right, rtol=1e-4, atol=1e-5)


def test_transformers_is_not_imported() -> None:
    script = (
        "import sys, torch, sms_plugin\n"
        "sys.modules['transformers'] = None  # an import of it would raise\n"
        "model = torch.nn.TransformerEncoderLayer(8, 2, 8)\n"
        "assert len(sms_plugin.patch_attention(model).patched) == 1\n"
        "assert not any(name.startswith('transformers.') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)

"""What is done with a patched model of Hugging Face transformers: generate, copy, save, compile."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import (
    DECODERS,
    FAMILIES,
    HEADS,
    IS_4,
    LAYERS,
    B,
    T,
    implementations,
)
from patched_attention import ROOT, by_every_copy, count_calls
from torch import Tensor, nn

import sms_plugin


def generated(model: nn.Module, inputs: dict, **settings: object) -> Tensor:
    given = {name: value for name, value in inputs.items() if "decoder" not in name}
    given.pop("position_ids", None)
    return model.generate(**given, max_new_tokens=5, do_sample=False, min_new_tokens=5, **settings)


@pytest.mark.parametrize(("name", "implementation"), implementations(*DECODERS, "t5", "whisper"))
def test_generate(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs("left")
    eager, model = family.build(), family.build(implementation)
    sms_plugin.patch_attention(model)
    right = generated(eager, inputs)
    assert right.unique().numel() > 1
    caches: list[dict] = [{}, {"use_cache": False}]
    if name not in ("mistral", "gemma2"):  # their caches of a fixed length are windows
        caches.append({"cache_implementation": "static"})
    for settings in caches:
        calls = count_calls(lambda settings=settings: check(model, inputs, right, settings))
        assert calls >= 5 * LAYERS


def check(model: nn.Module, inputs: dict, right: Tensor, settings: dict) -> None:
    assert torch.equal(generated(model, inputs, **settings), right), settings


@pytest.mark.parametrize(("name", "implementation"), implementations("llama", "gpt2", "t5"))
def test_cache_of_a_fixed_length_without_padding(name: str, implementation: str) -> None:
    """With sdpa there may be no mask at first, and more keys than queries: those not yet filled."""
    family = FAMILIES[name]
    eager, model, inputs = family.build(), family.build(implementation), family.inputs()
    sms_plugin.patch_attention(model)
    right = generated(eager, inputs)
    assert torch.equal(generated(model, inputs, cache_implementation="static"), right)


def test_padding_changes_nothing_for_the_tokens() -> None:
    """A text alone, and after padding beside a text that is nothing but padding."""
    for implementation in ("eager", "sdpa"):
        family = FAMILIES["llama"]
        model = family.build(implementation)
        sms_plugin.patch_attention(model)
        tokens = family.inputs()["input_ids"][:1]
        alone = model(input_ids=tokens)[0]
        padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), tokens], dim=1).repeat(2, 1)
        kept = torch.cat([torch.zeros(2), torch.ones(T)]).repeat(2, 1).long()
        kept[1] = 0
        positions = (kept.cumsum(1) - 1).clamp(min=0)
        both = model(input_ids=padded, attention_mask=kept, position_ids=positions)[0]
        torch.testing.assert_close(both[:1, 2:], alone, rtol=1e-5, atol=2e-6)
        assert bool(both.isfinite().all())


@by_every_copy
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "swin"])
def test_a_copy_keeps_the_patch(name: str, duplicate) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    sms_plugin.patch_attention(model)
    right = model(**inputs)[0]
    twin = duplicate(model)
    outputs: list[Tensor] = []
    assert count_calls(lambda: outputs.append(twin(**inputs)[0])) == family.modules
    assert torch.equal(outputs[0], right)
    assert len(sms_plugin.unpatch_attention(twin)) == family.modules
    assert count_calls(lambda: model(**inputs)) == family.modules


def test_a_pickle_is_patched_in_a_new_process(tmp_path: Path) -> None:
    model = FAMILIES["llama"].build()
    sms_plugin.patch_attention(model)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    script = (
        "import pickle, sys, torch, sms_plugin\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "model(input_ids=torch.ones(1, 4, dtype=torch.long))\n"
        "assert sms_plugin.call_counts()['scaled_mask_softmax']['cpu'] == 2\n"
        "assert len(sms_plugin.unpatch_attention(model)) == 2\n"
        "model(input_ids=torch.ones(1, 4, dtype=torch.long))\n"
        "assert sms_plugin.call_counts()['scaled_mask_softmax']['cpu'] == 2\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pkl")], cwd=ROOT, check=True
    )


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "whisper"])
def test_what_is_saved_is_an_unpatched_model(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    model.save_pretrained(tmp_path / "before")
    sms_plugin.patch_attention(model)
    model.save_pretrained(tmp_path / "patched")
    before, after = (
        json.loads((tmp_path / folder / "config.json").read_text())
        for folder in ("before", "patched")
    )
    assert after == before
    loaded = type(model).from_pretrained(tmp_path / "patched", attn_implementation="eager")
    outputs: list[Tensor] = []
    assert count_calls(lambda: outputs.append(loaded.eval()(**inputs)[0])) == 0
    torch.testing.assert_close(outputs[0], model(**inputs)[0], rtol=1e-4, atol=1e-4)


def test_nothing_else_changes() -> None:
    """Not a model of the same config, not the config, and no entry of transformers' tables."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, masks = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)
    family = FAMILIES["llama"]
    model, inputs = family.build(), family.inputs()
    other = type(model)(model.config).eval()
    config, values = model.config, model.config.to_dict()
    sms_plugin.patch_attention(model)
    assert count_calls(lambda: other(**inputs)) == 0
    assert model.config is config is other.config
    assert config.to_dict() == values
    assert config._attn_implementation == "eager"
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == masks
    now = dict(ALL_ATTENTION_FUNCTIONS)
    now.pop("sms_plugin")
    attention.pop("sms_plugin", None)
    assert now == attention
    with pytest.raises(RuntimeError, match=r"call sms_plugin\.patch_attention"):
        family.build("sms_plugin")(**inputs)


def test_attentions_are_handed_over_and_returned() -> None:
    """`output_attentions` gives the same before, while and after, and leaves nothing behind."""
    for name in ("llama", "bert", "t5", "vit"):
        family = FAMILIES[name]
        model, inputs = family.build(), family.inputs()
        key = "decoder_attentions" if name == "t5" else "attentions"
        before = model(**inputs, output_attentions=True)[key]
        seen: dict[str, Tensor] = {}
        sms_plugin.patch_attention(
            model, on_probs=lambda name, probs, seen=seen: seen.update({name: probs})
        )
        during = model(**inputs, output_attentions=True)[key]
        assert len(seen) == family.modules
        sms_plugin.unpatch_attention(model)
        seen.clear()
        after = model(**inputs, output_attentions=True)[key]
        assert seen == {}
        assert len(before) == len(during) == LAYERS
        for right, ours, again in zip(before, during, after, strict=True):
            assert right.shape[1] == HEADS
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)
            assert torch.equal(again, right)


@pytest.mark.parametrize(
    ("name", "implementation"),
    implementations("llama", "gpt2", "bert", "esm", "t5", "vit", "swin"),
)
def test_compiles_without_a_break(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(implementation), family.inputs()
    settings = {} if family.takes == "image" else {"use_cache": False}
    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(**inputs, **settings)  # unpatched does
    torch._dynamo.reset()
    sms_plugin.patch_attention(model)
    right = model(**inputs, **settings)[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ours = compiled(**inputs, **settings)[0]
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert count_calls(lambda: compiled(**inputs, **settings)) == family.modules


@pytest.mark.parametrize("name", ["llama", "t5", "whisper"])
def test_a_bool_mask_of_four_dimensions_says_what_is_seen(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    sms_plugin.patch_attention(model)
    key = "attention_mask" if family.is_causal else "decoder_attention_mask"
    seen = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(1)) < 0.7
    seen |= torch.eye(T, dtype=torch.bool)
    added = sms_plugin.additive_mask(~seen, torch.float32)
    outputs = [model(**{**inputs, key: mask})[0] for mask in (seen, added)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    family = FAMILIES[name]
    inputs = family.inputs()

    def gradients(checkpointing: bool) -> list[Tensor]:
        model = family.build(dropout=0.2).train()
        sms_plugin.patch_attention(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(4)
        model(**inputs, use_cache=False)[0].square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    for ours, right in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert"])
def test_training_step_under_autocast(name: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs("left")
    kept = family.kept_outputs("left")[..., None]
    losses = []
    for is_patched in (False, True):
        model = family.build().train()
        if is_patched:
            sms_plugin.patch_attention(model)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs)[0].float()
        loss = (output * kept).square().mean()
        loss.backward()
        losses.append(loss.detach())
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)


def test_bert_as_a_decoder_with_cross_attention() -> None:
    for implementation in ("eager", "sdpa"):
        models = [
            FAMILIES["bert"].build(name, is_decoder=True, add_cross_attention=True)
            for name in ("eager", implementation)
        ]
        report = sms_plugin.patch_attention(models[1])
        assert len(report.patched) == 2 * LAYERS
        inputs = FAMILIES["bert"].inputs("right")
        inputs["encoder_hidden_states"] = torch.randn(B, 5, 32)
        inputs["encoder_attention_mask"] = torch.tensor(
            [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
        )
        right, ours = (model(**inputs)[0] for model in models)
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
        tokens, kept = inputs.pop("input_ids"), inputs.pop("attention_mask")
        first = models[1](input_ids=tokens[:, :6], attention_mask=kept[:, :6], **inputs)
        cached = models[1](
            input_ids=tokens[:, 6:],
            attention_mask=kept,
            past_key_values=first.past_key_values,
            **inputs,
        )
        rows = kept[:, 6:, None].bool()
        torch.testing.assert_close(cached[0] * rows, right[:, 6:] * rows, rtol=1e-4, atol=1e-5)


# Those of GPT-NeoX and Swin do not work in 4.57 itself: NaN, and an IndexError.
@pytest.mark.skipif(not IS_4, reason="transformers 5 has no head masks")
@pytest.mark.parametrize("name", ["gpt2", "bert", "esm", "t5", "vit", "whisper"])
def test_head_mask(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    mask = torch.tensor([[1.0, 0.0, 0.5, 1.0], [0.0, 1.0, 1.0, 0.3]])
    masks = {"head_mask": mask}
    if name in ("t5", "whisper"):
        masks |= {"decoder_head_mask": mask, "cross_attn_head_mask": mask.flip(0)}
    right = model(**inputs, **masks)[0]
    assert not torch.allclose(right, model(**inputs)[0], rtol=1e-2)
    sms_plugin.patch_attention(model)
    torch.testing.assert_close(model(**inputs, **masks)[0], right, rtol=1e-4, atol=1e-5)

"""Models of Hugging Face transformers, patched: the same numbers, every module called.

Rows without a single kept key (left padding before a causal token) are left out where masks are
bool: eager gives them the mean over masked keys, the operator gives 0.
"""

from __future__ import annotations

import pytest
import torch
from hf_models import DECODERS, FAMILIES, agree, copied, implementations, run, run_exactly
from patched_attention import count_calls

import sms_plugin
from sms_plugin.modules import ScaledMaskSoftmax

FLOORS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def cases() -> list:
    found = []
    for name, family in FAMILIES.items():
        paddings = ["left", "right"] if family.takes in ("text", "texts") else [None]
        for _, implementation in implementations(name):
            found += [(name, implementation, padding) for padding in paddings]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "implementation", "padding"), cases())
def test_patched_equals_eager(
    name: str, implementation: str, padding: str | None, dtype: torch.dtype
) -> None:
    family = FAMILIES[name]
    kept = family.kept_outputs(padding)
    eager, model = family.build(), family.build(implementation)
    right = run_exactly(copied(eager, torch.float64), family.inputs(padding, torch.float64), kept)
    inputs = family.inputs(padding, dtype)
    theirs = run(copied(eager, dtype), inputs, kept)
    model.to(dtype)
    report = sms_plugin.patch_attention(model)
    assert len(report.patched) == family.modules
    assert agree(run(model, inputs, kept), theirs, right, FLOORS[dtype]) == []


def test_the_comparison_notices_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["llama"]
    kept, inputs = family.kept_outputs(None), family.inputs()
    theirs = run(family.build(), inputs, kept)
    right = run_exactly(family.build(), inputs, kept)
    model = family.build()
    sms_plugin.patch_attention(model)
    forward = ScaledMaskSoftmax.forward

    def wrong(self, scores, mask=None, scale=1.0, is_causal=False, *, bias=None):
        return forward(self, scores, mask, scale * 1.01, is_causal, bias=bias)

    monkeypatch.setattr(ScaledMaskSoftmax, "forward", wrong)
    assert len(agree(run(model, inputs, kept), theirs, right, FLOORS[torch.float32])) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_every_module_is_called_and_restored(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    classes = {key: type(module) for key, module in model.named_modules()}
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    keys, before = list(model.state_dict()), model(**inputs)[0]
    counts: dict[str, int] = {}

    def count(module_name: str, probs: torch.Tensor) -> None:
        counts[module_name] = counts.get(module_name, 0) + 1

    report = sms_plugin.patch_attention(model, on_probs=count)
    assert list(model.state_dict()) == keys
    assert count_calls(lambda: model.train()(**inputs)) == family.modules
    with torch.inference_mode():
        assert count_calls(lambda: model.eval()(**inputs)) == family.modules
    assert counts == dict.fromkeys([module.name for module in report.patched], 2)
    assert sms_plugin.patch_attention(model).patched[0].already
    sms_plugin.unpatch_attention(model)
    assert {key: type(module) for key, module in model.named_modules()} == classes
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes
    assert count_calls(lambda: model(**inputs)) == 0
    assert torch.equal(model(**inputs)[0], before)


@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_at_equal_seeds(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(dropout=0.3).train(), family.inputs()

    def output() -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(5)
        out = model(**inputs, output_attentions=True)
        return out[0].detach(), list(out.get("attentions") or out.get("decoder_attentions"))

    right, weights = output()
    sms_plugin.patch_attention(model)
    ours, our_weights = output()
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())
    assert len(weights) == len(our_weights) > 0
    for probs, their_probs in zip(our_weights, weights, strict=True):
        torch.testing.assert_close(probs, their_probs, rtol=1e-4, atol=1e-5)
    assert any(bool((probs == 0).any()) for probs in weights)
    torch.manual_seed(6)
    assert not torch.allclose(model(**inputs)[0], right, rtol=1e-3)


@pytest.mark.parametrize(("name", "implementation"), implementations(*DECODERS, "t5", "whisper"))
def test_a_later_token_changes_nothing_before_it(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(implementation), family.inputs()
    sms_plugin.patch_attention(model)
    key = "input_ids" if family.is_causal else "decoder_input_ids"
    with torch.no_grad():
        before = model(**inputs)[0]
        inputs[key] = inputs[key].clone()
        inputs[key][:, 6] = (inputs[key][:, 6] + 1) % 30 + 3
        after = model(**inputs)[0]
    assert torch.equal(after[:, :6], before[:, :6])
    assert bool((after[:, 6:] != before[:, 6:]).any(-1).all())


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_gradient_of_the_bias_table_of_t5(padding: str | None) -> None:
    """It runs through the operator: the masked keys of each row have no part in it."""
    family = FAMILIES["t5"]
    model, inputs = family.build(), family.inputs(padding)
    sms_plugin.patch_attention(model)
    backward = sms_plugin.call_counts()["scaled_mask_softmax_backward"]["cpu"]
    model(**inputs)[0].square().sum().backward()
    assert sms_plugin.call_counts()["scaled_mask_softmax_backward"]["cpu"] > backward
    for stack in (model.encoder, model.decoder):
        grad = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        assert bool((grad != 0).any())

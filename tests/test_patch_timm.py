"""Models of timm, patched: the same numbers, every module called, as if it had never been."""

from __future__ import annotations

import pytest
import torch
from patched_attention import count_calls
from torch import Tensor, nn

import sms_plugin
from sms_plugin.patch import PatchError

timm = pytest.importorskip(
    "timm", minversion="1.0.31", reason="the adapters need pip install 'sms_plugin[timm]'"
)

MODELS = {
    "vit": ("VisionTransformer", {"patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 4}),
    "qk_norm": (
        "VisionTransformer",
        {"patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 4, "qk_norm": True},
    ),
    "swin": (
        "SwinTransformer",
        {
            "patch_size": 2,
            "depths": (2, 2),
            "embed_dim": 16,
            "num_heads": (2, 4),
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
    ),
}
LAYERS = {"vit": 2, "qk_norm": 2, "swin": 4}


def build(name: str, fused_attn: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    cls, settings = MODELS[name]
    model = getattr(timm.models, cls)(
        img_size=16, num_classes=5, attn_drop_rate=dropout, **settings
    )
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused_attn
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model.eval()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(images().to(dtype))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    output.backward(weights)
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach().double(), **grads}


@pytest.mark.parametrize("fused_attn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_patched_equals_unpatched(name: str, dtype: torch.dtype, fused_attn: bool) -> None:
    exact = results(build(name).double(), torch.float64)
    theirs = results(build(name).to(dtype), dtype)
    model = build(name, fused_attn).to(dtype)
    assert len(sms_plugin.patch_attention(model).patched) == LAYERS[name]
    ours = results(model, dtype)
    assert ours.keys() == exact.keys()
    largest = max(float(value.norm()) for value in exact.values())
    floor = 1e-6 if dtype == torch.float32 else 4e-3
    for key, right in exact.items():
        error, allowed = (ours[key] - right).norm(), 3 * (theirs[key] - right).norm()
        assert error <= allowed + floor * largest, key


@pytest.mark.parametrize("name", MODELS)
def test_called_in_both_modes_and_restored(name: str) -> None:
    model = build(name, fused_attn=True)
    keys, before = list(model.state_dict()), model(images())
    seen: list[str] = []
    report = sms_plugin.patch_attention(model, on_probs=lambda name, probs: seen.append(name))
    assert list(model.state_dict()) == keys
    assert count_calls(lambda: model.train()(images())) == LAYERS[name]
    assert count_calls(lambda: model.eval()(images())) == LAYERS[name]
    assert seen == 2 * [module.name for module in report.patched]
    sms_plugin.unpatch_attention(model)
    assert count_calls(lambda: model(images())) == 0
    assert torch.equal(model(images()), before)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_at_equal_seeds(name: str) -> None:
    model = build(name, dropout=0.3).train()
    torch.manual_seed(5)
    right = model(images())
    sms_plugin.patch_attention(model)
    torch.manual_seed(5)
    torch.testing.assert_close(model(images()), right, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(images()), right, rtol=1e-3)


@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_masks_of_the_attention(kind: str) -> None:
    module = timm.layers.attention.Attention(
        16, 2, gated=True, scale_norm=True, norm_layer=nn.LayerNorm
    )
    module.fused_attn = False
    x = torch.randn(2, 5, 16)
    given: dict[str, object] = {
        "bool": {"attn_mask": torch.rand(2, 1, 5, 5) < 0.7 + torch.eye(5)},
        "float": {"attn_mask": torch.randn(5, 5)},
        "causal": {"is_causal": True},
    }[kind]
    right = module(x, **given)
    sms_plugin.patch_attention(module)
    torch.testing.assert_close(module(x, **given), right, rtol=1e-5, atol=1e-6)


def test_another_version_is_refused() -> None:
    model = build("vit")
    model.blocks[1].attn.register_module("sink", nn.Linear(1, 1))
    with pytest.raises(PatchError, match="this version of timm differs in sink"):
        sms_plugin.patch_attention(model)

"""nn.MultiheadAttention, patched: in training as it was, in evaluation as in training."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from checkouts import needs_compiler
from patched_attention import forward_calls
from torch import Tensor, nn

import sms_plugin

N, H, L, S, E = 2, 4, 5, 7, 16
INF = float("inf")


def inputs(*, same: bool, batch_first: bool, kdim: int = E, vdim: int = E) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int, width: int) -> Tensor:
        shape = (N, length, width) if batch_first else (length, N, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    if same:
        x = draw(L, E)
        return [x, x, x]
    return [draw(L, E), draw(S, kdim), draw(S, vdim)]


def masks(kind: str, keys: int) -> dict[str, Tensor]:
    """Masks that leave every row its first key."""
    generator = torch.Generator().manual_seed(2)
    found: dict[str, Tensor] = {}
    for name, shape in (
        ("attn_mask", (N * H, L, keys) if "3d" in kind else (L, keys)),
        ("key_padding_mask", (N, keys)),
    ):
        if (name == "attn_mask") is ("attn" in kind) or "both" in kind:
            flags = torch.rand(shape, generator=generator) < 0.4
            flags[..., 0] = False
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[name] = flags if "bool" in kind else values.masked_fill(flags, -INF)
    return found


MASKS = ["none"] + [
    f"{which} {kind}{dims}"
    for which in ("attn", "both")
    for kind in ("bool", "float")
    for dims in ("", " 3d")
]
MASKS += ["padding bool", "padding float"]


def run(module: nn.MultiheadAttention, args: list[Tensor], **kwargs: Any) -> list[Tensor]:
    """Output, weights if there are, and the gradients of inputs and parameters."""
    torch.manual_seed(5)
    out, weights = module(*args, **kwargs)
    generator = torch.Generator().manual_seed(3)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    if weights is not None:
        chosen = torch.randn(weights.shape, generator=generator, dtype=out.dtype)
        loss = loss + (weights * chosen).sum()
    unique = list({id(x): x for x in args}.values())
    gradients = torch.autograd.grad(loss, [*unique, *module.parameters()])
    return [out, *([] if weights is None else [weights]), *gradients]


def close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def both(module: nn.MultiheadAttention, args: list[Tensor], **kwargs: Any) -> None:
    """Patched equals unpatched, and is what it was afterwards."""
    before = run(module, args, **kwargs)
    keys = list(module.state_dict())
    sms_plugin.patch_attention(module)
    calls = forward_calls()
    close(run(module, args, **kwargs), before)
    assert forward_calls() == calls + 1
    assert list(module.state_dict()) == keys
    sms_plugin.unpatch_attention(module)
    after = run(module, args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_mask(kind: str, same: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=batch_first).double()
    args = inputs(same=same, batch_first=batch_first)
    terms = masks(kind, L if same else S)
    both(module, args, **terms)
    both(module, args, **terms, average_attn_weights=False)
    both(module, args, **terms, need_weights=False)


@pytest.mark.parametrize("kind", ["none", "both bool 3d", "both float"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"bias": False},
        {"kdim": 6, "vdim": 10},
        {"kdim": 6, "vdim": 10, "add_bias_kv": True, "bias": False},
        {"dropout": 0.4},
    ],
    ids=str,
)
def test_every_option(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True, **options).double()
    widths = {name: options[name] for name in ("kdim", "vdim") if name in options}
    args = inputs(same=False, batch_first=True, **widths)
    both(module, args, **masks(kind, S), average_attn_weights=False)


def test_unbatched() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True).double()
    args = [x.detach()[0].requires_grad_() for x in inputs(same=False, batch_first=True)]
    padding = torch.zeros(S, dtype=torch.bool)
    padding[-2:] = True
    per_head = masks("attn bool 3d", S)["attn_mask"][:H]
    for terms in ({}, {"key_padding_mask": padding}, {"attn_mask": per_head}):
        both(module, args, **terms, average_attn_weights=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True).double()
    args = inputs(same=True, batch_first=True)
    terms = masks("both bool", L)
    exact = run(module, args, **terms)
    module.to(dtype)
    x = args[0].detach().to(dtype).requires_grad_()
    sms_plugin.patch_attention(module)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    ours = [part.double() for part in run(module, [x, x, x], **terms)]
    close(ours[:2], exact[:2], tolerance)


def test_evaluation_is_as_training() -> None:
    """Without gradients, where the original takes another path."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    sms_plugin.patch_attention(module)
    right = module(x, x, x)[0]
    for context in (torch.no_grad(), torch.inference_mode()):
        calls = forward_calls()
        with context:
            torch.testing.assert_close(module.eval()(x, x, x)[0], right)
        assert forward_calls() == calls + 1


def test_a_row_without_a_key() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True).double()
    args = inputs(same=True, batch_first=True)
    removed = torch.zeros(L, L, dtype=torch.bool)
    removed[2] = True
    sms_plugin.patch_attention(module)
    out, weights, *gradients = run(module, args, attn_mask=removed)
    assert bool((weights[:, 2] == 0).all()) and bool((weights[:, 1] > 0).all())
    assert all(bool(part.isfinite().all()) for part in (out, *gradients))


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"attn_mask": torch.zeros(L, L + 1, L)}, "attn_mask must be"),
        ({"attn_mask": torch.zeros(3, L, L)}, "attn_mask must be"),
        ({"is_causal": True}, "there is no attn_mask"),
    ],
)
def test_bad_masks_are_refused(arguments: dict[str, Any], answer: str) -> None:
    module = nn.MultiheadAttention(E, H, batch_first=True)
    sms_plugin.patch_attention(module)
    x = torch.randn(N, L, E)
    with pytest.raises(RuntimeError, match=answer):
        module(x, x, x, **arguments)


# Inside the Transformer of torch


def encoder(batch_first: bool = True, norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        E, H, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_in_every_mode(batch_first: bool, norm_first: bool) -> None:
    model = encoder(batch_first, norm_first)
    x = torch.randn((N, L, E) if batch_first else (L, N, E))
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * L])
    kept = ~padding if batch_first else ~padding.T
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.bool)
    for arguments in (
        {},
        {"src_key_padding_mask": padding},
        {"mask": causal, "is_causal": True},
        {"mask": causal, "src_key_padding_mask": padding},
    ):
        right = model.train()(x, **arguments).detach()
        sms_plugin.patch_attention(model)
        for is_training in (True, False):
            for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
                calls = forward_calls()
                with context:
                    out = model.train(is_training)(x, **arguments)
                assert forward_calls() == calls + 2
                torch.testing.assert_close(out[kept].clone(), right[kept], atol=1e-5, rtol=1e-5)
        assert sms_plugin.unpatch_attention(model) == (
            "layers.0.self_attn",
            "layers.1.self_attn",
        )


def test_later_tokens_change_nothing_before_them() -> None:
    model = encoder()
    sms_plugin.patch_attention(model)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    x = torch.randn(N, L, E)
    before = model(x, mask=causal)
    x[:, 3:] += 1
    after = model(x, mask=causal)
    assert torch.equal(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:])


def test_decoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2)
    x, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    padding = masks("padding bool", S)["key_padding_mask"]
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.bool)
    arguments = {"tgt_mask": causal, "memory_key_padding_mask": padding}
    right = model(x, memory, **arguments)
    report = sms_plugin.patch_attention(model)
    assert len(report.patched) == 4
    calls = forward_calls()
    torch.testing.assert_close(model(x, memory, **arguments), right, atol=1e-5, rtol=1e-5)
    assert forward_calls() == calls + 4


def test_copies_are_patched_and_independent() -> None:
    model = encoder()
    sms_plugin.patch_attention(model)
    x = torch.randn(N, L, E)
    right = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        calls = forward_calls()
        assert torch.equal(other(x), right)
        assert forward_calls() == calls + 2
        sms_plugin.unpatch_attention(other)
        assert type(other.layers[0].self_attn) is nn.MultiheadAttention
        assert other.layers[0].self_attn._qkv_same_embed_dim is True
    with torch.no_grad():
        copied = copy.deepcopy(model)
        copied.layers[0].self_attn.in_proj_weight.add_(1)
    assert torch.equal(model(x), right)


@needs_compiler
def test_compiled_in_one_graph() -> None:
    model = encoder()
    x = torch.randn(N, L, E)
    right = model(x)
    sms_plugin.patch_attention(model)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), right, atol=1e-5, rtol=1e-5)


def test_sdpa_is_declined() -> None:
    with pytest.raises(sms_plugin.patch.PatchError, match="no class for softmax=sdpa"):
        sms_plugin.patch_attention(nn.MultiheadAttention(E, H), softmax="sdpa")

"""One attention with a learned bias and a padding mask, in each way that people write it.

Legend: B batch, H heads, T queries and keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import sms_plugin
from scripts.benchmarks.attention_rows import AttentionRow, Inputs

Attention = Callable[[Inputs], Tensor]  # -> out (B, H, T, D)

UNCOMPILED = ("native", "fused", "SDPA")
SYSTEMS = ("native", "compiled", "fused", "fused + compiled", "SDPA", "FlexAttention")
PADDED = "fused (padded keys)"  # for rows of scores that aren't a multiple of 16 bytes
ALIGNMENT = 8  # elements: 16 bytes of the shortest dtype


def attend(
    softmax: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor
) -> Tensor:
    """Attention around a softmax with the contract's signature: what `native` and `fused` share.

    Args:
        q: ``(B, H, T, D)``, contiguous, as k and v: then `matmul` copies nothing.
        mask: bool ``(B, 1, 1, T)``, True = removed.
        bias: ``(B or 1, H, T, T)``.

    Returns:
        ``(B, H, T, D)``.
    """
    scores = q @ k.transpose(-2, -1)  # (B, H, T, T)
    probs = softmax(scores, mask, scale=q.shape[-1] ** -0.5, bias=bias)
    return probs @ v


def attend_padded(
    softmax: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor
) -> Tensor:
    """The same with keys appended up to a multiple of 8, which the mask removes.

    So the rows of the scores begin at multiples of 16 bytes, which matrix products need for speed:
    49 keys cost more than 56.
    """
    more = -k.shape[-2] % ALIGNMENT
    k, v = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))  # (B, H, T + more, D)
    mask, bias = F.pad(mask, (0, more), value=True), F.pad(bias, (0, more))
    return attend(softmax, q, k, v, mask, bias)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """By SDPA, whose only place for a bias and a mask is their sum, as large as the scores.

    Args:
        mask: float ``(B, 1, 1, T)``, added.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)


def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, bias: Tensor) -> Tensor:
    """By FlexAttention: the bias in its score_mod, the mask in its block mask."""
    is_shared = bias.shape[0] == 1

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (bias[0, h, i, j] if is_shared else bias[b, h, i, j])

    # With a bias read in score_mod, the tiles chosen for heads of 64 don't fit in shared memory.
    is_wide = q.shape[-1] >= 64 and q.element_size() == 2
    tiles: Any = {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2} if is_wide else None
    return flex_attention(q, k, v, score_mod=add_bias, block_mask=block_mask, kernel_options=tiles)


def block_mask_of(mask: Tensor) -> BlockMask:
    """What FlexAttention wants instead of a bool (B, 1, 1, T)."""

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ~mask[b, 0, 0, j]

    B, T = mask.shape[0], mask.shape[-1]
    return create_block_mask(keep, B, None, T, T, device=str(mask.device))


def systems_of(row: AttentionRow) -> tuple[str, ...]:
    return (*SYSTEMS, PADDED) if row.T % ALIGNMENT else SYSTEMS


def make_attention(system: str, first: Inputs) -> Attention:
    """The attention of a system, to be called with inputs like `first`, whose mask it may convert.

    What depends on the mask alone (SDPA's additive mask, Flex's block mask) is made here, once.

    Raises:
        ValueError: an unknown system.
    """
    if system == "SDPA":
        added = sms_plugin.additive_mask(first.mask, first.q.dtype)
        return lambda i: sdpa(i.q, i.k, i.v, added, i.bias)
    if system == "FlexAttention":
        blocks, compiled_flex = block_mask_of(first.mask), torch.compile(flex)
        return lambda i: compiled_flex(i.q, i.k, i.v, blocks, i.bias)
    softmaxes = {
        "native": "native",
        "compiled": "native",
        "fused": "fused",
        "fused + compiled": "fused",
        PADDED: "fused",
    }
    if system not in softmaxes:
        known = ", ".join((*SYSTEMS, PADDED))
        raise ValueError(f"make_attention: system must be one of {known}; got {system!r}")
    softmax = sms_plugin.ScaledMaskSoftmax(softmaxes[system])
    whole: Callable[..., Tensor] = attend_padded if system == PADDED else attend
    if system.endswith("compiled"):
        whole = torch.compile(whole)
    return lambda i: whole(softmax, i.q, i.k, i.v, i.mask, i.bias)

"""The attention of timm's ViTs, DeiTs and others.

Letters: B batch, N tokens, H heads, D width of a head.
"""

from __future__ import annotations

import inspect

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from sms_plugin.masks import mask_from_keep
from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.registry import register_adapter


class SoftmaxTimmAttention(Attention):
    """The same module with scale, mask and softmax in one operator, whatever `fused_attn` says."""

    scaled_mask_softmax: ScaledMaskSoftmax

    def forward(
        self,
        x: Tensor,  # (B, N, C)
        attn_mask: Tensor | None = None,  # bool, True = seen, or added; broadcasts to (B, H, N, N)
        is_causal: bool = False,  # instead of attn_mask
    ) -> Tensor:  # (B, N, C)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D) each
        scores = self.q_norm(q) @ self.k_norm(k).transpose(-2, -1)  # (B, H, N, N)
        if is_causal or attn_mask is None:
            mask = None
        else:
            mask = mask_from_keep(attn_mask) if attn_mask.dtype == torch.bool else attn_mask
        probs = self.scaled_mask_softmax(scores, mask, self.scale, is_causal)
        out = self.norm((self.attn_drop(probs) @ v).transpose(1, 2).flatten(2))  # (B, N, H * D)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


_ARGUMENTS = {"self", "x", "attn_mask", "is_causal"}
_PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"}


def _decline(module: nn.Module, softmax: str) -> str | None:
    """What another version of timm has that this forward does not."""
    unknown = inspect.signature(Attention.forward).parameters.keys() - _ARGUMENTS
    unknown |= module._modules.keys() - _PARTS - {"scaled_mask_softmax"}
    missing = {part for part in _PARTS if not hasattr(module, part)}
    if unknown or missing:
        return f"this version of timm differs in {', '.join(sorted(unknown | missing))}"
    return None


register_adapter(Attention, SoftmaxTimmAttention, decline=_decline)

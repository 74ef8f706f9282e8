"""How train/models's attention core is patched, registered as a user would for their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sms_plugin
from train.models import AttentionCore
from train.models.attention import Attention


class SoftmaxCore(AttentionCore):
    """The core with its scale, mask and softmax in one operator."""

    scaled_mask_softmax: sms_plugin.ScaledMaskSoftmax

    def forward(
        self,
        q: Tensor,  # (B, H, Tq, D)
        k: Tensor,  # (B, H, Tk, D)
        v: Tensor,  # (B, H, Tk, D)
        mask: Tensor | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        scores = q @ k.transpose(-2, -1)  # (B, H, Tq, Tk)
        probs = self.scaled_mask_softmax(scores, mask, self.scale, is_causal, bias=bias)
        probs = F.dropout(probs, self.dropout, self.training)
        return probs @ v, probs  # (B, H, Tq, D), (B, H, Tq, Tk)


class SDPACore(AttentionCore):
    """The core by F.scaled_dot_product_attention: no probabilities."""

    def forward(
        self,
        q: Tensor,  # (B, H, Tq, D)
        k: Tensor,  # (B, H, Tk, D)
        v: Tensor,  # (B, H, Tk, D)
        mask: Tensor | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        t_q, t_k = q.size(-2), k.size(-2)
        if is_causal and (mask is not None or bias is not None or t_q != t_k):
            # SDPA aligns is_causal to the top left, and not every version takes a mask with it.
            above = self.causal_mask[t_k - t_q : t_k, :t_k]  # (Tq, Tk), True = masked
            if mask is None:
                mask = above
            elif mask.dtype == torch.bool:
                mask = mask | above
            else:
                mask = mask.masked_fill(above, float("-inf"))
            is_causal = False
        if bias is not None:  # SDPA has one term for both
            if mask is None:
                mask = bias
            elif mask.dtype == torch.bool:
                mask = torch.where(mask, float("-inf"), bias)
            else:
                mask = bias + mask
            mask = mask.to(q.dtype)
        elif mask is not None and mask.dtype == torch.bool:
            mask = ~mask  # SDPA's True means: take part
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=self.scale
        )  # (B, H, Tq, D)
        return out, None


def is_unread(core: nn.Module, parent: nn.Module | None) -> bool:
    """Attention leaves the probabilities alone, but T5's bias gets its gradient through them."""
    return isinstance(parent, Attention) and not parent.has_bias


sms_plugin.register_adapter(AttentionCore, SoftmaxCore, sdpa=SDPACore, is_unread=is_unread)

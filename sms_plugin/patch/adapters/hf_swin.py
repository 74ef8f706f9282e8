"""Swin of Hugging Face transformers: its bias of relative positions is the operator's `bias`.

Letters: B images, W windows in each, H heads, T positions in a window, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.swin import modeling_swin

from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.adapters.huggingface import (
    DispatchedAttention,
    register_dispatched,
    split_heads,
    too_old,
)
from sms_plugin.patch.adapters.windows import softmax_in_windows
from sms_plugin.patch.registry import register_adapter

if hasattr(modeling_swin, "SwinSelfAttention"):  # 4.57

    class SoftmaxSwinSelfAttention(modeling_swin.SwinSelfAttention):
        """The same module with scale, bias, mask and softmax in one operator."""

        scaled_mask_softmax: ScaledMaskSoftmax

        def forward(
            self,
            hidden_states: Tensor,  # (B * W, T, H * D)
            attention_mask: Tensor | None = None,  # (W, T, T), added
            head_mask: Tensor | None = None,  # (1, H, 1, 1), multiplies
            output_attentions: bool | None = False,
        ) -> tuple[Tensor, ...]:
            query, key, value = (
                split_heads(linear(hidden_states), self.num_attention_heads)
                for linear in (self.query, self.key, self.value)
            )  # (B * W, H, T, D) each
            bias = self.relative_position_bias_table[self.relative_position_index]  # (T, T, H)
            probs = softmax_in_windows(
                self.scaled_mask_softmax,
                query @ key.transpose(-2, -1),
                self.attention_head_size**-0.5,
                bias.permute(2, 0, 1).contiguous(),
                attention_mask,
            )
            probs = F.dropout(probs, self.dropout.p, self.training)
            if head_mask is not None:
                probs = probs * head_mask
            out = (probs @ value).transpose(1, 2).flatten(2)  # (B * W, T, H * D)
            return (out, probs) if output_attentions else (out,)

    def _decline(module: nn.Module, softmax: str) -> str | None:
        return too_old()

    register_adapter(modeling_swin.SwinSelfAttention, SoftmaxSwinSelfAttention, decline=_decline)

else:

    class SoftmaxSwinAttention(DispatchedAttention, modeling_swin.SwinAttention):
        """The same module with scale, bias, mask and softmax in one operator."""

        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Tensor | None = None,  # (W, T, T), added
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            # Without a mask, the original hands its bias on as it is: (1, H, T, T).
            return super().forward(hidden_states, None, shift_mask=attention_mask, **kwargs)

        def attend(
            self,
            query: Tensor,  # (B * W, H, T, D)
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,  # the bias, (1, H, T, T)
            *args: Any,
            **kwargs: Any,  # scaling, dropout, and what our forward has added
        ) -> tuple[Tensor, Tensor]:  # (B * W, T, H, D), (B * W, H, T, T)
            assert attention_mask is not None
            shift_mask, scaling = kwargs["shift_mask"], kwargs["scaling"]
            scores = query @ key.transpose(-2, -1)
            probs = softmax_in_windows(
                self.scaled_mask_softmax, scores, scaling, attention_mask, shift_mask
            )
            probs = F.dropout(probs, kwargs["dropout"], self.training)
            return (probs @ value).transpose(1, 2).contiguous(), probs

    register_dispatched(modeling_swin.SwinAttention, SoftmaxSwinAttention)

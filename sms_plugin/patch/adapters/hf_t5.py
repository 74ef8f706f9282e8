"""T5 of Hugging Face transformers: its bias of relative positions is the operator's `bias`.

Letters: B batch, H heads, Tq queries, Tk keys, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.t5 import modeling_t5
from transformers.models.t5.modeling_t5 import T5Attention

from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.adapters.huggingface import (
    ARGUMENTS,
    DispatchedAttention,
    cached_keys_and_values,
    operator_mask,
    register_dispatched,
    split_heads,
    too_old,
)
from sms_plugin.patch.registry import register_adapter

if hasattr(modeling_t5, "eager_attention_forward"):  # 5

    class SoftmaxT5Attention(DispatchedAttention, T5Attention):
        """The same module with bias, mask and softmax in one operator."""

        arguments = ARGUMENTS | {"position_bias"}

    register_dispatched(T5Attention, SoftmaxT5Attention)

else:  # 4.57

    class SoftmaxT5Attention(T5Attention):  # type: ignore[no-redef]
        """The same module with bias, mask and softmax in one operator.

        The first layer of a stack hands its bias to the others. Here it doesn't add the mask to it
        before: (1, H, Tq, Tk) stays what is read in each layer, and what gets a gradient there.
        """

        scaled_mask_softmax: ScaledMaskSoftmax

        def forward(
            self,
            hidden_states: Tensor,  # (B, Tq, H * D)
            mask: Tensor | None = None,  # added, or bool; broadcasts to (B, H, Tq, Tk or more)
            key_value_states: Tensor | None = None,  # (B, Tk, H * D)
            position_bias: Tensor | None = None,  # (1, H, Tq, Tk)
            past_key_values: Any = None,
            layer_head_mask: Tensor | None = None,  # (H,) or (B or 1, H, 1, 1), multiplies
            query_length: int | None = None,
            use_cache: bool = False,
            output_attentions: bool = False,
            cache_position: Tensor | None = None,
        ) -> tuple[Tensor | None, ...]:
            is_cross = key_value_states is not None
            states = hidden_states if key_value_states is None else key_value_states
            key, value = cached_keys_and_values(
                lambda: (
                    split_heads(self.k(states), self.n_heads),
                    split_heads(self.v(states), self.n_heads),
                ),
                past_key_values,
                self.layer_idx,
                is_cross,
                cache_position,
            )
            query = split_heads(self.q(hidden_states), self.n_heads)  # (B, H, Tq, D)
            scores = query @ key.transpose(-2, -1)  # (B, H, Tq, Tk)
            queries, keys = scores.shape[-2:]
            if position_bias is None and self.has_relative_attention_bias:
                length: Any = queries if query_length is None else query_length
                if query_length is None and cache_position is not None:
                    length = cache_position[-1] + 1
                position_bias = self.compute_bias(
                    length, keys, device=scores.device, cache_position=cache_position
                )[:, :, -queries:]
            if mask is not None:
                mask = operator_mask(mask, keys)
            probs = self.scaled_mask_softmax(scores, mask, bias=position_bias)
            probs = F.dropout(probs, self.dropout, self.training)
            if layer_head_mask is not None:
                probs = probs * layer_head_mask
            out = self.o((probs @ value).transpose(1, 2).flatten(2))  # (B, Tq, H * D)
            return (out, position_bias, probs) if output_attentions else (out, position_bias)

    def _decline(module: nn.Module, softmax: str) -> str | None:
        if (reason := too_old()) is not None:
            return reason
        return "heads were pruned: not supported" if module.pruned_heads else None

    register_adapter(T5Attention, SoftmaxT5Attention, decline=_decline, together=True)

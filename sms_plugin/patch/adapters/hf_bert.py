"""BERT of Hugging Face transformers; 5 looks its attention function up, 4.57 has its own forward.

Letters: B batch, H heads, Tq queries, Tk keys, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.adapters.huggingface import (
    DispatchedAttention,
    cached_keys_and_values,
    register_dispatched,
    split_heads,
    too_old,
)
from sms_plugin.patch.registry import register_adapter

if hasattr(modeling_bert, "BertSdpaSelfAttention"):  # 4.57

    class _Forward(nn.Module):
        """One forward for the two classes of 4.57, in place of theirs."""

        scaled_mask_softmax: ScaledMaskSoftmax
        is_causal_without_mask = False
        if TYPE_CHECKING:  # what the original classes hold

            def __getattr__(self, name: str) -> Any: ...

        def forward(
            self,
            hidden_states: Tensor,  # (B, Tq, H * D)
            attention_mask: Tensor | None = None,  # added; broadcasts to (B, H, Tq, Tk)
            head_mask: Tensor | None = None,  # (B or 1, H, 1, 1), multiplies
            encoder_hidden_states: Tensor | None = None,  # (B, Tk, H * D)
            past_key_values: Any = None,
            output_attentions: bool | None = False,
            cache_position: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            is_cross = encoder_hidden_states is not None
            states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            key, value = cached_keys_and_values(
                lambda: (
                    split_heads(self.key(states), self.num_attention_heads),
                    split_heads(self.value(states), self.num_attention_heads),
                ),
                past_key_values,
                self.layer_idx,
                is_cross,
                cache_position,
            )
            query = split_heads(self.query(hidden_states), self.num_attention_heads)
            scores = query @ key.transpose(-2, -1)  # (B, H, Tq, Tk)
            is_causal = (
                self.is_causal_without_mask
                and self.is_decoder
                and not is_cross
                and attention_mask is None
                and query.shape[-2] > 1
            )
            probs = self.scaled_mask_softmax(
                scores, attention_mask, self.attention_head_size**-0.5, is_causal
            )
            probs = F.dropout(probs, self.dropout.p, self.training)
            if head_mask is not None:
                probs = probs * head_mask
            return (probs @ value).transpose(1, 2).flatten(2), probs

    class SoftmaxBertSelfAttention(_Forward, modeling_bert.BertSelfAttention):
        """The same module with scale, mask and softmax in one operator."""

    class SoftmaxBertSdpaSelfAttention(_Forward, modeling_bert.BertSdpaSelfAttention):
        """The same for attn_implementation="sdpa", whose decoders may have no mask."""

        is_causal_without_mask = True

    def _decline(module: nn.Module, softmax: str) -> str | None:
        if (reason := too_old()) is not None:
            return reason
        if module.position_embedding_type != "absolute":
            return f"position_embedding_type={module.position_embedding_type!r} is not supported"
        return None

    register_adapter(modeling_bert.BertSelfAttention, SoftmaxBertSelfAttention, decline=_decline)
    register_adapter(
        modeling_bert.BertSdpaSelfAttention, SoftmaxBertSdpaSelfAttention, decline=_decline
    )

else:

    class SoftmaxBertSelfAttention(  # type: ignore[no-redef]
        DispatchedAttention, modeling_bert.BertSelfAttention
    ):
        """The same module with scale, mask and softmax in one operator."""

    class SoftmaxBertCrossAttention(DispatchedAttention, modeling_bert.BertCrossAttention):
        """The same module with scale, mask and softmax in one operator."""

    register_dispatched(modeling_bert.BertSelfAttention, SoftmaxBertSelfAttention)
    register_dispatched(modeling_bert.BertCrossAttention, SoftmaxBertCrossAttention)

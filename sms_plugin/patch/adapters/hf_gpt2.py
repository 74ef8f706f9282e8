"""GPT-2 of Hugging Face transformers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched

# 4.57 leaves the scale and, beside the mask, causality to its eager function; 5 passes them.
_IS_LEFT_TO_EAGER = (
    "scaling" not in inspect.signature(modeling_gpt2.eager_attention_forward).parameters
)


class SoftmaxGPT2Attention(DispatchedAttention, GPT2Attention):
    """The same module with scale, masks and softmax in one operator."""

    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if _IS_LEFT_TO_EAGER:
            scale = query.shape[-1] ** -0.5 if self.scale_attn_weights else 1.0
            layer = self.layer_idx + 1 if self.scale_attn_by_inverse_layer_idx else 1
            kwargs["scaling"] = scale / layer
        return super().attend(query, *args, **kwargs)

    def mask_of(
        self, attention_mask: Tensor | None, scores: Tensor, is_causal: bool | None
    ) -> tuple[Tensor | None, bool]:
        mask, is_causal = super().mask_of(attention_mask, scores, is_causal)
        if _IS_LEFT_TO_EAGER and self.__dict__["config"]._attn_implementation == "eager":
            is_causal = not self.is_cross_attention
        return mask, is_causal


def _decline(module: nn.Module, softmax: str) -> str | None:
    if module.reorder_and_upcast_attn:
        return "reorder_and_upcast_attn=True (scores in float32 always) is not supported"
    return None


register_dispatched(GPT2Attention, SoftmaxGPT2Attention, _decline)

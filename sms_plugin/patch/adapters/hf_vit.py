"""ViT of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.vit import modeling_vit

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched

if hasattr(modeling_vit, "ViTSelfAttention"):  # 4.57

    class SoftmaxViTSelfAttention(DispatchedAttention, modeling_vit.ViTSelfAttention):
        """The same module with scale and softmax in one operator."""

        def attend(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,  # in fact one of heads, which multiplies
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            kwargs["head_mask"] = attention_mask
            return super().attend(query, key, value, None, *args, **kwargs)

    register_dispatched(modeling_vit.ViTSelfAttention, SoftmaxViTSelfAttention)

else:

    class SoftmaxViTAttention(DispatchedAttention, modeling_vit.ViTAttention):
        """The same module with scale, mask and softmax in one operator."""

    register_dispatched(modeling_vit.ViTAttention, SoftmaxViTAttention)

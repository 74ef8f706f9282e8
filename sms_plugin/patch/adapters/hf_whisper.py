"""Whisper of Hugging Face transformers: encoder, decoder, and the decoder's cross-attention."""

from __future__ import annotations

from torch import Tensor
from transformers.models.whisper.modeling_whisper import WhisperAttention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched


class SoftmaxWhisperAttention(DispatchedAttention, WhisperAttention):
    """The same module with mask and softmax in one operator; queries arrive scaled."""

    def mask_of(
        self, attention_mask: Tensor | None, scores: Tensor, is_causal: bool | None
    ) -> tuple[Tensor | None, bool]:
        if attention_mask is not None and attention_mask.dim() != 4:
            attention_mask = None  # the encoder's, over frames: 4.57 hands it on, and ignores it
        return super().mask_of(attention_mask, scores, is_causal)


register_dispatched(WhisperAttention, SoftmaxWhisperAttention)

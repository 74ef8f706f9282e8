"""Gemma 2 of Hugging Face transformers: scores are capped by tanh; the window is in the mask."""

from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

from sms_plugin.patch.adapters.huggingface import (
    ARGUMENTS,
    DispatchedAttention,
    register_dispatched,
)


class SoftmaxGemma2Attention(DispatchedAttention, Gemma2Attention):
    """The same module with mask and softmax in one operator, after the cap."""

    arguments = ARGUMENTS | {"softcap"}


register_dispatched(Gemma2Attention, SoftmaxGemma2Attention)

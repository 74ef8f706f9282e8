"""Mistral of Hugging Face transformers; its sliding window comes as part of the mask."""

from transformers.models.mistral.modeling_mistral import MistralAttention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched


class SoftmaxMistralAttention(DispatchedAttention, MistralAttention):
    """The same module with scale, mask and softmax in one operator."""


register_dispatched(MistralAttention, SoftmaxMistralAttention)

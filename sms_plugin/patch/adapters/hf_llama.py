"""Llama of Hugging Face transformers: heads that share keys and values, with and without cache."""

from transformers.models.llama.modeling_llama import LlamaAttention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched


class SoftmaxLlamaAttention(DispatchedAttention, LlamaAttention):
    """The same module with scale, mask and softmax in one operator."""


register_dispatched(LlamaAttention, SoftmaxLlamaAttention)

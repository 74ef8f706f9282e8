"""GPT-NeoX of Hugging Face transformers."""

from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched


class SoftmaxGPTNeoXAttention(DispatchedAttention, GPTNeoXAttention):
    """The same module with scale, mask and softmax in one operator."""


register_dispatched(GPTNeoXAttention, SoftmaxGPTNeoXAttention)

"""GPT-OSS of Hugging Face transformers: refused by name."""

from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched


class SoftmaxGptOssAttention(DispatchedAttention, GptOssAttention):
    """Never used: `scaled_mask_softmax` has no attention sinks."""


def _decline(module: nn.Module, softmax: str) -> str:
    return "attention sinks (a learned share of each row that goes to no key) are not supported"


register_dispatched(GptOssAttention, SoftmaxGptOssAttention, _decline)

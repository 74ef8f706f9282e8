"""ESM-2 of Hugging Face transformers."""

from torch import nn
from transformers.models.esm.modeling_esm import EsmSelfAttention

from sms_plugin.patch.adapters.huggingface import DispatchedAttention, register_dispatched


class SoftmaxEsmSelfAttention(DispatchedAttention, EsmSelfAttention):
    """The same module with mask and softmax in one operator; queries arrive scaled."""


def _decline(module: nn.Module, softmax: str) -> str | None:
    if module.position_embedding_type in ("relative_key", "relative_key_query"):
        return f"position_embedding_type={module.position_embedding_type!r} is not supported"
    return None


register_dispatched(EsmSelfAttention, SoftmaxEsmSelfAttention, _decline)

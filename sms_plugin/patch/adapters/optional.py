"""Adapters for packages that need not be installed: each is imported when a model needs it."""

from sms_plugin.patch.registry import register_later

_FAMILIES = {
    "bert": "hf_bert",
    "esm": "hf_esm",
    "gemma2": "hf_gemma2",
    "gpt2": "hf_gpt2",
    "gpt_neox": "hf_gpt_neox",
    "gpt_oss": "hf_gpt_oss",
    "llama": "hf_llama",
    "mistral": "hf_mistral",
    "swin": "hf_swin",
    "t5": "hf_t5",
    "vit": "hf_vit",
    "whisper": "hf_whisper",
}

for _family, _adapters in _FAMILIES.items():
    register_later(
        f"transformers.models.{_family}.modeling_{_family}",
        f"sms_plugin.patch.adapters.{_adapters}",
    )

register_later("timm.layers.attention", "sms_plugin.patch.adapters.timm_attention")
register_later("timm.models.swin_transformer", "sms_plugin.patch.adapters.timm_swin")

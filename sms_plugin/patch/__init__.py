"""Exchange the softmax of a model's attention in one line, and restore it in one.

    report = sms_plugin.patch_attention(model)
    sms_plugin.unpatch_attention(model)

A module is patched by an adapter: a subclass of its class that calls `self.scaled_mask_softmax`.
`register_adapter` adds one for a class of your own.
"""

from sms_plugin.patch.adapters import multihead, optional  # noqa: F401  register adapters
from sms_plugin.patch.patching import patch_attention, patched_attention, unpatch_attention
from sms_plugin.patch.registry import SOFTMAX_NAMES, Adapter, register_adapter
from sms_plugin.patch.report import PatchedModule, PatchError, PatchReport, SkippedModule

__all__ = [
    "SOFTMAX_NAMES",
    "Adapter",
    "PatchError",
    "PatchReport",
    "PatchedModule",
    "SkippedModule",
    "patch_attention",
    "patched_attention",
    "register_adapter",
    "unpatch_attention",
]

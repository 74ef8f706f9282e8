"""Fused ``softmax(scores * scale + bias + mask)`` for attention that needs its probabilities."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from sms_plugin._version import __version__

_import_error: Exception | None = None
try:
    from sms_plugin.functional import scaled_mask_softmax
    from sms_plugin.masks import additive_mask, mask_from_keep
    from sms_plugin.modules import ScaledMaskSoftmax
    from sms_plugin.ops import call_counts
except Exception as error:
    # `python -m sms_plugin.doctor` comes through here first, and says what is wrong with torch.
    if sys.argv[:1] != ["-m"] or "sms_plugin.doctor" not in sys.orig_argv:
        raise
    _import_error = error

if TYPE_CHECKING:
    from sms_plugin.patch import (
        PatchReport,
        patch_attention,
        patched_attention,
        register_adapter,
        unpatch_attention,
    )

# Loaded at first use: neither Lightning nor the plugin is needed to call the operator.
_LAZY_NAMES = {
    "PatchReport": "sms_plugin.patch",
    "patch_attention": "sms_plugin.patch",
    "patched_attention": "sms_plugin.patch",
    "register_adapter": "sms_plugin.patch",
    "unpatch_attention": "sms_plugin.patch",
}
_LAZY_MODULES = ("callbacks", "reference")

__all__ = [
    "PatchReport",
    "ScaledMaskSoftmax",
    "__version__",
    "additive_mask",
    "call_counts",
    "mask_from_keep",
    "patch_attention",
    "patched_attention",
    "register_adapter",
    "scaled_mask_softmax",
    "unpatch_attention",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    if name in _LAZY_MODULES:
        return importlib.import_module(f"sms_plugin.{name}")
    raise AttributeError(f"module 'sms_plugin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY_MODULES})

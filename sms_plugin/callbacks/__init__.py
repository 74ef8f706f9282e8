"""What a Lightning Trainer takes: `FusedSoftmaxCallback`, `ForwardBackwardTimer`, `AttentionMaps`.

All work with `pytorch_lightning` and with `lightning.pytorch`. Which of the two they derive from
is decided when a callback is first looked up: the one that is imported by then; both if both are;
else the one that is installed. Nothing of Lightning is loaded before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sms_plugin.callbacks.attention_maps import AttentionMaps
    from sms_plugin.callbacks.fused_softmax import FusedSoftmaxCallback
    from sms_plugin.callbacks.timer import ForwardBackwardTimer

__all__ = ["AttentionMaps", "ForwardBackwardTimer", "FusedSoftmaxCallback"]

_MODULES = {
    "AttentionMaps": "sms_plugin.callbacks.attention_maps",
    "ForwardBackwardTimer": "sms_plugin.callbacks.timer",
    "FusedSoftmaxCallback": "sms_plugin.callbacks.fused_softmax",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'sms_plugin.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

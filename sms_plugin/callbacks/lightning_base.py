"""`Callback`: the base class of whichever Lightning the user has imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

_FLAVOURS = ("lightning.pytorch", "pytorch_lightning")


def _is_installed(flavour: str) -> bool:
    try:
        return importlib.util.find_spec(flavour) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _base_classes() -> tuple[type[Any], ...]:
    """One base, or both where both are imported: either kind of Trainer then knows the callback.

    Raises:
        ImportError: when neither is installed.
    """
    imported = [flavour for flavour in _FLAVOURS if sys.modules.get(flavour) is not None]
    chosen = imported or [flavour for flavour in _FLAVOURS if _is_installed(flavour)][:1]
    if not chosen:
        raise ImportError(
            "sms_plugin.callbacks needs Lightning, but neither 'lightning' nor 'pytorch_lightning' "
            "is installed; run: pip install pytorch-lightning"
        )
    return tuple(importlib.import_module(f"{flavour}.callbacks").Callback for flavour in chosen)


if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
else:
    Callback = type("Callback", _base_classes(), {"__module__": __name__})

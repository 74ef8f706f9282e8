"""Which attention classes can be patched, and what takes their place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

# `sdpa` exchanges the whole core; the others are the impls of sms_plugin.ScaledMaskSoftmax.
SOFTMAX_NAMES = ("fused", "native", "compiled", "reference", "sdpa")


def check_softmax(caller: str, softmax: str) -> None:
    """Raise a ValueError that lists the names unless `softmax` is one of them."""
    if softmax not in SOFTMAX_NAMES:
        raise ValueError(
            f"{caller}: softmax must be one of {', '.join(SOFTMAX_NAMES)}, got {softmax!r}"
        )


Decline = Callable[[nn.Module, str], "str | None"]
IsUnread = Callable[[nn.Module, "nn.Module | None"], bool]


@dataclass(frozen=True)
class Adapter:
    """How instances of one class are patched: by exchanging their `__class__`.

    The state dict keeps its keys, and deepcopy, pickle and torch.save keep the patch, which a
    method bound to the instance would not survive.

    Attributes:
        original: the class that is recognised; its subclasses are not, for they may compute
            something else.
        patched: subclass of `original` whose forward calls `self.scaled_mask_softmax`.
        sdpa: subclass of `original` without probabilities, for softmax="sdpa"; None: declined.
        decline: called with the module and the name of the softmax; a reason why this instance
            cannot be patched, or None.
        is_unread: called with the module and the one that holds it; whether nobody reads the
            probabilities, and nothing else needs them, so that SDPA would be faster.
        together: instances hand something to each other that the patched class changes, so that
            within a model all of them are patched, or none.
    """

    original: type[nn.Module]
    patched: type[nn.Module]
    sdpa: type[nn.Module] | None = None
    decline: Decline | None = None
    is_unread: IsUnread | None = None
    together: bool = False

    def class_for(self, softmax: str) -> type[nn.Module] | None:
        """The class that an instance gets for `softmax`; None when there is none."""
        return self.sdpa if softmax == "sdpa" else self.patched


_by_original: dict[type[nn.Module], Adapter] = {}
_by_patched: dict[type[nn.Module], Adapter] = {}
_unloaded: dict[str, str] = {}  # a module that defines attention: the one with its adapters


def register_adapter(
    original: type[nn.Module],
    patched: type[nn.Module],
    *,
    sdpa: type[nn.Module] | None = None,
    decline: Decline | None = None,
    is_unread: IsUnread | None = None,
    together: bool = False,
) -> Adapter:
    """Teach `patch_attention` a class of attention module.

    Args:
        original: the class to recognise (exactly this one, not its subclasses).
        patched: a subclass whose forward calls
            `self.scaled_mask_softmax(scores, mask, scale, is_causal, bias=bias)`; it has no
            `__init__` of its own, since instances arrive built.
        sdpa: a subclass that has no probabilities, for softmax="sdpa".
        decline: `decline(module, softmax)` returns why an instance can't be patched, or None.
        is_unread: `is_unread(module, parent)` returns whether nobody reads the probabilities of an
            instance, nor trains a bias with it: the report then says that SDPA would be faster.
        together: all instances in a model are patched, or none (they hand each other something).

    Raises:
        TypeError: when `patched` or `sdpa` is not a subclass of `original`.
        ValueError: when a class can't be pickled by its name, or `original` has another adapter.
    """
    for argument, cls in (("patched", patched), ("sdpa", sdpa)):
        if cls is None:
            continue
        if not (isinstance(cls, type) and issubclass(cls, original) and cls is not original):
            raise TypeError(
                f"register_adapter: {argument} must be a subclass of {qualified(original)}, got "
                f"{cls!r}; derive it, so that isinstance checks and attributes stay as they are"
            )
        if _lookup(cls) is not cls:
            raise ValueError(
                f"register_adapter: {argument} must be found by its name, got {qualified(cls)}, "
                "which pickle could not find again; define it at the top level of its module"
            )
    adapter = Adapter(original, patched, sdpa, decline, is_unread, together)
    known = _by_original.get(original)
    if known is not None and qualified(known.patched) != qualified(patched):
        raise ValueError(
            f"register_adapter: {qualified(original)} already has the adapter "
            f"{qualified(known.patched)}, got {qualified(patched)}; register a subclass of "
            f"{original.__name__} instead"
        )
    _by_original[original] = adapter
    for cls in (patched, sdpa):
        if cls is not None:
            _by_patched[cls] = adapter
    return adapter


def register_later(defined_in: str, adapters: str) -> None:
    """Import the module `adapters` once a model holds a class from the module `defined_in`.

    So that the packages which define them are imported by their users only.
    """
    _unloaded[defined_in] = adapters


def _load_adapters(cls: type) -> None:
    for base in cls.__mro__:
        if base.__module__ in _unloaded:
            importlib.import_module(_unloaded[base.__module__])


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter for a module, whether it is patched already or not."""
    _load_adapters(type(module))
    return _by_original.get(type(module)) or _by_patched.get(type(module))


def is_patched(module: nn.Module) -> bool:
    return type(module) in _by_patched


def recognised_base(module: nn.Module) -> type[nn.Module] | None:
    """The class with an adapter that the module's class derives from without being it."""
    if adapter_of(module) is not None:
        return None
    return next((cls for cls in type(module).__mro__ if cls in _by_original), None)


def qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _lookup(cls: type) -> object:
    found: object = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found

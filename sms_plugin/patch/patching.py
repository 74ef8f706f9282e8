"""patch_attention and unpatch_attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.registry import (
    Adapter,
    adapter_of,
    check_softmax,
    is_patched,
    qualified,
    recognised_base,
)
from sms_plugin.patch.report import PatchedModule, PatchError, PatchReport, SkippedModule

OnProbs = Callable[[str, Tensor], object]

SLOT = "scaled_mask_softmax"  # the submodule that a patched forward calls; it has no state
_NAME = "_sms_plugin_softmax"  # on a patched instance: the name it was patched with
_NOT_APART = "modules of its class hand each other something, so all are patched or none"


def patch_attention(
    model: nn.Module,
    *,
    modules: Sequence[str] | None = None,
    strict: bool = True,
    softmax: str = "fused",
    on_probs: OnProbs | None = None,
) -> PatchReport:
    """Exchange the softmax of the attention modules of `model`, in place.

    Patch before the first forward of a compiled model. All or nothing: where it raises, the model
    is as it was. Patching again with the same `softmax` changes nothing; with another one it
    exchanges it.

    Args:
        model: any module; only attention modules inside it change.
        modules: qualified names or patterns ("encoder.*.self_attn") to restrict it to.
        strict: raise when a module that has an adapter can't be patched.
        softmax: "fused", "native", "compiled", "reference" (see ScaledMaskSoftmax), or "sdpa":
            the whole core by F.scaled_dot_product_attention, without probabilities.
        on_probs: called in every forward as `on_probs(name, probs)` with the qualified name of each
            module that is patched and its probabilities (..., Tq, Tk), before dropout. They are
            freed as soon as nothing holds them, so that reading all layers takes the memory of
            one. Patching again exchanges it; None: nobody is called any more.

    Raises:
        PatchError: when nothing is patched, or with `strict` not everything.
        ValueError: for an unknown `softmax`, a pattern in `modules` that matches nothing, or
            `on_probs` with "sdpa", which has no probabilities.
    """
    report = apply_patch(model, modules=modules, strict=strict, softmax=softmax, on_probs=on_probs)
    print(report.summary())
    return report


@contextmanager
def patched_attention(
    model: nn.Module,
    *,
    modules: Sequence[str] | None = None,
    strict: bool = True,
    softmax: str = "fused",
    on_probs: OnProbs | None = None,
) -> Iterator[PatchReport]:
    """`patch_attention` for the time of a block; afterwards every module is what it was before.

        with sms_plugin.patched_attention(model, on_probs=fn):
            model(tokens)

    Args and errors: those of `patch_attention`.
    """
    before = {name: (module, _state(module)) for name, module in _attention_modules(model)}
    report = apply_patch(model, modules=modules, strict=strict, softmax=softmax, on_probs=on_probs)
    try:
        yield report
    finally:
        for patched in report.patched:
            _set_state(*before[patched.name])


def apply_patch(
    model: nn.Module,
    *,
    modules: Sequence[str] | None,
    strict: bool,
    softmax: str,
    on_probs: OnProbs | None = None,
) -> PatchReport:
    """`patch_attention` without printing, for callers that know their rank."""
    check_softmax("patch_attention", softmax)
    if softmax == "sdpa" and on_probs is not None:
        raise ValueError(
            "patch_attention: softmax='sdpa' has no probabilities for on_probs; use another softmax"
        )
    candidates = dict(_attention_modules(model))
    selected = _select(candidates, modules)
    patched: list[PatchedModule] = []
    skipped: list[SkippedModule] = []
    for name, module in candidates.items():
        adapter = adapter_of(module)
        kind = qualified(adapter.original if adapter else type(module))
        if name not in selected:
            skipped.append(SkippedModule(name, kind, "not selected by modules=", False))
        elif (reason := _why_not(module, adapter, softmax)) is not None:
            skipped.append(SkippedModule(name, kind, *reason))
        elif adapter is not None:
            already = getattr(module, _NAME, None) == softmax
            unread = softmax != "sdpa" and on_probs is None and _is_unread(model, name, adapter)
            patched.append(PatchedModule(name, kind, already, unread))
    torn = _torn(
        [candidates[done.name] for done in patched], [candidates[left.name] for left in skipped]
    )
    for done in [done for done in patched if adapter_of(candidates[done.name]) in torn]:
        patched.remove(done)
        skipped.append(SkippedModule(done.name, done.kind, _NOT_APART, True))
    report = PatchReport(softmax, tuple(patched), tuple(skipped))
    if strict and any(module.blocking for module in skipped):
        raise PatchError(
            "patch_attention: some attention modules can't be patched; pass strict=False to leave "
            "them as they are, or modules=[...] to choose",
            report,
        )
    if not patched:
        raise PatchError(
            f"patch_attention: nothing to patch in {qualified(type(model))}; add an adapter for "
            "its attention class with sms_plugin.register_adapter",
            report,
        )
    # Built first: nothing below can fail, so no model is left half patched.
    todo = [candidates[done.name] for done in patched if not done.already]
    slots = [None if softmax == "sdpa" else ScaledMaskSoftmax(softmax) for _ in todo]
    for module, slot in zip(todo, slots, strict=True):
        adapter = adapter_of(module)
        assert adapter is not None  # or it would have been skipped
        _restore(module, adapter)
        _swap(module, adapter, softmax, slot)
    for done in patched:
        _set_listener(candidates[done.name], done.name, on_probs)
    return report


def _is_unread(model: nn.Module, name: str, adapter: Adapter) -> bool:
    if adapter.is_unread is None:
        return False
    parent = model.get_submodule(name.rpartition(".")[0]) if name else None
    return adapter.is_unread(model.get_submodule(name), parent)


def unpatch_attention(model: nn.Module, *, modules: Sequence[str] | None = None) -> tuple[str, ...]:
    """Give every patched attention module of `model` its own class back.

    Args:
        model: the model, patched or not.
        modules: qualified names or patterns to restrict it to.

    Returns:
        The qualified names of the modules that were restored.

    Raises:
        ValueError: when a pattern in `modules` matches no attention module, or modules that are
            patched together would be restored in part.
    """
    candidates = dict(_attention_modules(model))
    selected = _select(candidates, modules)
    patched = {name: module for name, module in candidates.items() if is_patched(module)}
    chosen = {name: module for name, module in patched.items() if name in selected}
    torn = _torn(chosen.values(), [patched[name] for name in patched if name not in selected])
    for name, module in chosen.items():
        if adapter_of(module) in torn:
            raise ValueError(f"modules: {name!r} can't be unpatched alone: {_NOT_APART}")
    restored = []
    for name, module in chosen.items():
        adapter = adapter_of(module)
        if adapter is not None:
            _restore(module, adapter)
            restored.append(name)
    return tuple(restored)


def _torn(some: Iterable[nn.Module], others: Iterable[nn.Module]) -> set[Adapter]:
    """Adapters that patch all of their class or none, with modules on both sides."""
    adapters = {adapter for module in some if (adapter := adapter_of(module)) is not None}
    return {a for a in adapters if a.together} & {adapter_of(module) for module in others}


def _swap(
    module: nn.Module, adapter: Adapter, softmax: str, slot: ScaledMaskSoftmax | None
) -> None:
    cls = adapter.class_for(softmax)
    assert cls is not None  # _why_not has seen to it
    module.__class__ = cls
    module.__dict__[_NAME] = softmax
    if slot is not None:
        setattr(module, SLOT, slot.train(module.training))


def _set_listener(module: nn.Module, name: str, on_probs: OnProbs | None) -> None:
    """Hand the probabilities of a patched module to `on_probs`, and to nobody else."""
    slot = module._modules.get(SLOT)
    if slot is None:  # sdpa
        return
    slot._forward_hooks.clear()
    if on_probs is not None:
        slot.register_forward_hook(functools.partial(_hand_over, name, on_probs))


def _hand_over(name: str, on_probs: OnProbs, slot: nn.Module, args: Any, probs: Tensor) -> None:
    on_probs(name, probs)


def _state(module: nn.Module) -> tuple[type[nn.Module], str | None, nn.Module | None, Any]:
    slot = module._modules.get(SLOT) if is_patched(module) else None
    hooks = None if slot is None else dict(slot._forward_hooks)
    return type(module), getattr(module, _NAME, None), slot, hooks


def _set_state(
    module: nn.Module, state: tuple[type[nn.Module], str | None, nn.Module | None, Any]
) -> None:
    cls, name, slot, hooks = state
    adapter = adapter_of(module)
    if adapter is None:
        return  # it became something else within the block
    _restore(module, adapter)
    module.__class__ = cls
    if name is not None:
        module.__dict__[_NAME] = name
    if slot is not None:
        slot._forward_hooks.clear()
        slot._forward_hooks.update(hooks)
        setattr(module, SLOT, slot.train(module.training))


def _is_own_forward(module: nn.Module) -> bool:
    """Whether the instance holds a forward, and it is only that of its class, bound to it.

    transformers 4.57 leaves one behind where it has recorded attentions. It says nothing, but
    would go on calling this class when the instance has another.
    """
    forward = vars(module).get("forward")
    return (
        getattr(forward, "__self__", None) is module
        and getattr(forward, "__func__", None) is type(module).forward
    )


def _restore(module: nn.Module, adapter: Adapter) -> None:
    if _is_own_forward(module):
        del module.__dict__["forward"]
    module._modules.pop(SLOT, None)
    module.__dict__.pop(_NAME, None)
    module.__class__ = adapter.original


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with an adapter, and those that look like attention and have none inside them."""
    named = dict(model.named_modules())
    recognised = [name for name, module in named.items() if adapter_of(module)]
    for name, module in named.items():
        prefix = f"{name}." if name else ""
        if name in recognised:
            yield name, module
        elif any(other.startswith(prefix) for other in recognised):
            continue  # it holds a module that is listed itself
        elif recognised_base(module) or "attention" in type(module).__name__.lower():
            yield name, module


def _select(candidates: dict[str, nn.Module], patterns: Sequence[str] | None) -> set[str]:
    if patterns is None:
        return set(candidates)
    if isinstance(patterns, str):
        raise TypeError(f"modules must be a list of names or patterns, got {patterns!r}")
    selected: set[str] = set()
    for pattern in patterns:
        # A name that holds a bracket is a pattern too, and as one it doesn't match itself.
        matches = {name for name in candidates if name == pattern or fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(
                f"modules: {pattern!r} matches no attention module; there are: "
                f"{', '.join(candidates) or 'none'}"
            )
        selected |= matches
    return selected


def _why_not(module: nn.Module, adapter: Adapter | None, softmax: str) -> tuple[str, bool] | None:
    """A reason not to patch, and whether strict=True has to raise for it."""
    if adapter is None:
        base = recognised_base(module)
        if base is not None:
            return f"a subclass of {base.__name__} may compute something else: no adapter", True
        return "no adapter for this class (sms_plugin.register_adapter)", False
    if adapter.class_for(softmax) is None:
        return f"its adapter has no class for softmax={softmax}", True
    if "forward" in vars(module) and not _is_own_forward(module):
        return "its forward was replaced on the instance, so a patch would not be called", True
    if not is_patched(module) and hasattr(module, SLOT):
        return f"it has an attribute {SLOT} of its own", True
    reason = adapter.decline(module, softmax) if adapter.decline else None
    return None if reason is None else (reason, True)

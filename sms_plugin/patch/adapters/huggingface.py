"""What the adapters for Hugging Face transformers (4.57 and 5) share.

Most attention classes there don't call softmax themselves: their forward looks a function up in a
table by the name in `config._attn_implementation`. A patched module answers with a name of ours,
and the original forward goes on from there. The model's config, which other models may share, is
not touched: it decides how masks are built, what is recorded and what is saved, as before. What
stays behind outside the model is one entry of our own in that table, which no other model reads.

Letters: B batch, H heads, G heads of keys and values, Tq queries, Tk keys, D width of a head.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sms_plugin.masks import mask_from_keep
from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.registry import Decline, register_adapter

OLDEST = (4, 57)
IMPLEMENTATION = "sms_plugin"
# Those whose masks are tensors over queries and keys. None: a module without a model around it.
_IMPLEMENTATIONS = ("eager", "sdpa", None)
# What the eager functions of the classes that are patched may take by name.
ARGUMENTS = frozenset(
    ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "head_mask")
)


class _Redirected:
    """A config as it is, except that it names our attention function."""

    _attn_implementation = IMPLEMENTATION

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class DispatchedAttention(nn.Module):
    """An attention of transformers whose looked-up function is `attend`.

    To be derived from together with the original class. Masks are those that the model builds for
    the implementation it was loaded with: added ones for "eager", and for "sdpa" bool ones (True =
    seen) or none at all where causality says everything.
    """

    scaled_mask_softmax: ScaledMaskSoftmax
    if TYPE_CHECKING:  # what the original class holds

        def __getattr__(self, name: str) -> Any: ...

    arguments = ARGUMENTS  # of the eager function that `attend` stands for

    @property
    def config(self) -> Any:
        return _Redirected(self.__dict__["config"])

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config

    def attend(
        self,
        query: Tensor,  # (B, H, Tq, D)
        key: Tensor,  # (B, G, Tk, D)
        value: Tensor,  # (B, G, Tk, D)
        attention_mask: Tensor | None,  # (B or 1, H or 1, Tq or 1, Tk or more)
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        head_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:  # (B, Tq, H, D), (B, H, Tq, Tk)
        if others.get("s_aux") is not None:
            raise ValueError(
                "attention sinks (s_aux) are not supported by sms_plugin's adapters; unpatch this "
                "model with sms_plugin.unpatch_attention"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = grouped_matmul(query, key.transpose(-2, -1))  # (B, H, Tq, Tk)
        if softcap is not None:
            scores, scale = softcap * torch.tanh(scores * (scale / softcap)), 1.0
        mask, is_causal = self.mask_of(attention_mask, scores, is_causal)
        probs = self.scaled_mask_softmax(scores, mask, scale, is_causal, bias=position_bias)
        probs = F.dropout(probs, dropout, self.training)
        if head_mask is not None:
            probs = probs * (head_mask.view(1, -1, 1, 1) if head_mask.dim() == 1 else head_mask)
        out = grouped_matmul(probs, value)  # (B, H, Tq, D)
        return out.transpose(1, 2).contiguous(), probs

    def mask_of(
        self,
        attention_mask: Tensor | None,
        scores: Tensor,  # (B, H, Tq, Tk)
        is_causal: bool | None,
    ) -> tuple[Tensor | None, bool]:
        """The operator's mask and is_causal for what the model has prepared."""
        implementation = self.__dict__["config"]._attn_implementation
        if implementation not in _IMPLEMENTATIONS:
            raise RuntimeError(_wrong_implementation(implementation))
        queries, keys = scores.shape[-2:]
        if attention_mask is None:
            if implementation != "sdpa":
                return None, False
            if is_causal is None:
                is_causal = getattr(self, "is_causal", True)
            if queries == 1 or not is_causal:
                return None, False
            if queries == keys:
                return None, True
            # An empty cache of a fixed length: its keys come after those of the queries.
            positions = torch.arange(keys, device=scores.device)
            return positions > positions[:queries, None], False
        if attention_mask.dim() != 4:
            raise ValueError(
                "attention_mask must have 4 dimensions (batch, heads, queries, keys) in the "
                f"attention, got {tuple(attention_mask.shape)}; pass the model a 2-d or 4-d mask"
            )
        return operator_mask(attention_mask, keys), False


def operator_mask(attention_mask: Tensor, keys: int) -> Tensor:
    """The operator's mask for one of transformers: added, or bool with True = seen."""
    attention_mask = attention_mask[..., :keys]
    return mask_from_keep(attention_mask) if attention_mask.dtype == torch.bool else attention_mask


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The entry in transformers' table of attention functions."""
    if not isinstance(module, DispatchedAttention):
        raise RuntimeError(
            f"attn_implementation={IMPLEMENTATION!r} is for modules that were patched; load the "
            "model with attn_implementation='eager' and call sms_plugin.patch_attention(model)"
        )
    return module.attend(query, key, value, attention_mask, **kwargs)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H * D) as (B, H, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for (B, H, T, N) and (B, G, N, M), where H / G heads share one of `b`."""
    B, H, T, N = a.shape
    G = b.shape[1]
    if H == G:
        return a @ b
    return (a.reshape(B, G, H // G * T, N) @ b).view(B, H, T, b.shape[-1])


def cached_keys_and_values(
    project: Callable[[], tuple[Tensor, Tensor]],  # keys and values of this call
    cache: Any,
    layer: int | None,
    is_cross: bool,
    cache_position: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Keys and values with those of a cache before them, as 4.57 keeps them in its own forwards.

    Those of a cross-attention are the encoder's: projected once, then read.
    """
    if cache is None:
        return project()
    is_double = isinstance(cache, EncoderDecoderCache)
    own = cache
    if is_double:
        own = cache.cross_attention_cache if is_cross else cache.self_attention_cache
    if is_double and is_cross and cache.is_updated.get(layer):
        return own.layers[layer].keys, own.layers[layer].values
    key, value = project()
    position = {"cache_position": None if is_cross else cache_position}
    key, value = own.update(key, value, layer, position)
    if is_double and is_cross:
        cache.is_updated[layer] = True
    return key, value


def too_old() -> str | None:
    """A reason not to patch any model of the installed transformers, or None."""
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST:
        return None
    return f"transformers {version} is older than {'.'.join(map(str, OLDEST))}; upgrade it"


def register_dispatched(
    original: type[nn.Module],
    patched: type[DispatchedAttention],
    decline: Decline | None = None,
) -> None:
    """Register the adapter of a class whose forward looks its attention function up.

    Args:
        original: the class of transformers.
        patched: derived from `DispatchedAttention` and `original`.
        decline: asked after what holds for all of them.
    """

    def why_not(module: nn.Module, softmax: str) -> str | None:
        reason = too_old() or _cannot_dispatch(original, patched)
        if reason is None:
            implementation = vars(module)["config"]._attn_implementation
            if implementation not in _IMPLEMENTATIONS:
                reason = _wrong_implementation(implementation)
        if reason is None and decline is not None:
            reason = decline(module, softmax)
        return reason

    register_adapter(original, patched, decline=why_not)


def _cannot_dispatch(original: type[nn.Module], patched: type[DispatchedAttention]) -> str | None:
    """What a version of transformers changed that the adapter was not written for, or None."""
    version = f"transformers {transformers.__version__}"
    code = inspect.unwrap(original.forward).__code__
    if "_attn_implementation" not in code.co_names:
        return f"in {version} it doesn't look its attention function up, so a patch isn't called"
    eager = vars(sys.modules[original.__module__])["eager_attention_forward"]
    named = {
        name
        for name, value in inspect.signature(eager).parameters.items()
        if value.kind != value.VAR_KEYWORD
    }
    if unknown := named - patched.arguments:
        return f"in {version} its attention takes {', '.join(sorted(unknown))}: not supported"
    return None


def _wrong_implementation(implementation: str) -> str:
    return (
        f"attn_implementation={implementation!r} builds masks for its own kernels; call "
        "model.set_attn_implementation('eager') first"
    )


if too_old() is None:
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_function)

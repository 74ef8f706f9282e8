"""`ScaledMaskSoftmax`: the softmax of an attention as a module that can be chosen and swapped."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sms_plugin import reference
from sms_plugin.checks import check_arguments
from sms_plugin.functional import scaled_mask_softmax


@functools.lru_cache(maxsize=8)
def _built_causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.triu(keys - queries + 1)


def causal_mask(scores: Tensor) -> Tensor:
    """Bool ``(Tq, Tk)``, True above the bottom-right aligned diagonal; built once a shape."""
    if torch.compiler.is_compiling():  # a cache can't be traced
        return _built_causal_mask.__wrapped__(*scores.shape[-2:], scores.device)
    return _built_causal_mask(*scores.shape[-2:], scores.device)


def _chain(
    scores: Tensor, mask: Tensor | None, scale: float, causal: Tensor | None, bias: Tensor | None
) -> Tensor:
    z = scores * scale
    if bias is not None:
        z = z + bias.to(z.dtype)
    if mask is not None:
        z = z.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    if causal is not None:
        z = z.masked_fill(causal, -torch.inf)
    return torch.softmax(z, dim=-1)


def native_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """The usual chain of PyTorch operations, as people write it: the arm to compare with.

    It differs from the contract where they do: a row without a kept key is NaN, mask and bias are
    cast to the dtype of the scores, each step rounds to it, and CUDA autocast promotes the softmax
    to float32.

    Args:
        scores: ``(..., Tq, Tk)``.
        mask: bool (True = removed) or float, broadcasts to ``scores``.
        scale: a Python number.
        is_causal: bottom-right aligned; a bool mask that is built once a shape.
        bias: float, broadcasts to ``scores``.

    Returns:
        probs, shaped like ``scores``.
    """
    check_arguments(scores, mask, scale, is_causal, bias)
    return _chain(scores, mask, scale, causal_mask(scores) if is_causal else None, bias)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_chain)


IMPLEMENTATIONS = ("fused", "native", "compiled", "reference")


class ScaledMaskSoftmax(nn.Module):
    """`scaled_mask_softmax` by a chosen implementation; no parameters, no state.

    Args:
        impl: ``fused`` (the operator), ``native`` (the usual chain of PyTorch operations),
            ``compiled`` (`torch.compile` of that chain) or ``reference`` (the definition).

    Raises:
        ValueError: an unknown ``impl``.

    Shape:
        As `scaled_mask_softmax`: ``scores`` ``(..., Tq, Tk)``, ``mask`` and ``bias`` broadcast to
        it, the result is shaped like ``scores``.
    """

    def __init__(self, impl: str = "fused") -> None:
        super().__init__()
        if impl not in IMPLEMENTATIONS:
            raise ValueError(
                f"ScaledMaskSoftmax: impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}"
            )
        self.impl = impl

    def forward(
        self,
        scores: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        is_causal: bool = False,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        if self.impl == "fused":
            return scaled_mask_softmax(scores, mask, scale, is_causal, bias=bias)
        if self.impl == "native":
            return native_softmax(scores, mask, scale, is_causal, bias=bias)
        if self.impl == "compiled":
            check_arguments(scores, mask, scale, is_causal, bias)
            causal = causal_mask(scores) if is_causal else None
            return _compiled()(scores, mask, scale, causal, bias)
        return reference.scaled_mask_softmax(scores, mask, scale, is_causal, bias=bias)

    def extra_repr(self) -> str:
        return f"impl={self.impl!r}"

"""`ScaledMaskSoftmax`: the softmax of an attention as a module, so that it can be chosen and swapped."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sms_plugin import reference
from sms_plugin.checks import check_arguments
from sms_plugin.functional import scaled_mask_softmax


@functools.lru_cache(maxsize=8)
def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool ``(Tq, Tk)``, True above the bottom-right aligned diagonal; built once a shape and device."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.triu(keys - queries + 1)


def native_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """The usual chain of PyTorch operations, as people write it: the arm to compare with.

    It differs from the contract where they do: a row without a kept key is NaN, each step rounds to the
    dtype of the scores, and CUDA autocast promotes the softmax to float32.

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
    z = scores * scale
    if bias is not None:
        z = z + bias
    if mask is not None:
        z = z.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    if is_causal:
        z = z.masked_fill(causal_mask(*scores.shape[-2:], scores.device), -torch.inf)
    return torch.softmax(z, dim=-1)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(native_softmax)


IMPLEMENTATIONS = ("fused", "native", "compiled", "reference")


class ScaledMaskSoftmax(nn.Module):
    """`scaled_mask_softmax` by a chosen implementation; no parameters, no state.

    Args:
        impl: ``fused`` (the operator), ``native`` (the usual chain of PyTorch operations), ``compiled``
            (`torch.compile` of that chain) or ``reference`` (the definition).

    Raises:
        ValueError: an unknown ``impl``.

    Shape:
        As `scaled_mask_softmax`: ``scores`` ``(..., Tq, Tk)``, ``mask`` and ``bias`` broadcast to it, the
        result is shaped like ``scores``.
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
            return _compiled()(scores, mask, scale, is_causal, bias=bias)
        return reference.scaled_mask_softmax(scores, mask, scale, is_causal, bias=bias)

    def extra_repr(self) -> str:
        return f"impl={self.impl!r}"

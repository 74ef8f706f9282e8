"""The definition of `scaled_mask_softmax` in plain PyTorch.

Read it as the specification: the CUDA and CPU kernels, the tests, the benchmark and the trainer are
all held to what stands here. Its backward and every higher derivative are autograd's.

Legend: scores (..., Tq, Tk); mask and bias broadcast to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sms_plugin.checks import check_arguments

# z is summed at an eighth of its size. Two finite dtype minima then never add up to -inf, so that
# only -inf itself removes a key. Division by eight is exact.
_EIGHTH = 0.125


def scaled_mask_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Softmax over the last dimension of ``scores * scale + bias + mask``, by its definition.

    Args:
        scores: ``(..., Tk)``, or ``(..., Tq, Tk)`` if causal; float16, bfloat16, float32 or
        float64.
        mask: broadcasts to ``scores``. Bool: True removes the key. Float: added after scaling.
        scale: a Python number.
        is_causal: query ``i`` sees the keys up to ``i + Tk - Tq``.
        bias: float, broadcasts to ``scores``, added after scaling.
        dtype: what to compute in and to return. None: the contract's precision (float64 for float64
            scores, else float32), rounded once to ``scores.dtype``. ``torch.float64`` is the
            yardstick.

    Returns:
        probs, shaped like ``scores``. A row without a kept key is 0; a row with NaN or +inf at a
        kept key is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sms_plugin.scaled_mask_softmax`.
    """
    check_arguments(scores, mask, scale, is_causal, bias)
    inner = dtype or (torch.float64 if scores.dtype == torch.float64 else torch.float32)
    selected = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if is_causal:
        selected = selected.tril(scores.shape[-1] - scores.shape[-2])
    if mask is not None and mask.dtype == torch.bool:
        selected = selected & ~mask

    # Selection comes before arithmetic: what lies under a removed key reaches no result and no
    # gradient.
    z = scores.masked_fill(~selected, 0).to(inner) * (scale * _EIGHTH)
    for term in (bias, mask):
        if term is not None and term.dtype != torch.bool:
            z = z + _finite_stays_finite(term, inner) * _EIGHTH
    z = z.masked_fill(~selected, -torch.inf)

    if scores.shape[-1] == 0:
        return z.to(dtype or scores.dtype)

    highest = z.detach().amax(dim=-1, keepdim=True)
    overflows = highest > torch.finfo(inner).max * _EIGHTH
    highest = highest.masked_fill(overflows, torch.nan)
    is_dead = highest == -torch.inf  # no key is kept

    weights = ((z - highest.masked_fill(is_dead, 0)) / _EIGHTH).exp()
    probs = weights / weights.sum(dim=-1, keepdim=True).masked_fill(is_dead, 1)
    # A NaN row is NaN at its removed keys too, except at those that were removed by selection.
    probs = probs.masked_fill(~selected, 0).to(dtype or scores.dtype)
    # Where probs is 0 the gradient is 0, even if the incoming one is infinite.
    return torch.where(probs == 0, 0, probs)


def _finite_stays_finite(term: Tensor, inner: torch.dtype) -> Tensor:
    """`term` in the inner dtype; a finite value below its range becomes its minimum, not -inf."""
    converted = term.to(inner)
    if term.dtype == torch.float64 and inner == torch.float32:
        is_too_low = (converted == -torch.inf) & (term != -torch.inf)
        minimum = torch.finfo(inner).min + (term - term.detach()).to(inner)  # gradient 1
        converted = torch.where(is_too_low, minimum, converted)
    return converted

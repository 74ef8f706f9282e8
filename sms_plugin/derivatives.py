"""Derivatives of the softmax in plain, differentiable PyTorch: orders and modes beyond the kernels.

With p = probs, g = grad_probs and dz = p * (g - sum(p * g)), where nothing happens at p == 0:

    backward        grad_scores = scale * dz, grad_mask and grad_bias = dz summed to their shape
    second order    for a cotangent h of dz:  grad_g = p * (h - sum(p * h))
                                              grad_p = h * (g - sum(p * g)) - g * sum(p * h)

Forward mode needs no formula of its own: `around_value` gives probs a form whose derivatives
PyTorch takes itself, in any order and nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shape = Sequence[int]
Grads = tuple[Tensor, Tensor, Tensor]


def inner(tensor: Tensor) -> Tensor:
    """In the precision that sums are taken in: float64 for float64, else float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def where_kept(probs: Tensor, value: Tensor) -> Tensor:
    """0 where probs is 0: an infinite gradient there must not touch the sums."""
    return torch.where(probs == 0, 0, value)


def sum_of_terms(
    shape: Shape, scale: float, scores: Tensor | None, mask: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """scale * scores + bias + mask in the inner precision, of `shape`; None if there are none."""
    terms = [] if scores is None else [inner(scores) * scale]
    terms += [inner(term) for term in (bias, mask) if term is not None]
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.expand(shape)


def backward(
    grad_probs: Tensor,
    probs: Tensor,
    scale: float,
    is_causal: bool,
    mask_shape: Shape,
    mask_dtype: torch.dtype | None,
    bias_shape: Shape,
    bias_dtype: torch.dtype | None,
) -> Grads:
    """What the backward operator computes, differentiable in every mode."""
    del is_causal  # probs are 0 beyond the diagonal
    p = inner(probs)
    g = where_kept(p, inner(grad_probs))
    dz = p * (g - (p * g).sum(dim=-1, keepdim=True))

    def summed(shape: Shape, dtype: torch.dtype | None) -> Tensor:
        if dtype is None:
            return probs.new_zeros((0,))
        return dz.sum_to_size(tuple(shape)).to(dtype)

    grad_scores = (dz * scale).to(probs.dtype)
    return grad_scores, summed(mask_shape, mask_dtype), summed(bias_shape, bias_dtype)


def double_backward(
    probs: Tensor,
    grad_probs: Tensor,
    scale: float,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the backward with respect to (grad_probs, probs), differentiable themselves."""
    p = inner(probs)
    h = sum_of_terms(probs.shape, scale, *grads)
    if h is None:
        return None, None
    h = where_kept(p, h)
    g = where_kept(p, inner(grad_probs))
    sum_pg = (p * g).sum(dim=-1, keepdim=True)
    sum_ph = (p * h).sum(dim=-1, keepdim=True)
    grad_g = p * (h - sum_ph)
    grad_p = h * (g - sum_pg) - g * sum_ph
    return grad_g.to(grad_probs.dtype), grad_p.to(probs.dtype)


def around_value(
    softmax: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    scores: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """probs of `softmax`, with every derivative of a softmax in every mode.

    PyTorch runs the jvp of an `autograd.Function` with forward mode switched off, so that a jvp of
    a jvp is silently wrong. Here probs are computed of detached inputs and then multiplied by
    exp(z - z.detach()), which is 1 and has the derivatives of exp(z); normalised, that is the
    softmax around its own value.
    """
    added_mask = None if mask is None or mask.dtype == torch.bool else mask
    terms = (scores, added_mask, bias)
    detached = [None if term is None else term.detach() for term in terms]
    probs = softmax(scores.detach(), mask if added_mask is None else detached[1], detached[2])
    p = inner(probs)
    differences = [
        None if term is None or value is None else inner(term) - inner(value)
        for term, value in zip(terms, detached, strict=True)
    ]  # 0; NaN where the term is infinite
    difference = sum_of_terms(probs.shape, scale, *differences)
    assert difference is not None
    weights = p * where_kept(p, difference).exp()
    total = weights.sum(dim=-1, keepdim=True)
    total = torch.where(total == 0, 1, total)  # a row without a kept key
    return where_kept(p, weights * (total.detach() / total)).to(probs.dtype)

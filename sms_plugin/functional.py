"""The public function."""

from __future__ import annotations

import torch
from torch import Tensor

from sms_plugin.autograd import (
    compiled_softmax,
    eager_softmax,
    transformed_softmax,
    transforms_are_active,
)
from sms_plugin.checks import check_arguments


def scaled_mask_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax over the last dimension of ``scores * scale + bias + mask``, in one kernel.

    Computed in float32 (float64 for float64 scores) and rounded once. Differentiable in ``scores``,
    ``bias`` and a float ``mask``, twice and by every `torch.func` transform; only ``probs`` is
    saved.

    Args:
        scores: ``(..., Tk)``, or ``(..., Tq, Tk)`` if causal; float16, bfloat16, float32 or
            float64; any number of leading dimensions, any strides.
        mask: broadcasts to ``scores``; read in place. Bool: True removes the key, as in
            `Tensor.masked_fill` (`mask_from_keep` converts the opposite convention). Float: added
            after scaling; only ``-inf`` removes the key.
        scale: a Python number, usually ``D ** -0.5``.
        is_causal: query ``i`` sees the keys up to ``i + Tk - Tq`` (bottom-right aligned), besides
            what ``mask`` removes.
        bias: float, broadcasts to ``scores``; added after scaling; read in place.

    Returns:
        probs, with the shape, dtype and device of ``scores``, contiguous. A row without a kept key
        is exactly 0, and so are its gradients. NaN or +inf at a kept key makes its row NaN.

    Raises:
        TypeError: a type or dtype that isn't taken, such as an integer mask or a tensor scale.
        ValueError: a mask or bias that doesn't broadcast to ``scores``; causal scores of 1-d.
        RuntimeError: tensors on different devices; or no library for the device
            (`sms_plugin.extension.LibraryUnavailable`, which says why and what to do).

    Equivalent to::

        z = scores.float() * scale + bias + mask     # a bool mask: z.masked_fill(mask, -inf)
        z = z.masked_fill(~torch.ones(Tq, Tk).bool().tril(Tk - Tq), -inf)      # if is_causal
        probs = z.softmax(-1).nan_to_num(0).to(scores.dtype)    # 0 for rows without a kept key only
    """
    check_arguments(scores, mask, scale, is_causal, bias)
    if torch.compiler.is_compiling():
        return compiled_softmax(scores, mask, bias, scale, is_causal)
    if transforms_are_active():
        return transformed_softmax(scores, mask, bias, float(scale), is_causal)
    return eager_softmax(scores, mask, bias, float(scale), is_causal)

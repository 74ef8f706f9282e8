"""Conversions between the masks that people have and the masks that the operator takes."""

from __future__ import annotations

import torch
from torch import Tensor

from sms_plugin.checks import FLOAT_DTYPES


def mask_from_keep(keep: Tensor) -> Tensor:
    """Turn a mask that says which keys take part into one that says which are removed.

    `torch.nn.functional.scaled_dot_product_attention` and Hugging Face's 0/1 attention masks are
    True (1) for a key that takes part; `scaled_mask_softmax`, like `Tensor.masked_fill` and
    `nn.MultiheadAttention`, is True for a key that is removed.

    Args:
        keep: any shape; bool, or an integer dtype that holds 0 and 1 only.

    Returns:
        A bool tensor of the same shape: True where ``keep`` is False.

    Raises:
        TypeError: ``keep`` is a float tensor (an additive mask needs no conversion) or no tensor.
        ValueError: an integer ``keep`` holds something other than 0 and 1.

    Equivalent to::

        keep.logical_not()
    """
    if not isinstance(keep, Tensor):
        raise TypeError(f"mask_from_keep: keep must be a bool tensor, got {type(keep).__name__}")
    if keep.dtype == torch.bool:
        return keep.logical_not()
    if keep.is_floating_point() or keep.is_complex():
        raise TypeError(
            f"mask_from_keep: keep must be a bool tensor or one of 0 and 1, got {keep.dtype}; "
            "an additive float mask is passed to scaled_mask_softmax as it is"
        )
    if not torch.compiler.is_compiling() and keep.device.type != "meta":
        is_flag = (keep == 0) | (keep == 1)
        if not bool(is_flag.all()):
            other = keep[~is_flag].flatten()[0].item()
            raise ValueError(f"mask_from_keep: an integer keep must hold 0 and 1 only, got {other}")
    return keep == 0


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask into the additive one: ``-inf`` where ``mask`` is True, 0 elsewhere.

    `mask.to(dtype) * -inf` is not that: ``0 * -inf`` is NaN.

    Args:
        mask: bool, any shape; True removes the key.
        dtype: float16, bfloat16, float32 or float64, that of the result.

    Returns:
        A tensor of the shape and device of ``mask``.

    Raises:
        TypeError: ``mask`` isn't a bool tensor, or ``dtype`` is another one.

    Equivalent to::

        torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"additive_mask: mask must be a bool tensor (True = removed), got {got}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"additive_mask: dtype must be float16, bfloat16, float32 or float64, got {dtype}; "
            "the mask may have another dtype than the scores"
        )
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(mask, -torch.inf)

"""The rules for the arguments of `scaled_mask_softmax`, checked once for all implementations."""

from __future__ import annotations

import numbers
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOAT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_NAMES = "float16, bfloat16, float32 or float64"


def check_arguments(scores: Any, mask: Any, scale: Any, is_causal: Any, bias: Any) -> None:
    """Raise the contract's error for the first argument that breaks it.

    Args:
        scores: must be a float tensor of at least one dimension (two if causal).
        mask: must be None, or a bool or float tensor that broadcasts to ``scores``.
        scale: must be a Python number.
        is_causal: must be a bool.
        bias: must be None, or a float tensor that broadcasts to ``scores``.

    Raises:
        TypeError: a type or dtype that isn't taken.
        ValueError: shapes that don't fit.
        RuntimeError: tensors on different devices.
    """
    if not isinstance(scores, Tensor):
        _fail(TypeError, f"scores must be a tensor, got {type(scores).__name__}")
    if scores.dtype not in FLOAT_DTYPES:
        _fail(TypeError, f"scores must be {_NAMES}, got {scores.dtype}; convert it with .to()")
    if scores.is_nested:
        _fail(TypeError, "scores must not be a nested tensor; pad it with .to_padded_tensor()")
    if scores.layout is not torch.strided:
        _fail(TypeError, f"scores must be a strided tensor, got {scores.layout}; use .to_dense()")
    if type(scale) is not float:
        _check_scale(scale)
    if type(is_causal) is not bool:
        _fail(
            TypeError,
            f"is_causal must be a bool, got {type(is_causal).__name__}; use True or False",
        )
    if scores.dim() == 0:
        _fail(
            ValueError,
            "scores must have at least one dimension (..., Tk), got a 0-d tensor; "
            "add one with .unsqueeze(0)",
        )
    if is_causal and scores.dim() == 1:
        _fail(
            ValueError,
            f"is_causal=True needs scores of shape (..., Tq, Tk), got {tuple(scores.shape)}; "
            "add a query dimension with .unsqueeze(-2)",
        )
    if mask is not None:
        _check_term("mask", mask, scores)
    if bias is not None:
        _check_term("bias", bias, scores)


def _fail(kind: type[Exception], message: str) -> NoReturn:
    raise kind(f"scaled_mask_softmax: {message}")


def _check_scale(scale: Any) -> None:
    if isinstance(scale, Tensor):
        _fail(
            TypeError,
            "scale must be a Python number, got a tensor, which would get no gradient; pass "
            "scale.item(), or multiply the scores by a scale that is learned",
        )
    is_number = isinstance(scale, (numbers.Real, torch.SymInt, torch.SymFloat))
    if not is_number or isinstance(scale, bool):
        hint = (
            "; pass is_causal by its name" if isinstance(scale, bool) else "; convert with float()"
        )
        _fail(TypeError, f"scale must be a Python number, got {type(scale).__name__}{hint}")
    if isinstance(scale, int) and abs(scale) > sys.float_info.max:
        _fail(ValueError, "scale must be in the range of a float, got a larger integer; divide it")


def _check_term(name: str, term: Any, scores: Tensor) -> None:
    if not isinstance(term, Tensor):
        _fail(TypeError, f"{name} must be a tensor or None, got {type(term).__name__}")
    if term.dtype not in FLOAT_DTYPES and (name == "bias" or term.dtype != torch.bool):
        if name == "mask":
            _fail(
                TypeError,
                f"mask must be bool (True = removed) or {_NAMES} (added to the scores), got "
                f"{term.dtype}; sms_plugin.mask_from_keep makes a bool mask of a 0/1 one",
            )
        hint = "; pass a bool tensor as mask" if term.dtype == torch.bool else ""
        _fail(TypeError, f"bias must be {_NAMES}, got {term.dtype}{hint}")
    if term.layout is not torch.strided:
        _fail(TypeError, f"{name} must be a strided tensor, got {term.layout}; use .to_dense()")
    if term.device != scores.device:
        _fail(
            RuntimeError,
            f"{name} is on {term.device} and scores on {scores.device}; move {name} with "
            f".to({str(scores.device)!r})",
        )
    term_shape, shape = term.shape, scores.shape
    if term_shape == shape:
        return
    missing = len(shape) - len(term_shape)
    fits = missing >= 0
    if fits:
        for d, size in enumerate(term_shape):
            if size != 1 and size != shape[missing + d]:
                fits = False
                break
    if fits:
        return
    if term.numel() == 0:
        _fail(
            ValueError,
            f"{name} is empty (shape {tuple(term_shape)}) and doesn't broadcast to scores of shape "
            f"{tuple(shape)}; pass None for no {name}",
        )
    _fail(
        ValueError,
        f"{name} of shape {tuple(term_shape)} must broadcast to scores of shape {tuple(shape)}: "
        "each dimension, counted from the last, must be 1 or that of scores, and none is added",
    )

"""Inputs of the tests: the kinds of masking that people use, and scores that show a wrong kernel.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CASES = (
    "none",
    "additive",
    "bool",
    "padding",
    "bias",
    "causal",
    "causal+mask",
    "causal+mask+bias",
)


def make_scores(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
    size: float = 1.0,
) -> Tensor:
    """Random scores; every third row with a large common offset, every third with an outlier.

    Without the subtraction of the row's own maximum, or with a column missed, these come out wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(shape, generator=generator)
    if scores.dim() > 0 and scores.numel() > 0:
        rows = scores.view(-1, shape[-1])
        offsets = 40 * torch.randn(rows[1::3].shape[0], 1, generator=generator)
        rows[1::3] += offsets
        planted = torch.randint(shape[-1], (rows[2::3].shape[0], 1), generator=generator)
        rows[2::3].scatter_add_(1, planted, torch.full(planted.shape, 8.0))
    return (scores * size).to(dtype).to(device)


def random_mask(
    shape: tuple[int, ...],
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
    removed: float = 0.3,
) -> Tensor:
    """Bool, True = removed; the first key is kept, so that no row is dead by accident."""
    generator = torch.Generator().manual_seed(seed + 77)
    mask = torch.rand(shape, generator=generator) < removed
    if mask.numel() > 0:
        mask[..., 0] = False
    return mask.to(device)


def padding_mask(B: int, Tk: int, device: str | torch.device = "cpu") -> Tensor:
    """(B, 1, 1, Tk), True = padding at the right; the first sample is full, the last about half."""
    lengths = [Tk - (Tk // 2) * b // max(1, B - 1) for b in range(B)]
    keys = torch.arange(Tk)
    return torch.stack([keys >= length for length in lengths])[:, None, None, :].to(device)


def make_case(
    case: str,
    B: int,
    H: int,
    Tq: int,
    Tk: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of `scaled_mask_softmax` for one of CASES; terms in the dtype of the scores.

    In "bool" and "additive" the last query of the first sample has no key left.
    """
    scale = 48**-0.5  # of heads of 48: no power of two, so that rounding it would show
    scores = make_scores((B, H, Tq, Tk), dtype, device, seed=seed, size=1 / scale)
    arguments: dict[str, Any] = {
        "scores": scores,
        "scale": scale,
        "is_causal": case.startswith("causal"),
    }
    if case in ("bool", "additive"):
        mask = random_mask((B, 1, Tq, Tk), device, seed=seed)
        mask[0, :, -1] = True
        if case == "additive":
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(
                mask, -torch.inf
            )
        arguments["mask"] = mask
    if case in ("padding", "causal+mask", "causal+mask+bias"):
        arguments["mask"] = padding_mask(B, Tk, device)
    if case in ("bias", "causal+mask+bias"):
        generator = torch.Generator().manual_seed(seed + 5)
        arguments["bias"] = torch.randn((1, H, Tq, Tk), generator=generator).to(dtype).to(device)
    return arguments

"""The operands of a cell: random values, in the layout that the cell asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.cells import Cell, Term

SCALE = 0.125


@dataclass
class Problem:
    """One set of operands; `arguments` are those of `scaled_mask_softmax`."""

    cell: Cell
    arguments: dict[str, Any]
    grad: Tensor  # of the probs, random

    @property
    def scores(self) -> Tensor:
        return self.arguments["scores"]

    @property
    def wanted(self) -> list[Tensor]:
        """The operands whose gradient is computed: the scores, then a learned bias."""
        terms = (self.arguments["mask"], self.arguments["bias"])
        return [self.scores, *(t for t in terms if t is not None and t.requires_grad)]


def make_problem(cell: Cell, device: str) -> Problem:
    scores = random_values(cell, device).requires_grad_()
    arguments = {
        "scores": scores,
        "mask": make_term(cell.mask, device),
        "scale": SCALE,
        "is_causal": cell.is_causal,
        "bias": make_term(cell.bias, device),
    }
    return Problem(cell, arguments, random_values(cell, device))


def random_values(cell: Cell, device: str) -> Tensor:
    """Shaped like the scores; "strided" is [B, T, H, T] read as [B, H, T, T], "offset" starts one
    element after a 16-byte boundary."""
    dtype = getattr(torch, cell.dtype)
    if cell.layout == "strided":
        B, H, Tq, Tk = cell.shape
        return torch.randn(B, Tq, H, Tk, dtype=dtype, device=device).transpose(1, 2)
    if cell.layout == "offset":
        values = torch.randn(math.prod(cell.shape) + 1, dtype=dtype, device=device)
        return values[1:].view(cell.shape)
    return torch.randn(cell.shape, dtype=dtype, device=device)


def make_term(term: Term | None, device: str) -> Tensor | None:
    """A bool or additive padding mask with random lengths from half on; a random bool mask; or a
    random bias."""
    if term is None:
        return None
    keys = term.shape[-1]
    if not term.learned and term.shape[-2] == 1:
        lengths = torch.randint(math.ceil(keys / 2), keys + 1, (*term.shape[:-1], 1), device=device)
        removed = torch.arange(keys, device=device) >= lengths
        if term.dtype == "bool":
            return removed
        zeros = torch.zeros(term.shape, dtype=getattr(torch, term.dtype), device=device)
        return zeros.masked_fill_(removed, -torch.inf)
    if term.dtype == "bool":
        return torch.rand(term.shape, device=device) < 0.2
    bias = torch.randn(term.shape, dtype=getattr(torch, term.dtype), device=device)
    return bias.requires_grad_(term.learned)

"""Attentions with a learned bias that models of today have: their shapes, inputs and floors.

Legend: B batch (or windows, or rows of a triangle attention), H heads, T queries and keys, D width
of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.benchmarks.ideal import Traffic


@dataclass(frozen=True)
class AttentionRow:
    """One row of the table."""

    model: str
    B: int
    H: int
    T: int
    D: int
    bias_per_sample: bool = False
    kept: int | None = None  # keys that every sample keeps; None: three quarters of T up to T

    @property
    def shape(self) -> str:
        return f"{self.B}x{self.H}x{self.T}x{self.D}"

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        return self.B if self.bias_per_sample else 1, self.H, self.T, self.T

    @property
    def scores(self) -> int:
        """How many there are."""
        return self.B * self.H * self.T * self.T


GPU_ROWS = (
    AttentionRow("T5", 8, 12, 512, 64),
    AttentionRow("T5", 8, 12, 1024, 64),
    AttentionRow("large batch", 32, 8, 512, 64),
    AttentionRow("triangle", 256, 4, 256, 32),
    AttentionRow("triangle", 384, 4, 384, 32),
    AttentionRow("pair bias", 4, 16, 768, 24, bias_per_sample=True),
    AttentionRow("Swin windows", 2048, 8, 49, 32),
    AttentionRow("Swin windows, padded", 2048, 8, 56, 32, kept=49),
)
CPU_ROWS = (
    AttentionRow("T5", 2, 4, 128, 64),
    AttentionRow("triangle", 16, 2, 64, 32),
    AttentionRow("pair bias", 2, 4, 96, 24, bias_per_sample=True),
    AttentionRow("Swin windows", 16, 4, 49, 32),
    AttentionRow("Swin windows, padded", 16, 4, 56, 32, kept=49),
)


@dataclass
class Inputs:
    """The operands of one attention; the first four want a gradient."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, H, T, D)
    v: Tensor  # (B, H, T, D)
    bias: Tensor  # (B or 1, H, T, T)
    mask: Tensor  # bool (B, 1, 1, T), True = removed
    grad_out: Tensor  # (B, H, T, D)

    @property
    def wanted(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.bias]


def make_inputs(row: AttentionRow, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Random operands; the mask is the same for every seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v, grad_out = (normal(row.B, row.H, row.T, row.D) for _ in range(4))
    if row.kept is None:
        lengths = row.T - torch.arange(row.B, device=device) * (row.T // 4) // row.B
    else:
        lengths = torch.full((row.B,), row.kept, device=device)
    mask = torch.arange(row.T, device=device) >= lengths.view(row.B, 1, 1, 1)
    bias = normal(*row.bias_shape)
    for tensor in (q, k, v, bias):
        tensor.requires_grad_()
    return Inputs(q, k, v, bias, mask, grad_out)


def bytes_of_call(row: AttentionRow, dtype: torch.dtype) -> int:
    """Roughly what forward and backward touch, for the number of buffer sets."""
    return (8 * row.B * row.H * row.T * row.D + 5 * row.scores) * dtype.itemsize


def softmax_traffic(row: AttentionRow, dtype: torch.dtype) -> tuple[Traffic, Traffic]:
    """What a softmax in one pass must move, forward and backward; each operand once."""
    scores, bias = (n * dtype.itemsize for n in (row.scores, math.prod(row.bias_shape)))
    forward = Traffic(scores + bias + row.B * row.T, scores)
    return forward, Traffic(2 * scores, scores + bias)


def products(row: AttentionRow, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """The six matrix products of forward and backward, as autograd runs them, on own operands."""
    rows = row.B * row.H

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, device=device, dtype=dtype)

    q, k, v, grad_out, out, grad_q, grad_v = (normal(row.T, row.D) for _ in range(7))
    grad_k = normal(row.D, row.T)  # transposed, as autograd makes it
    scores, probs, grad_probs, grad_scores = (normal(row.T, row.T) for _ in range(4))

    def run() -> None:
        torch.bmm(q, k.mT, out=scores)
        torch.bmm(probs, v, out=out)
        torch.bmm(grad_out, v.mT, out=grad_probs)
        torch.bmm(probs.mT, grad_out, out=grad_v)
        torch.bmm(grad_scores, k, out=grad_q)
        torch.bmm(q.mT, grad_scores, out=grad_k)

    return run

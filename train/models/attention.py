"""Attention that reads from top to bottom, around a core that can be exchanged.

Letters: B batch, T positions, Tq queries, Tk keys, H heads, D width of a head, C = H * D.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig, ModelKind, Positions


class AttentionCore(nn.Module):
    """What `sms_plugin.patch_attention` exchanges: `core(q, k, v, mask, is_causal, bias)`.

    Here is the chain that people write: scale, bias, masked_fill with a buffer built once, softmax.

    Args:
        head_dim: D.
        max_len: largest Tk of a causal call.
        dropout: probability with which a weight is dropped in training.
    """

    causal_mask: Tensor

    def __init__(self, head_dim: int, max_len: int, dropout: float) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(head_dim)
        self.dropout = dropout
        above_diagonal = torch.ones(max_len, max_len, dtype=torch.bool).triu(1)  # True = masked
        self.register_buffer("causal_mask", above_diagonal, persistent=False)

    def forward(
        self,
        q: Tensor,  # (B, H, Tq, D)
        k: Tensor,  # (B, H, Tk, D)
        v: Tensor,  # (B, H, Tk, D)
        mask: Tensor | None = None,  # bool: True = masked out; float: added
        is_causal: bool = False,
        bias: Tensor | None = None,  # broadcasts to (B, H, Tq, Tk), added
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out (B, H, Tq, D), probs (B, H, Tq, Tk)); a core without probs gives None."""
        t_q, t_k = q.size(-2), k.size(-2)
        scores = q @ k.transpose(-2, -1)  # (B, H, Tq, Tk)
        scores = scores * self.scale
        if bias is not None:
            scores = scores + bias
        if is_causal:  # query i sees keys up to i + Tk - Tq
            scores = scores.masked_fill(self.causal_mask[t_k - t_q : t_k, :t_k], float("-inf"))
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        probs = torch.softmax(scores, dim=-1)
        probs = F.dropout(probs, self.dropout, self.training)
        return probs @ v, probs  # (B, H, Tq, D), (B, H, Tq, Tk)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn each pair (x[..., i], x[..., i + D/2]) by its position's angle.

    Args:
        x: (B, H, T, D).
        cos: (T, D/2).
        sin: (T, D/2).

    Source: RoFormer, https://arxiv.org/abs/2104.09864.
    """
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)  # (B, H, T, D)


class Attention(nn.Module):
    """Multi-head self-attention around an exchangeable core, causal in a decoder."""

    rotary: Tensor

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()
        self.is_causal = config.kind is ModelKind.decoder
        head_dim = config.n_embd // config.n_head
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.core = AttentionCore(head_dim, max_len, config.dropout)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.is_rotary = config.positions is Positions.rotary
        self.has_bias = config.positions is Positions.relative
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)  # (D/2,)
        angles = torch.outer(torch.arange(max_len), frequencies)  # (T, D/2)
        self.register_buffer(
            "rotary", torch.stack((angles.cos(), angles.sin())), persistent=False
        )  # (2, T, D/2)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        mask: Tensor | None = None,  # (B, 1, 1, T) bool, True = padding
        bias: Tensor | None = None,  # (H, T, T)
    ) -> Tensor:  # (B, T, C)
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, D)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.is_rotary:
            cos, sin = self.rotary[:, : x.size(1)].to(q.dtype)  # (T, D/2) each
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, _ = self.core(q, k, v, mask, self.is_causal, bias)  # (B, H, T, D)
        return self.proj(out.transpose(1, 2).flatten(2))  # (B, T, C)

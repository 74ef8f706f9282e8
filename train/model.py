"""A GPT decoder that reads from top to bottom: pre-norm, tied embeddings, a swappable core.

Letters: B batch, T positions, Tq queries, Tk keys, H heads, D width of a head, C = H * D,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig, Positions


class AttentionCore(nn.Module):
    """What `sms_plugin.patch_attention` exchanges: `core(q, k, v, mask, is_causal)`.

    Here is the chain that people write: scale, masked_fill with a buffer built once, softmax.

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
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out (B, H, Tq, D), probs (B, H, Tq, Tk)); a core without probs gives None."""
        t_q, t_k = q.size(-2), k.size(-2)
        scores = q @ k.transpose(-2, -1)  # (B, H, Tq, Tk)
        scores = scores * self.scale
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
    """Causal multi-head self-attention around an exchangeable core."""

    rotary: Tensor

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()
        head_dim = config.n_embd // config.n_head
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.core = AttentionCore(head_dim, max_len, config.dropout)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.is_rotary = config.positions is Positions.rotary
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)  # (D/2,)
        angles = torch.outer(torch.arange(max_len), frequencies)  # (T, D/2)
        self.register_buffer(
            "rotary", torch.stack((angles.cos(), angles.sin())), persistent=False
        )  # (2, T, D/2)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, D)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.is_rotary:
            cos, sin = self.rotary[:, : x.size(1)].to(q.dtype)  # (T, D/2) each
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, _ = self.core(q, k, v, mask=None, is_causal=True)  # (B, H, T, D)
        return self.proj(out.transpose(1, 2).flatten(2))  # (B, T, C)


class Block(nn.Module):
    """Attention and a four times wider MLP, each on a normalised input, each added back."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()
        width = config.n_embd
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(config, max_len)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder over tokens.

    Args:
        config: sizes, positions and dropout.
        vocab_size: V.
        max_len: largest T.

    Raises:
        ValueError: where heads do not divide the width, or rotary pairs the head.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, max_len: int) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(
                f"model.n_embd must be a multiple of model.n_head, got n_embd={config.n_embd} "
                f"and n_head={config.n_head}; set one of the two"
            )
        if config.positions is Positions.rotary and (config.n_embd // config.n_head) % 2:
            raise ValueError(
                "model.positions=rotary needs an even model.n_embd / model.n_head, got "
                f"{config.n_embd // config.n_head}; use positions=learned or another n_head"
            )
        self.max_len = max_len
        self.tokens = nn.Embedding(vocab_size, config.n_embd)
        self.positions = (
            nn.Embedding(max_len, config.n_embd) if config.positions is Positions.learned else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, max_len) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.apply(self._init_weights)
        for name, weight in self.named_parameters():
            if name.endswith(("proj.weight", "mlp.2.weight")):  # GPT-2: keeps the sum's variance
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) int64 -> (B, T, V)
        if tokens.size(1) > self.max_len:
            raise ValueError(
                f"GPT: tokens may have at most max_len={self.max_len} positions, got "
                f"{tokens.size(1)}; build the model with a larger data.seq_len"
            )
        x = self.tokens(tokens)  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.size(1)]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)  # (B, T, V): the embedding, tied

"""A pre-norm Transformer with tied embeddings: GPT's decoder, or an encoder as BERT's or T5's.

Letters: B batch, T positions, H heads, C width, V vocabulary.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig, ModelKind, Positions
from train.models.attention import Attention
from train.models.relative_bias import RelativePositionBias


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

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        mask: Tensor | None = None,  # (B, 1, 1, T) bool, True = padding
        bias: Tensor | None = None,  # (H, T, T)
    ) -> Tensor:  # (B, T, C)
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, bias))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """A decoder, or an encoder that sees both ways, over tokens.

    Args:
        config: kind, sizes, positions and dropout.
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
        self.relative = (
            RelativePositionBias(config.n_head, is_bidirectional=config.kind is ModelKind.encoder)
            if config.positions is Positions.relative
            else None
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

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64
        padding: Tensor | None = None,  # (B, T) bool, True = no token here
    ) -> Tensor:  # (B, T, V)
        if tokens.size(1) > self.max_len:
            raise ValueError(
                f"tokens may have at most max_len={self.max_len} positions, got "
                f"{tokens.size(1)}; build the model with a larger data.seq_len"
            )
        x = self.tokens(tokens)  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.size(1)]
        x = self.dropout(x)
        mask = None if padding is None else padding[:, None, None]  # (B, 1, 1, T)
        bias = None if self.relative is None else self.relative(tokens.size(1))  # (H, T, T)
        for block in self.blocks:
            x = block(x, mask, bias)
        return F.linear(self.norm(x), self.tokens.weight)  # (B, T, V): the embedding, tied

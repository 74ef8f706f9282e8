"""A 6-layer GPT whose attention is written in the three ways that its users write it.

Legend: B batch, T positions, H heads, D width of a head, C = H * D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sms_plugin


@dataclass(frozen=True)
class Size:
    """Of a model and of its batches."""

    layers: int = 6
    heads: int = 16
    width: int = 1024  # C
    vocabulary: int = 256  # bytes: a larger one costs every system the same
    max_len: int = 4096


class NativeAttention(nn.Module):
    """The usual chain: a causal bool buffer built once, masked_fill, softmax.

    CUDA autocast promotes the softmax to float32, as it does for everybody who writes this.
    """

    causal: Tensor

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.softmax = sms_plugin.ScaledMaskSoftmax("native")
        above = torch.ones(max_len, max_len, dtype=torch.bool).triu(1)  # True = removed
        self.register_buffer("causal", above, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, T, D) each and back
        T, D = q.shape[-2:]
        scores = q @ k.transpose(-2, -1)  # (B, H, T, T)
        probs = self.softmax(scores, self.causal[:T, :T], D**-0.5)
        return probs @ v


class FusedAttention(nn.Module):
    """The same with the operator, and the heads made contiguous once.

    Without `contiguous`, `matmul` makes the same copies, but that of the keys transposed, element
    by element. The scale and the causality are the operator's: no buffer, no pass of their own.
    """

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.softmax = sms_plugin.ScaledMaskSoftmax("fused")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, T, D) each and back
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        scores = q @ k.transpose(-2, -1)  # (B, H, T, T)
        probs = self.softmax(scores, scale=q.shape[-1] ** -0.5, is_causal=True)
        return probs @ v


class SDPAttention(nn.Module):
    """`F.scaled_dot_product_attention`: no probabilities."""

    def __init__(self, max_len: int) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, T, D) each and back
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS: dict[str, type[nn.Module]] = {
    "native": NativeAttention,
    "fused": FusedAttention,
    "SDPA": SDPAttention,
}


class Block(nn.Module):
    """Attention and a four times wider MLP, each on a normalised input, each added back."""

    def __init__(self, attention: str, size: Size) -> None:
        super().__init__()
        C = size.width
        self.heads = size.heads
        self.norm = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.attention = ATTENTIONS[attention](size.max_len)
        self.out = nn.Linear(C, C)
        self.mlp = nn.Sequential(
            nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, D)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D) each
        out = self.attention(q, k, v)  # (B, H, T, D)
        x = x + self.out(out.transpose(1, 2).flatten(2))  # (B, T, C)
        return x + self.mlp(x)


class GPT(nn.Module):
    """A decoder over bytes that returns its loss.

    Args:
        attention: "native", "fused" or "SDPA".
        size: of the model.

    Raises:
        ValueError: an unknown attention.
    """

    def __init__(self, attention: str, size: Size) -> None:
        super().__init__()
        if attention not in ATTENTIONS:
            raise ValueError(
                f"GPT: attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}"
            )
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.max_len, size.width)
        self.blocks = nn.ModuleList(Block(attention, size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T) each -> the mean loss
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # (B, T, V): the embedding, tied
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

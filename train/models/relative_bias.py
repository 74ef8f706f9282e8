"""T5's learned bias of relative positions: its gradient runs through the softmax operator."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelativePositionBias(nn.Module):
    """A number for each head and bucket of distances, added to the scores of every layer.

    Half of the buckets hold one distance each, the other half reach up to `max_distance` with
    logarithmically growing widths; the last one holds whatever is farther away.

    Args:
        n_head: H.
        n_buckets: of distances; seen both ways, half of them for each side.
        max_distance: from here on all distances share a bucket.
        is_bidirectional: whether keys after the query have buckets of their own.

    Source: Raffel et al., 2020, https://arxiv.org/abs/1910.10683.
    """

    def __init__(
        self,
        n_head: int,
        *,
        n_buckets: int = 32,
        max_distance: int = 128,
        is_bidirectional: bool = True,
    ) -> None:
        super().__init__()
        self.n_buckets, self.max_distance = n_buckets, max_distance
        self.is_bidirectional = is_bidirectional
        self.table = nn.Embedding(n_buckets, n_head)

    def forward(self, length: int) -> Tensor:  # (H, T, T)
        positions = torch.arange(length, device=self.table.weight.device)
        buckets = self.buckets(positions[None, :] - positions[:, None])  # (T, T), key - query
        return self.table(buckets).permute(2, 0, 1)

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (key position - query position), int64."""
        count = self.n_buckets
        side = torch.zeros_like(distance)
        if self.is_bidirectional:
            count //= 2
            side = (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        growth = (count - exact) / math.log(self.max_distance / exact)
        far = exact + (torch.log(distance.clamp(min=1) / exact) * growth).long()
        return side + torch.where(distance < exact, distance, far.clamp(max=count - 1))

"""Masked tokens: what an encoder predicts, in texts of different lengths.

Letters: B batch, T positions.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from train.config import DataConfig
from train.data.tokens import random_stream

IGNORED = -100  # a target that isn't predicted, as torch's cross entropy has it
_CHOSEN = 0.15  # of the tokens are predicted: Devlin et al., 2019, https://arxiv.org/abs/1810.04805
_HIDDEN, _REPLACED = 0.8, 0.1  # of those: by the mask token, by a random one; the rest stays
_STREAM = 2**32  # another stream of random numbers than that of the windows


class MaskedBatch(TypedDict):
    tokens: Tensor  # (B, T) int64, some of them hidden
    padding: Tensor  # (B, T) bool, True = no token here
    targets: Tensor  # (B, T) int64, IGNORED where nothing is predicted


class MaskedBatches(Dataset[MaskedBatch]):
    """Batches of windows with their ends cut off and tokens hidden.

    Args:
        windows: (B, T + 1) tokens for each index.
        config: lengths are drawn evenly from [min_len, seq_len].
        vocab_size: of the text; the mask token is the next one.
        seed: with the index, decides lengths and masks.

    Raises:
        ValueError: for lengths that can't be.
    """

    def __init__(
        self, windows: Dataset[Tensor], config: DataConfig, *, vocab_size: int, seed: int
    ) -> None:
        if not 1 <= config.min_len <= config.seq_len:
            raise ValueError(
                f"data.min_len must lie between 1 and data.seq_len={config.seq_len}, got "
                f"{config.min_len}"
            )
        self.windows, self.config = windows, config
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]  # ours have one

    def __getitem__(self, index: int) -> MaskedBatch:
        tokens = self.windows[index][:, : self.config.seq_len].numpy()  # (B, T)
        draw = random_stream(self.seed + _STREAM, index)
        lengths = draw.integers(self.config.min_len, self.config.seq_len + 1, size=(len(tokens), 1))
        padding = np.arange(tokens.shape[1]) >= lengths
        chosen = (draw.random(tokens.shape) < _CHOSEN) & ~padding
        chosen[:, 0] |= ~chosen.any(axis=1)  # each text has something to predict
        fate = draw.random(tokens.shape)
        is_hidden = chosen & (fate < _HIDDEN)
        is_replaced = chosen & (fate >= _HIDDEN) & (fate < _HIDDEN + _REPLACED)
        seen = np.where(is_hidden, self.vocab_size, tokens)
        seen = np.where(is_replaced, draw.integers(self.vocab_size, size=tokens.shape), seen)
        return {
            "tokens": torch.from_numpy(np.where(padding, 0, seen)),
            "padding": torch.from_numpy(padding),
            "targets": torch.from_numpy(np.where(chosen, tokens, IGNORED)),
        }

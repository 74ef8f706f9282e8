"""Batches as a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from train.config import Config, DataConfig, ModelKind
from train.data.corpus import Corpus
from train.data.masking import MaskedBatches
from train.data.tokens import TokenSource, random_stream


class TrainBatches(Dataset[Tensor]):
    """Item `index` is a whole batch, (B, T + 1) int64: a function of the seed and the index alone.

    Neither the number of workers nor anything that ran before can change it.
    """

    def __init__(self, tokens: TokenSource, config: DataConfig, *, seed: int, batches: int) -> None:
        _check_length(tokens, config.seq_len, "training")
        self.tokens, self.config, self.seed, self.batches = tokens, config, seed, batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Tensor:
        window = self.config.seq_len + 1
        draw = random_stream(self.seed, index)
        starts = draw.integers(len(self.tokens) - window + 1, size=self.config.batch_size)
        return _stack(self.tokens, starts, window)


class ValBatches(Dataset[Tensor]):
    """Evenly spaced windows, the same in every run: item `index` is a batch (B, T + 1)."""

    def __init__(self, tokens: TokenSource, config: DataConfig) -> None:
        _check_length(tokens, config.seq_len, "validation")
        self.tokens, self.config = tokens, config
        count = config.val_batches * config.batch_size
        last = len(tokens) - config.seq_len - 1
        self.starts = [round(i * last / max(count - 1, 1)) for i in range(count)]

    def __len__(self) -> int:
        return self.config.val_batches

    def __getitem__(self, index: int) -> Tensor:
        rows = slice(index * self.config.batch_size, (index + 1) * self.config.batch_size)
        window = self.config.seq_len + 1
        return _stack(self.tokens, self.starts[rows], window)


def _stack(tokens: TokenSource, starts: Iterable[int], window: int) -> Tensor:
    """(B, window) int64, one window of tokens for each start."""
    windows = np.stack([tokens.window(int(start), window) for start in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _check_length(tokens: TokenSource, seq_len: int, part: str) -> None:
    if len(tokens) <= seq_len:
        raise ValueError(
            f"data.seq_len must be smaller than the {part} text, got seq_len={seq_len} for "
            f"{len(tokens)} tokens; use a shorter data.seq_len, or more text"
        )


class RankSampler(Sampler[int]):
    """Every `world_size`-th batch, from where a run goes on.

    Its length is that of the whole run: Lightning counts the batches that it had before.

    Args:
        batches: of all ranks together.
        rank: which of them this process has.
        world_size: how many processes there are.
        start: batches that this process had before.
    """

    def __init__(self, batches: int, *, rank: int = 0, world_size: int = 1, start: int = 0) -> None:
        self.batches, self.rank, self.world_size, self.start = batches, rank, world_size, start

    def __len__(self) -> int:
        return self.batches // self.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self) * self.world_size, self.world_size)[self.start :])


_Windows = TypeVar("_Windows", TrainBatches, ValBatches)


def token_data(cfg: Config, corpus: Corpus, train_batches: int) -> TokenData:
    """The data of a run with these settings, with `train_batches` to train on."""
    return TokenData(
        corpus,
        cfg.data,
        seed=cfg.seed,
        train_batches=train_batches,
        is_masked=cfg.model.kind is ModelKind.encoder,
    )


class TokenData(pl.LightningDataModule):
    """Both loaders over one corpus.

    Args:
        corpus: both parts.
        config: sizes of an example, a batch and the validation.
        seed: with the index of a batch, decides its windows.
        train_batches: how many batches the training may draw.
        is_masked: whether batches are for an encoder (MaskedBatches).
    """

    def __init__(
        self,
        corpus: Corpus,
        config: DataConfig,
        *,
        seed: int,
        train_batches: int,
        is_masked: bool = False,
    ) -> None:
        super().__init__()
        self.corpus, self.config = corpus, config
        self.seed, self.train_batch_count, self.is_masked = seed, train_batches, is_masked

    def train_batches(self) -> TrainBatches | MaskedBatches:
        """All that there are to train on, by index."""
        windows = TrainBatches(
            self.corpus.train, self.config, seed=self.seed, batches=self.train_batch_count
        )
        return self._for_model(windows, self.seed)

    def _for_model(self, windows: _Windows, seed: int) -> _Windows | MaskedBatches:
        if not self.is_masked:
            return windows
        return MaskedBatches(windows, self.config, vocab_size=self.corpus.vocab_size, seed=seed)

    def _loader(
        self, batches: TrainBatches | ValBatches | MaskedBatches, start: int = 0
    ) -> DataLoader[Any]:
        rank, world_size = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        return DataLoader(
            batches,
            batch_size=None,  # an item is a batch already
            sampler=RankSampler(len(batches), rank=rank, world_size=world_size, start=start),
            num_workers=self.config.num_workers,
            persistent_workers=self.config.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader[Any]:
        # Lightning restores its counters before it asks for the loader, and skips nothing itself.
        done = (
            self.trainer.fit_loop.epoch_loop.batch_progress.current.completed if self.trainer else 0
        )
        return self._loader(self.train_batches(), start=done)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self._for_model(ValBatches(self.corpus.val, self.config), seed=0))

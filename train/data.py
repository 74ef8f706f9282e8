"""Bytes of Python's own standard library, drawn as a function of the seed and the step alone."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from train.config import DataConfig

VOCAB_SIZE = 256  # a token is a byte
# What a distribution may leave out or add to the library's folder.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text that was read: (N,) uint8 tokens of both parts and the hash of all of it."""

    train: Tensor
    val: Tensor
    sha256: str  # over names and contents, in the order of names
    files: int
    root: Path

    @cached_property
    def byte_entropy(self) -> float:
        """Nats per token of the validation part, for a model that knows single bytes only."""
        share = torch.bincount(self.val.long(), minlength=VOCAB_SIZE).double() / len(self.val)
        return float(torch.special.entr(share).sum())


def read_stdlib(val_fraction: float) -> Corpus:
    """Read every source file of the standard library but its tests.

    Args:
        val_fraction: share of the files that go to validation, by the hash of their names, so
            that neither order nor contents move a file to the other side.

    Raises:
        FileNotFoundError: when this Python has no sources.
        ValueError: when a part would be empty.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts)
    )
    if not paths:
        raise FileNotFoundError(
            f"data=stdlib reads the .py files of the standard library, but {root} has none; "
            "use a Python that ships its sources"
        )
    digest = hashlib.sha256()
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}  # is it validation?
    for path in paths:
        name, text = path.relative_to(root).as_posix().encode(), path.read_bytes()
        for piece in (name, text):
            digest.update(len(piece).to_bytes(8, "little") + piece)
        draw = int.from_bytes(hashlib.sha256(name).digest()[:8], "little") / 2**64
        parts[draw < val_fraction] += text
    if not parts[False] or not parts[True]:
        raise ValueError(
            f"data.val_fraction must leave files on both sides, got {val_fraction}; try 0.1"
        )
    train, val = (torch.frombuffer(parts[key], dtype=torch.uint8) for key in (False, True))
    return Corpus(train, val, digest.hexdigest(), len(paths), root)


class TrainBatches(Dataset[Tensor]):
    """Item `index` is a whole batch (B, T + 1): a function of the seed and the index alone.

    Neither the number of workers nor anything that ran before can change it.
    """

    def __init__(self, tokens: Tensor, config: DataConfig, *, seed: int, batches: int) -> None:
        _check_length(tokens, config.seq_len, "training")
        self.tokens, self.config, self.seed, self.batches = tokens, config, seed, batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Tensor:
        window = self.config.seq_len + 1
        # Philox is counter-based: nearby keys give unrelated streams, unlike seed + index.
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        starts = draw.integers(len(self.tokens) - window + 1, size=self.config.batch_size)
        return torch.stack([self.tokens[start : start + window] for start in starts])


class ValBatches(Dataset[Tensor]):
    """Evenly spaced windows, the same in every run: item `index` is a batch (B, T + 1)."""

    def __init__(self, tokens: Tensor, config: DataConfig) -> None:
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
        return torch.stack([self.tokens[start : start + window] for start in self.starts[rows]])


def _check_length(tokens: Tensor, seq_len: int, part: str) -> None:
    if len(tokens) <= seq_len:
        raise ValueError(
            f"data.seq_len must be smaller than the {part} text, got seq_len={seq_len} for "
            f"{len(tokens)} tokens; use a shorter data.seq_len"
        )


class TextData(pl.LightningDataModule):
    """Both loaders over one corpus.

    Args:
        corpus: the text.
        config: sizes of an example, a batch and the validation.
        seed: with the index of a batch, decides its windows.
        train_batches: how many batches the training may draw.
    """

    def __init__(
        self, corpus: Corpus, config: DataConfig, *, seed: int, train_batches: int
    ) -> None:
        super().__init__()
        self.corpus, self.config = corpus, config
        self.seed, self.train_batches = seed, train_batches

    def _loader(self, batches: Dataset[Tensor]) -> DataLoader[Tensor]:
        return DataLoader(
            batches,
            batch_size=None,  # an item is a batch already
            num_workers=self.config.num_workers,
            persistent_workers=self.config.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(
            TrainBatches(self.corpus.train, self.config, seed=self.seed, batches=self.train_batches)
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(ValBatches(self.corpus.val, self.config))

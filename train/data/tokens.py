"""Where windows of tokens come from: a file that is mapped into memory, or chance."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]


def random_stream(seed: int, index: int) -> np.random.Generator:
    """Random numbers that are a function of both: nearby keys give unrelated streams."""
    return np.random.Generator(np.random.Philox(key=[seed, index]))  # it is counter-based


class TokenSource(Protocol):
    """A text of tokens, or what stands for one."""

    def __len__(self) -> int: ...

    def window(self, start: int, length: int) -> Tokens:
        """(length,) tokens from position `start` on."""
        ...


class TokenFile:
    """Tokens of one dtype, one after the other in a file.

    The map is opened by each process at its first use: pickling it for a worker copies nothing.

    Args:
        path: the file.
        dtype: of a token.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.path, self.dtype = path, np.dtype(dtype)

    @cached_property
    def tokens(self) -> Tokens:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, start: int, length: int) -> Tokens:
        return self.tokens[start : start + length]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "dtype": self.dtype}


class RandomTokens:
    """Tokens that mean nothing, for runs that are about speed alone; as long as anybody asks for.

    Args:
        vocab_size: tokens are drawn evenly from [0, vocab_size).
        seed: decides them, with their position.
    """

    LENGTH = 2**40

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self) -> int:
        return self.LENGTH

    def window(self, start: int, length: int) -> Tokens:
        return random_stream(self.seed, start).integers(self.vocab_size, size=length)

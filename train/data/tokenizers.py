"""From text to tokens: its bytes, or the pieces of a byte-level BPE that is trained on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from train.config import DataConfig, TokenKind
from train.data.tokens import Tokens

BYTE_COUNT = 256
_SMALLEST_BPE = 257  # every byte, and one piece that is longer


class Tokenizer(Protocol):
    vocab_size: int

    def encode(self, text: bytes) -> Tokens:
        """(N,) tokens of a whole document, in token_dtype(vocab_size)."""
        ...

    def save(self, folder: Path) -> None:
        """Whatever is needed to read the tokens again."""
        ...


class ByteTokenizer:
    """A token is a byte."""

    vocab_size = BYTE_COUNT

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, dtype=np.uint8)

    def save(self, folder: Path) -> None:
        """Nothing: bytes need no explanation."""


class BpeTokenizer:
    """Byte-level BPE of Hugging Face's `tokenizers`, trained on the documents it is given.

    Args:
        documents: what it is trained on. Bytes that aren't UTF-8 become U+FFFD.
        vocab_size: pieces, single bytes among them.
    """

    def __init__(self, documents: Iterable[bytes], vocab_size: int) -> None:
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError as error:
            raise ImportError(
                "data.tokenizer=bpe needs the package tokenizers: pip install tokenizers, or use "
                "data.tokenizer=bytes"
            ) from error
        self._bpe = ByteLevelBPETokenizer()
        self._bpe.train_from_iterator(_decoded(documents), vocab_size, show_progress=False)
        self.vocab_size = vocab_size

    def encode(self, text: bytes) -> Tokens:
        pieces = self._bpe.encode(text.decode(errors="replace")).ids
        return np.asarray(pieces, dtype=token_dtype(self.vocab_size))

    def save(self, folder: Path) -> None:
        self._bpe.save(str(folder / "tokenizer.json"))


def _decoded(documents: Iterable[bytes]) -> Iterator[str]:
    for text in documents:
        yield text.decode(errors="replace")


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[np.typing.NBitBase]]:
    """The smallest unsigned integer that holds every token."""
    return np.min_scalar_type(vocab_size - 1)


def make_tokenizer(config: DataConfig, documents: Iterable[bytes]) -> Tokenizer:
    """The configured one, trained on `documents` if it has to be.

    Raises:
        ValueError: for a vocabulary that it can't have.
    """
    if config.tokenizer is TokenKind.bytes:
        if config.vocab_size != BYTE_COUNT:
            raise ValueError(
                f"data.vocab_size must be {BYTE_COUNT} with data.tokenizer=bytes, got "
                f"{config.vocab_size}; leave it out, or use data.tokenizer=bpe"
            )
        return ByteTokenizer()
    if not _SMALLEST_BPE <= config.vocab_size <= 2**32:
        raise ValueError(
            f"data.vocab_size must be at least {_SMALLEST_BPE} with data.tokenizer=bpe, got "
            f"{config.vocab_size}; 4096 suits a small model"
        )
    return BpeTokenizer(documents, config.vocab_size)

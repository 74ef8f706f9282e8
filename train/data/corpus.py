"""Text on this machine, packed once into files of tokens that runs map into memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.progress import track

from sms_plugin.cache import cache_folder
from train.config import DataConfig, Source
from train.data.tokenizers import make_tokenizer, token_dtype
from train.data.tokens import RandomTokens, TokenFile, TokenSource

# What a distribution may leave out or add to the library's folder.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_FORMAT = 2  # of a pack: another number, another folder
_SPLIT_BY_FILE_FROM = 20  # files; fewer are cut instead
_SNIFFED_BYTES = 8192  # a file with a zero byte among its first ones isn't text
_BYTES_FOR_ENTROPY = 2**26


@dataclass(frozen=True)
class Corpus:
    """Two parts of tokens and where they come from."""

    train: TokenSource
    val: TokenSource
    vocab_size: int
    sha256: str  # over names and contents, in the order of names
    origin: str  # for people
    files: int

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats a token of the validation part, for a model that knows single tokens only."""
        if isinstance(self.val, RandomTokens):
            return math.log(self.vocab_size)
        head = self.val.window(0, _BYTES_FOR_ENTROPY)
        share = np.bincount(head, minlength=self.vocab_size) / len(head)
        present = share[share > 0]
        return float(-(present * np.log(present)).sum())


@dataclass(frozen=True)
class PackedPart:
    tokens: int
    dtype: str


@dataclass(frozen=True)
class PackMeta:
    """What meta.json of a pack says; it is written last."""

    sha256: str
    files: int
    vocab_size: int
    train: PackedPart
    val: PackedPart


def load_corpus(config: DataConfig, seed: int) -> Corpus:
    """The configured text, from its pack if there is one; or random tokens.

    Args:
        config: source, path, tokenizer and the share of the validation part.
        seed: of random tokens.

    Raises:
        FileNotFoundError: when there is no such text.
        ValueError: when it can't be split or tokenized as asked for.
    """
    if config.path is not None and config.source is not Source.text:
        raise ValueError(
            f"data.path={config.path} is read with data=text only, got data.source="
            f"{config.source.name}; add data=text"
        )
    if config.source is Source.random:
        if config.vocab_size < 2:
            raise ValueError(f"data.vocab_size must be at least 2, got {config.vocab_size}")
        name = f"random tokens, {config.vocab_size} kinds"
        digest = hashlib.sha256(f"{name}, seed {seed}".encode()).hexdigest()
        return Corpus(
            train=RandomTokens(config.vocab_size, seed),
            val=RandomTokens(config.vocab_size, seed + 2**32),
            vocab_size=config.vocab_size,
            sha256=digest,
            origin=name,
            files=0,
        )
    root, paths = find_files(config)
    folder = cache_folder() / "data" / pack_key(config, root, paths)
    meta = read_meta(folder)
    if meta is None:
        meta = pack(config, root, paths, folder)
    train, val = (
        TokenFile(folder / f"{name}.bin", part.dtype)
        for name, part in (("train", meta.train), ("val", meta.val))
    )
    return Corpus(train, val, meta.vocab_size, meta.sha256, str(root), meta.files)


def find_files(config: DataConfig) -> tuple[Path, list[Path]]:
    """The folder or file that was asked for, and the text files there, in the order of names."""
    if config.source is Source.stdlib:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [
            path
            for path in root.rglob("*.py")
            if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts)
        ]
        if not paths:
            raise FileNotFoundError(
                f"data=stdlib reads the .py files of the standard library, but {root} has none; "
                "use a Python that ships its sources, or data=text data.path=..."
            )
        return root, sorted(paths)
    if config.path is None:
        raise ValueError("data=text needs data.path, a text file or a folder of them, got none")
    root = Path(config.path).expanduser().resolve()
    if root.is_file():
        if not root.stat().st_size:
            raise ValueError(f"data.path must be a file with text, but {root} is empty")
        if not _is_text(root):
            raise ValueError(f"data.path must be text, but {root} has zero bytes: it is binary")
        return root, [root]
    if not root.is_dir():
        raise FileNotFoundError(f"data.path must be a file or a folder, got {config.path}")
    paths = [path for path in root.rglob("*") if _is_visible(path, root) and _is_text(path)]
    if paths and not any(path.stat().st_size for path in paths):
        raise ValueError(f"data.path must hold text, but all files below {root} are empty")
    if not paths:
        raise FileNotFoundError(
            f"data.path must hold text files, but there is none below {root} (hidden files and "
            "those with zero bytes don't count)"
        )
    return root, sorted(paths)


def _is_visible(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(_SNIFFED_BYTES)


def pack_key(config: DataConfig, root: Path, paths: list[Path]) -> str:
    """A name for the pack: files as they are now, and how they become tokens."""
    stats = [(str(path), path.stat()) for path in paths]
    listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    settings = (config.tokenizer.name, config.vocab_size, config.val_fraction)
    described = json.dumps([_FORMAT, str(root), settings, listing])
    return hashlib.sha256(described.encode()).hexdigest()[:20]


def read_meta(folder: Path) -> PackMeta | None:
    """What lies in `folder`; None if that is no whole pack."""
    try:
        values = json.loads((folder / "meta.json").read_text())
        train, val = (PackedPart(**values.pop(name)) for name in ("train", "val"))
        meta = PackMeta(**values, train=train, val=val)
        for name, part in (("train", train), ("val", val)):
            size = part.tokens * np.dtype(part.dtype).itemsize
            if (folder / f"{name}.bin").stat().st_size != size:
                return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return meta


def pack(config: DataConfig, root: Path, paths: list[Path], folder: Path) -> PackMeta:
    """Write the files of tokens, beside `folder` first: it is there whole or not at all."""
    if not 0 < config.val_fraction < 1:
        raise ValueError(
            f"data.val_fraction must lie between 0 and 1, got {config.val_fraction}; try 0.1"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        meta = _write_pack(config, root, paths, unfinished)
        with (unfinished / "meta.json").open("w") as file:
            json.dump(asdict(meta), file, indent=1)
        if folder.exists() and read_meta(folder) is None:
            shutil.rmtree(folder)  # damaged
        try:
            os.rename(unfinished, folder)
        except OSError:
            if read_meta(folder) is None:  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return meta


def _write_pack(config: DataConfig, root: Path, paths: list[Path], folder: Path) -> PackMeta:
    digest = hashlib.sha256()
    sizes = {"train": 0, "val": 0}
    is_cut = len(paths) < _SPLIT_BY_FILE_FROM
    names = [_name(path, root) for path in paths]
    in_val = [not is_cut and _draw(name) < config.val_fraction for name in names]
    if not is_cut and (all(in_val) or not any(in_val)):
        raise ValueError(
            f"data.val_fraction must leave files on both sides, got {config.val_fraction} for "
            f"{len(paths)} files; try 0.1"
        )
    documents = list(zip(paths, names, in_val, strict=True))
    kept = 1 - config.val_fraction if is_cut else 1.0  # of a file; the rest is validated on
    trained_on = (_head(path.read_bytes(), kept) for path, _, is_val in documents if not is_val)
    tokenizer = make_tokenizer(config, trained_on)
    tokenizer.save(folder)
    dtype = token_dtype(tokenizer.vocab_size)
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        files = {"train": train, "val": val}
        for path, name, is_val in track(
            documents,
            description=f"tokens of {root}",
            transient=True,
            disable=len(paths) == 1,
        ):
            text = path.read_bytes()
            for piece in (name.encode(), text):
                digest.update(len(piece).to_bytes(8, "little") + piece)
            for part, tokens in _parts(tokenizer.encode(text), is_val, is_cut, config.val_fraction):
                files[part].write(tokens.tobytes())
                sizes[part] += len(tokens)
    if not all(sizes.values()):
        raise ValueError(
            f"data.val_fraction must leave tokens on both sides, got {config.val_fraction} for "
            f"{sum(sizes.values())} tokens of {root}"
        )
    train_part, val_part = (PackedPart(sizes[part], dtype.name) for part in ("train", "val"))
    return PackMeta(digest.hexdigest(), len(paths), tokenizer.vocab_size, train_part, val_part)


def _head(text: bytes, share: float) -> bytes:
    return text[: round(len(text) * share)]


def _name(path: Path, root: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _draw(name: str) -> float:
    """A number in [0, 1) of a name: neither order nor contents move a file to the other side."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") / 2**64


def _parts(
    tokens: np.ndarray, is_val: bool, is_cut: bool, val_fraction: float
) -> Iterator[tuple[str, np.ndarray]]:
    if not is_cut:
        yield "val" if is_val else "train", tokens
        return
    cut = round(len(tokens) * (1 - val_fraction))
    yield "train", tokens[:cut]
    yield "val", tokens[cut:]

"""What the trainer trains on: text in a memory map, batches as a function of seed and step."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.config import DataConfig, Source, TokenKind
from train.data import (
    Corpus,
    MaskedBatches,
    RandomTokens,
    TokenData,
    TokenFile,
    TrainBatches,
    ValBatches,
    load_corpus,
)
from train.data import corpus as corpus_module
from train.data.corpus import find_files, pack_key
from train.data.tokenizers import Tokenizer as AnyTokenizer


def data_config(**changes: Any) -> DataConfig:
    settings = {
        "source": Source.stdlib,
        "path": None,
        "tokenizer": TokenKind.bytes,
        "vocab_size": 256,
        "seq_len": 16,
        "min_len": 4,
        "batch_size": 3,
        "val_batches": 2,
        "val_fraction": 0.1,
        "num_workers": 0,
    }
    return DataConfig(**(settings | changes))


def text_config(path: Path, **changes: Any) -> DataConfig:
    return data_config(source=Source.text, path=str(path), **changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(corpus_module, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty documents, one of them in a folder, and what isn't text."""
    root = tmp_path / "my text"
    (root / "more").mkdir(parents=True)
    for i in range(39):
        (root / f"{i:02}.txt").write_text(f"document {i}: " + "ab \u00e9 " * (i + 5))
    (root / "more" / "last.md").write_text("the last one")
    (root / ".hidden").write_text("not this")
    (root / "image.bin").write_bytes(b"\0\1\2")
    return root


def everything(corpus: Corpus) -> tuple[bytes, bytes]:
    train, val = corpus.train, corpus.val
    assert isinstance(train, TokenFile) and isinstance(val, TokenFile)
    return train.tokens.tobytes(), val.tokens.tobytes()


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus(data_config(), seed=0)


def test_stdlib_is_the_same_each_time(stdlib: Corpus) -> None:
    again = load_corpus(data_config(), seed=1)
    assert again.sha256 == stdlib.sha256 and everything(again) == everything(stdlib)
    share = len(stdlib.val) / (len(stdlib.train) + len(stdlib.val))
    assert 0.05 < share < 0.2
    assert 2.5 < stdlib.unigram_entropy < 4


def test_every_text_file_is_read_once(cache: Path, folder: Path) -> None:
    corpus = load_corpus(text_config(folder), seed=0)
    train, val = everything(corpus)
    texts = [path.read_bytes() for path in find_files(text_config(folder))[1]]
    assert len(texts) == corpus.files == 40
    assert len(train) + len(val) == sum(map(len, texts))
    assert all((text in train) != (text in val) for text in texts)


def test_a_file_is_cut(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 201)))
    train, val = everything(load_corpus(text_config(tmp_path / "a.txt"), seed=0))
    assert (train, val) == (bytes(range(1, 181)), bytes(range(181, 201)))


def test_it_is_packed_once(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(text_config(folder), seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "pack", None)  # to call it would fail
        assert everything(load_corpus(text_config(folder), seed=0)) == everything(first)
    (folder / "00.txt").write_text("changed")
    changed = load_corpus(text_config(folder), seed=0)
    assert changed.sha256 != first.sha256 and everything(changed) != everything(first)
    assert len(list((cache / "data").iterdir())) == 2


@pytest.mark.parametrize("damage", ["meta.json", "train.bin", "val.bin"])
def test_a_damaged_pack_is_made_again(cache: Path, folder: Path, damage: str) -> None:
    first = load_corpus(text_config(folder), seed=0)
    right = everything(first)
    (pack,) = (cache / "data").iterdir()
    (pack / damage).write_bytes((pack / damage).read_bytes()[:-3])
    assert everything(load_corpus(text_config(folder), seed=0)) == right


def test_a_failure_leaves_nothing(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_module, "_parts", fail)
    with pytest.raises(KeyboardInterrupt):
        load_corpus(text_config(folder), seed=0)
    assert list((cache / "data").iterdir()) == []


def _load(config: DataConfig, cache: Path, queue: Any) -> None:
    corpus_module.cache_folder = lambda: cache
    queue.put(load_corpus(config, seed=0).sha256)


def test_processes_may_pack_at_once(cache: Path, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=_load, args=(text_config(folder), cache, queue)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    digests = {queue.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(digests) == 1
    assert len(list((cache / "data").iterdir())) == 1


def test_bpe(cache: Path, folder: Path) -> None:
    pytest.importorskip("tokenizers")
    config = text_config(folder, tokenizer=TokenKind.bpe, vocab_size=300)
    corpus = load_corpus(config, seed=0)
    assert corpus.vocab_size == 300
    assert isinstance(corpus.train, TokenFile) and corpus.train.dtype == np.uint16
    as_bytes = load_corpus(text_config(folder), seed=0)
    assert len(corpus.train) < len(as_bytes.train) / 2
    from tokenizers import Tokenizer

    (pack,) = (cache / "data").glob("*/tokenizer.json")
    text = Tokenizer.from_file(str(pack)).decode(corpus.train.tokens.tolist())
    assert text.encode() == everything(as_bytes)[0]
    one, again = (TrainBatches(corpus.train, config, seed=3, batches=2) for _ in range(2))
    assert torch.equal(one[1], again[1]) and not torch.equal(one[0], one[1])


def test_bpe_learns_nothing_from_what_is_validated(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single file is cut, and its end is no text to train pieces on."""
    pytest.importorskip("tokenizers")
    text = tmp_path / "one.txt"
    text.write_bytes(b"a" * 900 + b"b" * 100)
    seen: list[bytes] = []
    make = corpus_module.make_tokenizer

    def watched(config: DataConfig, documents: Iterable[bytes]) -> AnyTokenizer:
        seen.extend(documents)
        return make(config, iter(seen))

    monkeypatch.setattr(corpus_module, "make_tokenizer", watched)
    config = text_config(text, tokenizer=TokenKind.bpe, vocab_size=258)
    load_corpus(config, seed=0)
    assert seen == [b"a" * 900]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": Source.text}, r"needs data\.path"),
        ({"source": Source.text, "path": "/no/such/place"}, "file or a folder, got /no/such/place"),
        ({"vocab_size": 300}, "must be 256 with data.tokenizer=bytes, got 300"),
        ({"tokenizer": TokenKind.bpe, "vocab_size": 200}, "at least 257 .* got 200"),
        ({"val_fraction": 0.0}, r"between 0 and 1, got 0\.0"),
        ({"source": Source.random, "vocab_size": 1}, "at least 2, got 1"),
    ],
)
def test_mistakes(cache: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_corpus(data_config(**changes), seed=0)


def test_folders_without_text(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is none below"):
        load_corpus(text_config(tmp_path / "empty"), seed=0)
    (tmp_path / "empty" / "tiny.txt").write_text("x")
    with pytest.raises(ValueError, match="tokens on both sides"):
        load_corpus(text_config(tmp_path / "empty"), seed=0)


def test_entropy_of_known_text(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abab" * 100)
    corpus = load_corpus(text_config(tmp_path / "a.txt"), seed=0)
    assert corpus.unigram_entropy == pytest.approx(math.log(2))
    random = load_corpus(data_config(source=Source.random, vocab_size=50), seed=0)
    assert random.unigram_entropy == pytest.approx(math.log(50))


def sources() -> list[Callable[[], Corpus]]:
    return [
        lambda: load_corpus(data_config(), seed=0),
        lambda: load_corpus(data_config(source=Source.random, vocab_size=1000), seed=0),
    ]


@pytest.mark.parametrize("load", sources(), ids=["stdlib", "random"])
def test_batches_depend_on_seed_and_index_alone(load: Callable[[], Corpus]) -> None:
    corpus = load()

    def make(seed: int, batches: int = 9) -> TrainBatches:
        return TrainBatches(corpus.train, data_config(), seed=seed, batches=batches)

    batches = make(1)
    fifth = batches[5]
    assert fifth.shape == (3, 17) and fifth.dtype == torch.int64
    assert torch.equal(make(1, batches=100)[5], fifth)
    assert torch.equal(batches[5], fifth)
    assert not torch.equal(batches[6], fifth)
    assert not torch.equal(make(2)[5], fifth)
    assert not torch.equal(make(2)[4], fifth)
    loaders = [
        TokenData(corpus, data_config(num_workers=n), seed=1, train_batches=4).train_dataloader()
        for n in (0, 2)
    ]
    for one, other in zip(*loaders, strict=True):
        assert torch.equal(one, other)


def test_random_tokens_fill_the_vocabulary() -> None:
    tokens = RandomTokens(7, seed=1)
    window = tokens.window(123, 5000)
    assert set(window.tolist()) == set(range(7))
    assert np.array_equal(window, tokens.window(123, 5000))
    assert not np.array_equal(window, RandomTokens(7, seed=2).window(123, 5000))


def test_a_map_is_not_copied_by_pickling(stdlib: Corpus) -> None:
    train = stdlib.train
    assert isinstance(train, TokenFile) and len(train) > 1e6
    copy = pickle.loads(pickle.dumps(train))
    assert len(pickle.dumps(train)) < 1000 and np.array_equal(copy.window(5, 9), train.window(5, 9))


def test_validation_covers_its_part_evenly(tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint8).tofile(tmp_path / "tokens.bin")
    tokens = TokenFile(tmp_path / "tokens.bin", np.uint8)
    val = ValBatches(tokens, data_config())
    assert val.starts == [0, 37, 73, 110, 146, 183]
    assert val[1][-1].tolist() == list(range(183, 200))
    with pytest.raises(ValueError, match="seq_len"):
        ValBatches(tokens, data_config(seq_len=200))


def test_key_is_of_files_and_settings(folder: Path) -> None:
    config = text_config(folder)
    key = pack_key(config, *find_files(config))
    assert pack_key(text_config(folder, seq_len=99), *find_files(config)) == key
    assert pack_key(text_config(folder, val_fraction=0.2), *find_files(config)) != key
    os.utime(folder / "01.txt", (1, 1))
    assert pack_key(config, *find_files(config)) != key


def test_masked_batches() -> None:
    config = data_config(seq_len=64, min_len=20, batch_size=64)
    windows = TrainBatches(RandomTokens(50, seed=1), config, seed=1, batches=4)
    batches = MaskedBatches(windows, config, vocab_size=50, seed=1)
    assert len(batches) == 4
    batch, text = batches[2], windows[2][:, :64]
    tokens, padding, targets = batch["tokens"], batch["padding"], batch["targets"]
    lengths = (~padding).sum(1)
    assert 20 <= lengths.min() < 30 and 55 < lengths.max() <= 64
    assert not (padding[:, :-1] & ~padding[:, 1:]).any()  # the end, and nothing but the end
    predicted = targets != -100
    assert torch.equal(targets[predicted], text[predicted])
    assert predicted.any(1).all() and not (predicted & padding).any()
    share = predicted.sum() / (~padding).sum()
    assert 0.12 < share < 0.18
    untouched = ~predicted & ~padding
    assert torch.equal(tokens[untouched], text[untouched])
    assert 0.7 < (tokens[predicted] == 50).float().mean() < 0.9
    assert not (tokens[~predicted] == 50).any()
    for name, value in MaskedBatches(windows, config, vocab_size=50, seed=1)[2].items():
        assert torch.equal(value, batch[name])
    other = MaskedBatches(windows, config, vocab_size=50, seed=2)[2]
    assert not torch.equal(other["padding"], padding)
    with pytest.raises(ValueError, match=r"between 1 and .*=64, got 65"):
        MaskedBatches(windows, data_config(seq_len=64, min_len=65), vocab_size=50, seed=1)

"""The cells of the softmax benchmark: every case, length and dtype, each with its goal.

Legend: B batch, N rows of a pair representation, H heads, T queries and keys, Tq, Tk either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scripts.benchmarks.timing import COLD_BYTES

ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4}
DTYPES = ("bfloat16", "float32")
POWERS = tuple(2**k for k in range(6, 18))  # 64 to 131072
LEARNED_LENGTHS = (49, 64, 128, 256, 343, 384, 512, 768, 1024)
ODD_LENGTHS = {63: 64, 127: 128, 1000: 1024, 1023: 1024, 1025: 1024, 4097: 4096}
OF_NEIGHBOUR = 0.9  # of the speed of the aligned length

# Fractions of the roof, forward and backward.
DENSE, SHORT, LONG = (0.97, 0.98), (0.96, 0.98), (0.85, 0.85)
CAUSAL, SHORT_CAUSAL = (0.94, 0.95), (0.85, 0.88)
MASKED = (0.95, 0.98)
LEARNED = (0.95, 0.90)
STRIDED = (0.95, 0.95)


@dataclass(frozen=True)
class Term:
    """A mask or a bias that broadcasts to the scores; one row for all queries is padding."""

    shape: tuple[int, ...]
    dtype: str
    learned: bool = False


@dataclass(frozen=True)
class Cell:
    """One problem. The other systems than fused run where `peers` is set."""

    case: str
    dtype: str
    shape: tuple[int, ...]  # of the scores
    goals: tuple[float, float] | None = None
    is_causal: bool = False
    mask: Term | None = None
    bias: Term | None = None
    layout: str = "contiguous"  # "strided": the heads within a row of the batch; "offset": by one
    neighbour: Cell | None = None  # the goal is OF_NEIGHBOUR times what this one reaches
    peers: bool = False
    kind: str = "cold"  # "latency": warm; "host": the calling thread

    @property
    def length(self) -> int:
        return self.shape[-1]

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.case} {self.size}"

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for term in (self.mask, self.bias) if term is not None)

    @property
    def scores_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def cold_matrices(dtype: str, queries: int, keys: int) -> int:
    """How many `queries` x `keys` matrices make a tensor that is cold."""
    return math.ceil(COLD_BYTES / (queries * keys * ITEMSIZE[dtype]))


def square(dtype: str, length: int, queries: int | None = None) -> tuple[int, int, int, int]:
    """A cold (B, H, Tq, Tk), with eight heads if there are that many."""
    queries = queries or length
    count = cold_matrices(dtype, queries, length)
    heads = min(8, count)
    return math.ceil(count / heads), heads, queries, length


def padding(shape: tuple[int, ...], dtype: str = "bool") -> Term:
    """(B, 1, ..., 1, T)"""
    return Term((shape[0], *(1 for _ in shape[1:-1]), shape[-1]), dtype)


def dense() -> Iterator[Cell]:
    for dtype in (*DTYPES, "float16"):
        for length in POWERS:
            if dtype == "float16" and length not in (128, 1024, 4096, 16384):
                continue
            goals = SHORT if length < 256 else DENSE if length <= 16384 else LONG
            shape = (cold_matrices(dtype, 1, length), length)
            few = dtype == "float32" and length in (256, 512, 1024, 2048, 4096, 16384)
            peers = length <= 16384 and (dtype == "bfloat16" or few)
            yield Cell("dense", dtype, shape, goals, peers=peers)
    for dtype in DTYPES:
        for shape in ((64, 131072), (8, 1048576)):
            yield Cell("few long rows", dtype, shape, LONG, peers=dtype == "bfloat16")


def causal() -> Iterator[Cell]:
    for dtype in (*DTYPES, "float16"):
        for length in POWERS[:9]:
            if dtype == "float16" and length not in (512, 4096):
                continue
            goals = SHORT_CAUSAL if length <= 256 else CAUSAL
            peers = dtype == "bfloat16" or (dtype == "float32" and length in (1024, 4096))
            shape = square(dtype, length)
            yield Cell("causal", dtype, shape, goals, is_causal=True, peers=peers)
    for dtype in DTYPES:
        for length in (512, 1024, 4096):
            shape = square(dtype, length)
            yield Cell(
                "causal + padding", dtype, shape, CAUSAL, is_causal=True, mask=padding(shape)
            )
        for length in (512, 1024, 4096, 16384):
            shape = square(dtype, length, length // 4)
            yield Cell("causal Tq=Tk/4", dtype, shape, CAUSAL, is_causal=True)


def masked() -> Iterator[Cell]:
    for dtype in DTYPES:
        for length in (128, 512, 1024, 4096, 16384):
            shape = square(dtype, length)
            peers = length >= 512 if dtype == "bfloat16" else length in (1024, 16384)
            yield Cell("padding Bx1x1xT", dtype, shape, MASKED, mask=padding(shape), peers=peers)
        for length in (128, 512, 1024, 4096):
            shape = square(dtype, length)
            mask = Term((shape[0], 1, length, length), "bool")
            yield Cell("mask Bx1xTxT", dtype, shape, MASKED, mask=mask)


def additive() -> Iterator[Cell]:
    for dtype in DTYPES:
        for own in dict.fromkeys((dtype, "float32")):
            for length in (128, 512, 1024, 4096):
                B, H, T, _ = shape = square(dtype, length)
                peers = (dtype, own, length) == ("bfloat16", "bfloat16", 1024)
                for kind, term, is_mask in (
                    ("1xHxTxT", Term((1, H, T, T), own), False),
                    ("1x1xTxT", Term((1, 1, T, T), own), True),
                    ("Bx1x1xT", padding(shape, own), True),
                    ("BxHxTxT", Term((B, H, T, T), own), False),
                ):
                    mask, bias = (term, None) if is_mask else (None, term)
                    case = f"additive {kind} {own}"
                    yield Cell(case, dtype, shape, MASKED, mask=mask, bias=bias, peers=peers)


def learned() -> Iterator[Cell]:
    for dtype in DTYPES:
        for length in LEARNED_LENGTHS:
            B, H, T, _ = shape = square(dtype, length)
            peers = length in (49, 343, 512, 1024) if dtype == "bfloat16" else length == 49
            count = cold_matrices(dtype, length, length)
            pair = (math.ceil(count / 128), 32, 4, length, length)  # (B, N, H, T, T)
            for kind, scores, term in (
                ("1xHxTxT", shape, (1, H, T, T)),
                ("BxHxTxT", shape, (B, H, T, T)),
                ("Bx1xHxTxT", pair, (pair[0], 1, 4, T, T)),
            ):
                bias = Term(term, dtype, learned=True)
                for name, mask in (("", None), (" + padding", padding(scores))):
                    case = f"learned bias {kind}{name}"
                    run_peers = peers and kind == "1xHxTxT" and mask is not None
                    yield Cell(case, dtype, scores, LEARNED, mask=mask, bias=bias, peers=run_peers)


def layouts() -> Iterator[Cell]:
    for dtype in DTYPES:
        for length in (128, 512, 1024, 4096):
            peers = (dtype, length) == ("bfloat16", 1024)
            yield Cell(
                "strided BxTxHxT",
                dtype,
                square(dtype, length),
                STRIDED,
                layout="strided",
                peers=peers,
            )
        for causal in (False, True):
            for length, neighbour in ODD_LENGTHS.items():
                aligned = _aligned(dtype, neighbour, causal)
                case = "odd causal" if causal else "odd"
                shape = square(dtype, length)
                peers = dtype == "bfloat16" and length in (63, 1023, 4097)
                yield replace(
                    aligned, case=case, shape=shape, goals=None, neighbour=aligned, peers=peers
                )
        for length in (64, 128, 1024, 4096):
            aligned = _aligned(dtype, length, False)
            yield replace(aligned, case="offset", goals=None, layout="offset", neighbour=aligned)


def _aligned(dtype: str, length: int, causal: bool) -> Cell:
    goals = (
        (SHORT_CAUSAL if length <= 256 else CAUSAL) if causal else SHORT if length < 256 else DENSE
    )
    case = "aligned causal" if causal else "aligned"
    return Cell(case, dtype, square(dtype, length), goals, is_causal=causal)


def small() -> Iterator[Cell]:
    """Warm problems as models have them: 0.1 to 50 MB."""
    for dtype in DTYPES:
        for model, shape in (
            ("Swin windows", (64, 3, 49, 49)),
            ("Swin windows", (1024, 6, 49, 49)),
            ("BERT", (1, 12, 128, 128)),
            ("BERT", (32, 12, 128, 128)),
            ("BERT", (8, 12, 512, 512)),
            ("ViT", (1, 12, 197, 197)),
            ("ViT", (32, 12, 197, 197)),
            ("GPT-2", (1, 12, 256, 256)),
            ("GPT-2", (4, 12, 512, 512)),
            ("T5", (8, 8, 128, 128)),
        ):
            mask = padding(shape) if model == "BERT" else None
            learned = Term((1, *shape[1:]), dtype, learned=True)
            bias = learned if model in ("Swin windows", "T5") else None
            causal = model == "GPT-2"
            peers = dtype == "bfloat16"
            yield Cell(
                f"small {model}",
                dtype,
                shape,
                None,
                causal,
                mask,
                bias,
                peers=peers,
                kind="latency",
            )


def host() -> Iterator[Cell]:
    """A call so small that only the host's time counts; the goals are times as fast as native."""
    shape = (1, 4, 16, 64)
    for case, mask in (("host", None), ("host + padding", padding(shape))):
        yield Cell(case, "float32", shape, (1.0, 0.5), mask=mask, peers=True, kind="host")


def cuda_cells() -> list[Cell]:
    sections = (dense, causal, masked, additive, learned, layouts, small, host)
    return [cell for section in sections for cell in section()]


def cpu_cells(shape: tuple[int, int, int, int] = (8, 16, 512, 512)) -> list[Cell]:
    """Forward and backward together; without a mask the goal is a fraction of the bound, with one
    it is times as fast as native."""
    cells = []
    for dtype in ("float32", "bfloat16"):
        cells.append(Cell("dense", dtype, shape, (0.85, 0.85), kind="cpu"))
        cells.append(Cell("causal", dtype, shape, (2.6, 2.6), is_causal=True, kind="cpu"))
        mask = padding(shape)
        cells.append(Cell("padding Bx1x1xT", dtype, shape, (2.6, 2.6), mask=mask, kind="cpu"))
    return cells

"""The bytes that a cell has to read and to write, each operand once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scripts.benchmarks.cells import ITEMSIZE, Cell, Term

SECTOR_BYTES = 32  # what the memory delivers at once
SECTOR_LENGTH = 256  # up to this many keys, a causal row is counted in whole sectors


@dataclass(frozen=True)
class Traffic:
    reads: int  # bytes
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.reads + other.reads, self.writes + other.writes)


def visible(queries: int, keys: int) -> int:
    """How many elements of a causal matrix, aligned to the bottom right, are kept."""
    return sum(min(keys, max(0, i + 1 + keys - queries)) for i in range(queries))


def visible_bytes(queries: int, keys: int, itemsize: int) -> int:
    """What must be read of such a matrix: short rows in the sectors that hold their kept part."""
    if keys > SECTOR_LENGTH:
        return visible(queries, keys) * itemsize
    row = keys * itemsize
    moved = 0
    for i in range(queries):
        kept = min(keys, max(0, i + 1 + keys - queries)) * itemsize
        if kept:
            # Rows of odd lengths start within a sector; a matrix isn't long enough to care where
            # the next one starts.
            first, last = i * row // SECTOR_BYTES, (i * row + kept - 1) // SECTOR_BYTES
            moved += min((last - first + 1) * SECTOR_BYTES, row)
    return moved


def read_of_scores(cell: Cell) -> int:
    """Bytes of one tensor shaped like the scores, as far as its values matter."""
    if not cell.is_causal:
        return cell.scores_bytes
    queries, keys = cell.shape[-2:]
    return math.prod(cell.shape[:-2]) * visible_bytes(queries, keys, ITEMSIZE[cell.dtype])


def term_bytes(term: Term) -> int:
    return math.prod(term.shape) * ITEMSIZE[term.dtype]


def traffic(cell: Cell, direction: str) -> Traffic:
    """Forward reads scores and terms and writes probs, backward reads probs and their gradient and
    writes that of the scores and of a learned term. The zeros of a causal half are written."""
    forward = Traffic(
        read_of_scores(cell) + sum(map(term_bytes, cell.terms)),
        cell.scores_bytes,
    )
    backward = Traffic(
        2 * read_of_scores(cell),
        cell.scores_bytes + sum(term_bytes(term) for term in cell.terms if term.learned),
    )
    by_direction = {
        "forward": forward,
        "backward": backward,
        "forward + backward": forward + backward,
    }
    return by_direction[direction]

"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from scripts.benchmarks.record import merged, write_rows

T = TypeVar("T")


def join(parts: Sequence[Path], out: Path, columns: Sequence[str]) -> int:
    """`--merge`: write the rows of `parts` to `out`; the exit status."""
    try:
        write_rows(out, merged(parts, columns), columns)
    except (OSError, ValueError) as error:
        print(f"--merge: {error}", file=sys.stderr)
        return 2
    return 0


def stopped(main: Callable[[], int]) -> int:
    """`main`, with one line for Ctrl-C; the exit status."""
    try:
        return main()
    except KeyboardInterrupt:
        print("\nstopped; the cells that were measured are in --out", file=sys.stderr)
        return 130


def parse_out(text: str) -> Path:
    """A file that can be written, found out before anything is measured: argparse's `--out`."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file; {text} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that can be written; got {text}: {error}"
        ) from error
    return path


def parse_part(text: str) -> tuple[int, int]:
    """ "2/3" as (2, 3): the type of argparse's `--part`."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with 1 <= K <= N, like 2/3; got {text!r}")
    return int(part), int(parts)


def select(
    items: Sequence[T], names: Sequence[str], part: tuple[int, int] = (1, 1), only: str = "*"
) -> list[T]:
    """Those whose name fits the pattern `only` (shell style; a bare word fits anywhere), of which
    the K-th of N parts: every N-th one, so that the parts take about as long."""
    pattern = only if any(sign in only for sign in "*?[") else f"*{only}*"
    chosen = [
        item for item, name in zip(items, names, strict=True) if fnmatch.fnmatch(name, pattern)
    ]
    return chosen[part[0] - 1 :: part[1]]

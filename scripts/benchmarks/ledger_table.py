"""The article's ledger as a CSV row and as Markdown."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.record import Row
from scripts.benchmarks.timing import Percentiles

HEADINGS = ("", "direction", "kernels", "GB read", "GB written", "GB needed", "ms", "peak GiB")


@dataclass
class Entry:
    """One system in one direction; bytes that weren't counted are None."""

    system: str
    direction: str
    kernels: int  # launched, by torch's profiler
    ideal_bytes: int
    ms: Percentiles
    peak_gib: float  # beyond the operands
    bytes_read: int | None = None
    bytes_written: int | None = None
    ncu_kernels: int | None = None

    def cells(self) -> Row:
        def text(value: int | None) -> str:
            return "" if value is None else str(value)

        return {
            "system": self.system,
            "direction": self.direction,
            "kernels": str(self.kernels),
            "bytes_read": text(self.bytes_read),
            "bytes_written": text(self.bytes_written),
            "ideal_bytes": str(self.ideal_bytes),
            "ms_p20": f"{self.ms.ms_p20:.5g}",
            "ms_p50": f"{self.ms.ms_p50:.5g}",
            "ms_p80": f"{self.ms.ms_p80:.5g}",
            "peak_gib": f"{self.peak_gib:.4g}",
        }


def as_markdown(entries: Sequence[Entry], where: str, notes: Sequence[str]) -> str:
    """The table, what the chain costs in times of fused, and the notes."""
    lines = [
        f"Scaled, masked softmax of float32 [8, 32, 1024, 1024] ({where}).",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    for entry in entries:
        cells = [
            entry.system,
            entry.direction,
            str(entry.kernels or "-"),
            _gb(entry.bytes_read),
            _gb(entry.bytes_written),
            _gb(entry.ideal_bytes),
            f"{entry.ms.ms_p50:.3f}",
            f"{entry.peak_gib:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_in_words(entries), *notes]
    return "\n".join(lines).rstrip() + "\n"


def _gb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f}"


def _in_words(entries: Sequence[Entry]) -> list[str]:
    def total(system: str) -> tuple[float, int | None]:
        own = [e for e in entries if e.system == system]
        moved = [(e.bytes_read, e.bytes_written) for e in own]
        counted = [r + w for r, w in moved if r is not None and w is not None]
        return sum(e.ms.ms_p50 for e in own), sum(counted) if len(counted) == len(own) else None

    (slow, many), (fast, few) = total("chain"), total("fused")
    if not slow or not fast:
        return []
    words = f"Forward and backward, the chain takes {slow / fast:.2f} times as long as fused"
    if many and few:
        words += f" and moves {many / few:.2f} times as many bytes"
    return [words + ".", ""]


def write_whole(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

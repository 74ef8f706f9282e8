"""What a benchmark leaves behind: one CSV, whole at any time, and a table at the end."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from scripts.benchmarks.timing import Percentiles

CHECKOUT = Path(__file__).resolve().parents[2]

COLUMNS = (
    "device", "torch", "commit", "dtype", "case", "shape", "direction", "system",
    "ms_p20", "ms_p50", "ms_p80", "ideal_bytes", "tb_per_s", "roof_tb_per_s", "fraction_of_roof",
    "goal", "note",
)  # fmt: skip
KEY = ("device", "dtype", "case", "shape", "direction", "system")  # one row of a file each

Row = dict[str, str]
T = TypeVar("T")


@dataclass
class Record:
    """One timing. What isn't known, or makes no sense for it, is None and an empty cell.

    `goal` is the fraction of the roof that the fused operator has to reach in that cell; without a
    roof, how many times as fast as native it has to be.
    """

    dtype: str  # "bfloat16"
    case: str  # "causal"
    shape: str  # "8x16x512x512"
    direction: str  # "forward", "backward", "forward + backward"
    system: str  # "fused"
    ms: Percentiles
    ideal_bytes: int | None = None
    roof_tb_per_s: float | None = None
    goal: float | None = None
    note: str = ""
    peak_gib: float | None = None

    @property
    def tb_per_s(self) -> float | None:
        if self.ideal_bytes is None or self.ms.ms_p50 <= 0:
            return None
        return self.ideal_bytes / self.ms.ms_p50 / 1e9

    @property
    def fraction_of_roof(self) -> float | None:
        if self.tb_per_s is None or not self.roof_tb_per_s:
            return None
        return self.tb_per_s / self.roof_tb_per_s

    def cells(self) -> Row:
        """As text, without what is the same for a whole run."""
        values = {
            "dtype": self.dtype,
            "case": self.case,
            "shape": self.shape,
            "direction": self.direction,
            "system": self.system,
            "ms_p20": _digits(self.ms.ms_p20, 5),
            "ms_p50": _digits(self.ms.ms_p50, 5),
            "ms_p80": _digits(self.ms.ms_p80, 5),
            "ideal_bytes": "" if self.ideal_bytes is None else str(self.ideal_bytes),
            "tb_per_s": _digits(self.tb_per_s, 4),
            "roof_tb_per_s": _digits(self.roof_tb_per_s, 4),
            "fraction_of_roof": _digits(self.fraction_of_roof, 4),
            "goal": _digits(self.goal, 4),
            "peak_gib": _digits(self.peak_gib, 4),
        }
        return values | {"note": "; ".join(n for n in (self.ms.note, self.note) if n)}


def _digits(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def device_name(device: str) -> str:
    """ "NVIDIA H200", or the processor with the number of threads that torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def commit() -> str:
    """What was measured: $SMS_PLUGIN_COMMIT, or the checkout's commit, or "unknown"."""
    if chosen := os.environ.get("SMS_PLUGIN_COMMIT"):
        return chosen
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV that a `Recorder` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> None:
    """Write the CSV whole or not at all: another file in the folder takes its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: row.get(name, "") for name in columns} for row in rows)
        os.chmod(name, 0o644)  # mkstemp's own is for one user
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def merged(paths: Iterable[Path], columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of the parts of one run; a cell that was measured again counts by its last row.

    Raises:
        ValueError: for a file with other `columns`; None: without those that name a row.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for path in paths:
        found = read_rows(path)
        has = set(found[0]) if found else set()
        if has != set(columns) if columns else not has >= set(KEY):
            raise ValueError(
                f"{path} must have the columns {', '.join(columns or KEY)}; it has "
                f"{', '.join(filter(None, has)) or 'no rows'}: it is no file of this benchmark"
            )
        for row in found:
            rows[tuple(row[name] for name in KEY)] = row
    return list(rows.values())


class Recorder:
    """Collects the records of a run; the CSV is written after each group of cells.

        with Recorder(path, device="cuda") as recorder:
            for cell in recorder.track(cells):
                recorder.add(measure(cell))
        recorder.show()

    Args:
        path: the CSV; None keeps none.
        device: "cpu" or "cuda".
        columns: of the CSV, beyond or other than `COLUMNS`.
        progress: a bar on stderr, where that is a terminal; otherwise a line for each group.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        device: str,
        columns: Sequence[str] = COLUMNS,
        progress: bool = True,
    ) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.records: list[Record] = []
        self._progress = progress
        self._about = {"device": device_name(device), "torch": torch.__version__}
        self._about["commit"] = commit()

    @property
    def title(self) -> str:
        return ", ".join(
            (self._about["device"], f"torch {torch.__version__}", self._about["commit"])
        )

    def add(self, *records: Record) -> None:
        self.records += records

    def rows(self) -> list[Row]:
        return [self._about | record.cells() for record in self.records]

    def write(self) -> None:
        if self.path is not None:
            write_rows(self.path, self.rows(), self.columns)

    def track(self, groups: Sequence[T], name: Any = str) -> Iterator[T]:
        """Each group in turn; what was recorded is written when the next one is asked for."""
        with _Bar(len(groups), self._progress) as advance:
            for group in groups:
                advance(name(group))
                yield group
                self.write()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.records:  # a run without any leaves an older file as it is
            self.write()

    def show(self, records: Sequence[Record] | None = None, title: str | None = None) -> None:
        """Print the table of all records, or of some."""
        columns = ("dtype", "case", "shape", "direction", "system", "ms", "TB/s", "of roof", "goal")
        lines = []
        for record in self.records if records is None else records:
            cells = record.cells()
            numbers = [cells[c] for c in ("ms_p50", "tb_per_s", "fraction_of_roof", "goal")]
            words = (record.dtype, record.case, record.shape, record.direction, record.system)
            lines.append([*words, *numbers])
        print_table(columns, lines, title or self.title)


class _Bar:
    """A progress bar of rich; plain lines where stderr is a file or rich isn't there."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._total, self._done, self._wanted = total, 0, wanted
        self._bar: Any = None

    def __enter__(self) -> Any:
        if self._wanted and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress
            except ModuleNotFoundError:
                return self._advance
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self._advance

    def _advance(self, name: str) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done - 1, description=name)
        elif self._wanted:
            print(f"{self._done}/{self._total} {name}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_table(columns: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> None:
    """On stdout, with rich where it is installed; as wide as it needs where stdout is a file."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
        print(title)
        for line in (columns, *lines):
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells).rstrip())
        return
    table = Table(*columns, title=title, title_justify="left", box=None, header_style="bold")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)

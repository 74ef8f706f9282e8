"""What processes measured, gathered arm by arm, and the verdicts on it."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.comparison.ratios import Ratio, Speed, noise_of, ratio_of, verdict
from sms_plugin.callbacks.step_times import STEADY
from train.profiling import Group
from train.run_folder import read_status

NATIVE, AGAIN = "native", "native-again"
BLOCKS = 5  # of a finished run, which stand for repeats
PROCESS_NOISE = 1.05  # between finished runs, of which there is one process each


@dataclass(frozen=True)
class Measured:
    """An arm at a length, repeat by repeat.

    Attributes:
        arm: its name.
        seq_len: T.
        runs: speed.json of each repeat.
        kernels: rows of kernels.csv, and the steps that they are of; None: not profiled.
    """

    arm: str
    seq_len: int
    runs: Sequence[dict[str, Any]]
    kernels: tuple[list[dict[str, str]], int] | None = None

    def ms(self, column: str = "step_ms") -> list[float]:
        return [run["median_ms"][column] for run in self.runs]

    def median(self, column: str = "step_ms") -> float:
        return statistics.median(self.ms(column))

    def value(self, name: str) -> float:
        return statistics.median(run[name] for run in self.runs)

    @property
    def is_launch_bound(self) -> bool:
        """On a GPU: whether the host takes as long for a step as the device."""
        return self.runs[0]["environment"]["cuda"] is not None and (
            self.median("host_ms") >= 0.95 * self.median()
        )

    @property
    def softmax_share(self) -> float | None:
        """Of the time of all kernels."""
        if self.kernels is None:
            return None
        rows = self.kernels[0]
        total = sum(float(row["ms"]) for row in rows)
        own = sum(float(row["ms"]) for row in rows if row["group"] == Group.softmax.value)
        return own / total if total else None


@dataclass(frozen=True)
class Compared:
    """An arm beside native at the same length."""

    measured: Measured
    ratio: Ratio
    verdict: Speed


def read_measured(own: Path, arm: str, seq_len: int, repeats: int) -> Measured:
    """From the folders of an arm's processes, which lie in `own`."""
    runs = [json.loads((own / f"{r}" / "speed.json").read_text()) for r in range(repeats)]
    return Measured(arm, seq_len, runs, read_kernels(own / "profile"))


def read_kernels(folder: Path) -> tuple[list[dict[str, str]], int] | None:
    if not (folder / "kernels.csv").is_file():
        return None
    with (folder / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = 1
    if (folder / "profile.json").is_file():
        steps = json.loads((folder / "profile.json").read_text())["steps"]
    return rows, steps


def compare_to_native(arms: Sequence[Measured]) -> tuple[float, list[Compared]]:
    """The noise as a factor, and each arm beside native; all of one length."""
    by_name = {measured.arm: measured for measured in arms}
    native = by_name[NATIVE].ms()
    noise = noise_of(native, by_name[AGAIN].ms())
    compared = []
    for measured in arms:
        if measured.arm not in (NATIVE, AGAIN):
            ratio = ratio_of(native, measured.ms())
            compared.append(Compared(measured, ratio, verdict(ratio, noise)))
    return noise, compared


def compare_runs(a: Measured, b: Measured) -> tuple[float, Compared]:
    """Two finished runs, whose blocks of steps stand for repeats."""
    ratio = ratio_of(a.ms(), b.ms())
    within = max(max(ms / run.median(), run.median() / ms) for run in (a, b) for ms in run.ms())
    noise = max(within, PROCESS_NOISE)
    return noise, Compared(b, ratio, verdict(ratio, noise))


def read_finished(run_dir: Path) -> Measured:
    """A run folder of train/run.py, its steady steps cut into blocks.

    Raises:
        ValueError: when the run isn't finished, was profiled, or has too few steady steps.
    """
    if not (run_dir / "summary.json").is_file():
        became = read_status(run_dir)
        what = f"its run is {became}" if became else "it isn't the folder of a run"
        raise ValueError(f"{run_dir} must be the folder of a finished run; {what}")
    summary = json.loads((run_dir / "summary.json").read_text())
    if summary["profiler"] != "none":
        raise ValueError(f"{run_dir} was profiled, which slows it down: it is no measurement")
    with (run_dir / "timing.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["label"] == STEADY]
    if len(rows) < 4 * BLOCKS:
        raise ValueError(
            f"{run_dir} has {len(rows)} steady steps in timing.csv; a comparison takes at least "
            f"{4 * BLOCKS}: train for longer, with fewer validations"
        )
    size = len(rows) // BLOCKS
    columns = [name for name in rows[0] if name.endswith("_ms")]
    runs = []
    for block in range(BLOCKS):
        own = rows[block * size : (block + 1) * size]
        medians = {name: statistics.median(float(row[name]) for row in own) for name in columns}
        runs.append(
            {
                "median_ms": medians,
                "environment": summary["environment"],
                "tokens_per_s": summary["tokens_per_s"],
                "peak_memory_bytes": summary["peak_memory_bytes"],
                "parameters": summary["parameters"],
                "first_step_s": float("nan"),
            }
        )
    seq_len = int(OmegaConf.load(run_dir / "config.yaml").data.seq_len)
    return Measured(f"{run_dir.name}", seq_len, runs, read_kernels(run_dir))

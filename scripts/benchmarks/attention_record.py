"""What is recorded of whole attentions and models, beyond `Record`; their goals; the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks import record
from scripts.benchmarks.record import Record, Row, print_table
from scripts.benchmarks.timing import Percentiles

COLUMNS = (*record.COLUMNS[:-1], "peak_gib", "first_step_s", "floor_ms", "note")

BOTH = "forward + backward"
BIAS_CASE = "learned bias: "  # followed by the model
GPT_CASE = "GPT"
CHANGING_CASE = "GPT, changing lengths"

FLOOR_GOAL = 0.8  # floor over fused, in every row: within 1.25 times the floor
# SDPA over fused, uncompiled. In float32 the floor itself is at most 1.7 times as fast as SDPA.
SDPA_GOALS = {"8x12x1024x64": 1.6, "256x4x256x32": 1.6}
GPT_GOALS = {512: 1.5, 1024: 1.95, 2048: 2.6, 4096: 3.35}  # native over fused
GPT_PEAK_GOALS = {512: 0.62, 1024: 0.51, 2048: 0.44, 4096: 0.42}  # fused over native, peak memory

NOT_RUN = Percentiles(math.nan, math.nan, math.nan)


@dataclass
class AttentionRecord(Record):
    """One system on one attention or model; NaN and a note where it failed.

    `fraction_of_roof` is the floor over the time: the six matrix products as torch runs them plus
    one pass of the softmax at the speed of a stream.
    """

    floor_ms: float | None = None
    first_step_s: float | None = None  # from the first call to its result, compilation included

    @property
    def fraction_of_roof(self) -> float | None:
        if self.floor_ms is None or not self.ms.ms_p50 > 0:
            return None
        return self.floor_ms / self.ms.ms_p50

    @property
    def failed(self) -> bool:
        return self.note.startswith("error")

    def cells(self) -> Row:
        cells = super().cells()
        for name in ("first_step_s", "floor_ms"):
            value = getattr(self, name)
            cells[name] = "" if value is None else f"{value:.4g}"
        return {name: "" if text == "nan" else text for name, text in cells.items()}


def failure(error: Exception) -> str:
    """ "error: " and the first line that says something; compilers print pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"error: {type(error).__name__}: {lines[0] if lines else ''}"[:200]


def show(records: Sequence[AttentionRecord], title: str, *, has_goals: bool) -> None:
    """One line a row or length, one column a system, and what misses its goal, if it has one."""
    systems = list(dict.fromkeys(r.system for r in records))
    groups: dict[tuple[str, str, str], dict[str, AttentionRecord]] = {}
    for r in records:
        what = f"{r.case.removeprefix(BIAS_CASE)} {r.shape}"
        groups.setdefault((r.case, what, r.dtype), {})[r.system] = r
    lines, goals = [], []
    for (_, what, dtype), by_system in groups.items():
        lines.append([f"{what} {dtype}", *(_number(by_system.get(system)) for system in systems)])
        goals.append(f"{what} {dtype}: {', '.join(verdicts(by_system))}")
    print_table(("ms", *systems), lines, title)
    if has_goals:
        print("\n".join(goals))
    errors: dict[str, list[str]] = {}
    for r in records:
        if r.failed:
            errors.setdefault(f"{r.system}, {r.note}", []).append(f"{r.case} {r.shape} {r.dtype}")
    for error, places in errors.items():
        print(f"{error} (in {'; '.join(places)})")


def _number(r: AttentionRecord | None) -> str:
    if r is None:
        return "-"
    if math.isnan(r.ms.ms_p50):
        return "error"
    peak = "" if r.peak_gib is None or r.floor_ms is not None else f", {r.peak_gib:.1f} GiB"
    return f"{r.ms.ms_p50:.3g}{peak}"


def verdicts(by_system: dict[str, AttentionRecord]) -> list[str]:
    """How the fused systems of one row compare; "MISSED" where that is short of the goal."""
    found = []

    def compare(name: str, value: float | None, goal: float | None) -> None:
        if value is None or math.isnan(value):
            return
        missed = goal is not None and value < goal
        found.append(f"{name} {value:.2f}" + (f" MISSED {goal:g}" if missed else ""))

    fused, native = by_system.get("fused"), by_system.get("native")
    if fused is not None:
        compare("of floor", fused.fraction_of_roof, fused.goal if fused.floor_ms else None)
        sdpa = by_system.get("SDPA")
        if fused.floor_ms and sdpa is not None:
            goal = SDPA_GOALS.get(fused.shape, 1.0) if fused.dtype == "bfloat16" else 1.0
            compare("SDPA /", _ratio(sdpa, fused), goal)
    if fused is not None and native is not None:
        is_gpt = fused.floor_ms is None
        compare("native /", _ratio(native, fused), fused.goal if is_gpt else 1.0)
        if is_gpt and fused.peak_gib and native.peak_gib:
            T = int(fused.shape.split("x")[2])
            goal = GPT_PEAK_GOALS.get(T, 1.0)
            share = fused.peak_gib / native.peak_gib
            found.append(f"memory {share:.3f}" + (f" MISSED {goal:g}" if share > goal else ""))
    ours, theirs = by_system.get("fused + compiled"), by_system.get("compiled")
    if ours is not None and theirs is not None:
        compare("compiled /", _ratio(theirs, ours), 1.0)
    return found


def _ratio(slow: AttentionRecord, fast: AttentionRecord) -> float:
    return slow.ms.ms_p50 / fast.ms.ms_p50

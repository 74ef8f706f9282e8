"""The short table at the end of a run: what each case reached of its goal, and who was faster."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.benchmarks.record import Record, print_table

MISSES = 30  # named in full
COLUMNS = ("case", "cells", "forward", "goal", "missed", "backward", "goal", "missed")

Key = tuple[str, str, str, str]


def key(record: Record) -> Key:
    return record.dtype, record.case, record.shape, record.direction


def reached(records: Sequence[Record]) -> dict[Key, tuple[Record, float]]:
    """What fused has of its goal's kind, for each cell with a goal: a fraction of the roof, or how
    many times as fast as native it is."""
    natives = {key(r): r for r in records if r.system == "native"}
    found = {}
    for record in records:
        if record.system != "fused" or record.goal is None:
            continue
        value = record.fraction_of_roof
        if value is None and key(record) in natives:
            value = natives[key(record)].ms.ms_p50 / record.ms.ms_p50
        if value is not None:
            found[key(record)] = (record, value)
    return found


def show(records: Sequence[Record], title: str) -> str:
    """Print a line a case with its worst cell, the cells that missed, and the comparisons.

    Returns:
        How many goals were reached, in words.
    """
    found = reached(records)
    cases = dict.fromkeys(record.case for record, _ in found.values())
    lines = []
    for case in cases:
        of_case = [pair for pair in found.values() if pair[0].case == case]
        shapes = {(record.dtype, record.shape) for record, _ in of_case}
        line = [case, str(len(shapes))]
        for directions in (("forward",), ("backward", "forward + backward")):
            line += _worst([pair for pair in of_case if pair[0].direction in directions])
        lines.append(line)
    print_table(COLUMNS, lines, title)
    misses = _misses(found)
    for record, value in misses[:MISSES]:
        print(f"missed: {' '.join(key(record))}: {value:.3f} of {record.goal:.3f}")
    if len(misses) > MISSES:
        print(f"and {len(misses) - MISSES} more")
    print("\n".join(comparisons(records)))
    return f"{len(found) - len(misses)} of {len(found)} goals reached"


def _misses(found: dict[Key, tuple[Record, float]]) -> list[tuple[Record, float]]:
    """The farthest from its goal first."""
    missed = [(r, value) for r, value in found.values() if value < (r.goal or 0)]
    return sorted(missed, key=lambda pair: pair[1] / (pair[0].goal or 1))


def _worst(pairs: list[tuple[Record, float]]) -> list[str]:
    if not pairs:
        return ["", "", ""]
    record, value = min(pairs, key=lambda pair: pair[1] / (pair[0].goal or 1))
    missed = sum(value < (r.goal or 0) for r, value in pairs)
    return [f"{value:.3f}", f"{record.goal:.3f}", str(missed) if missed else ""]


def comparisons(records: Sequence[Record]) -> list[str]:
    """A line for each other system: how many times as fast fused is, and where it is slower."""
    ours = {key(r): r.ms.ms_p50 for r in records if r.system == "fused"}
    lines = []
    for system in dict.fromkeys(r.system for r in records if r.system not in ("fused", "bound")):
        theirs = [r for r in records if r.system == system and key(r) in ours]
        if not theirs:
            continue
        ratios = [r.ms.ms_p50 / ours[key(r)] for r in theirs]
        slower = [
            f"{' '.join(key(r))} ({ratio:.2f})"
            for r, ratio in zip(theirs, ratios, strict=True)
            if ratio < 1
        ]
        text = f"; slower at {', '.join(slower[:8])}" if slower else ""
        more = f" and {len(slower) - 8} more" if len(slower) > 8 else ""
        lines.append(
            f"fused is {min(ratios):.2f} to {max(ratios):.2f} times as fast as {system} "
            f"in {len(ratios)} timings{text}{more}"
        )
    return lines

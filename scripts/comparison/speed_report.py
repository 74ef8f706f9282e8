"""The report of a comparison of speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.comparison.ratios import CONFIDENCE, Speed, least_seen, most_possible
from scripts.comparison.report import write_report
from scripts.comparison.speed_plots import PHASES, plot_lengths, plot_phases, plot_steps
from scripts.comparison.speed_results import (
    AGAIN,
    NATIVE,
    PROCESS_NOISE,
    Compared,
    Measured,
)
from train.profiling import Group

TOP = 12  # kernels in the table
STEP_HEADINGS = (
    *("T", "arm", "ms a step", "times as fast as native", "from", "to", "noise", "verdict"),
    *("tokens/s", "peak GiB", "s to the first step"),
)


def write_speed_report(
    folder: Path,
    groups: Sequence[tuple[Sequence[Measured], float, Sequence[Compared]]],
    precision: str,
    settings: dict[str, Any],
) -> list[str]:
    """Write the report with its plots.

    Args:
        folder: where it goes.
        groups: for each length all arms, the noise as a factor, and the arms beside the first.
        precision: of Lightning.
        settings: steps, warmup, repeats; is_finished for two finished runs.

    Returns:
        A line for each verdict.
    """
    arms = [measured for own, _, _ in groups for measured in own]
    shown = groups[-1][0]  # the longest
    plot_steps(shown, folder / "steps.png")
    plot_phases(shown, folder / "phases.png")
    has_lengths = len(groups) > 1
    if has_lengths:
        plot_lengths(arms, folder / "lengths.png")
    first = arms[0].runs[0]
    base = arms[0].arm
    verdicts = [_verdict(compared, base, noise) for _, noise, found in groups for compared in found]
    profiled = [measured for measured in shown if measured.kernels is not None]
    write_report(
        folder,
        "speed.md.j2",
        {
            "title": "Speed of " + ", ".join(dict.fromkeys(m.arm for m in arms if m.arm != AGAIN)),
            "device": first["environment"]["device"],
            "environment": first["environment"],
            "precision": precision,
            "parameters": f"{first['parameters']:,}" if "parameters" in first else "?",
            "verdicts": verdicts,
            "noise_floor": PROCESS_NOISE,
            "confidence": CONFIDENCE,
            "step_headings": [h.replace("native", base) for h in STEP_HEADINGS],
            "step_rows": [row for group in groups for row in _step_rows(*group)],
            "phase_headings": ["T", "arm", *(name for name, _ in PHASES.values()), "data wait"],
            "phase_rows": [
                [m.seq_len, m.arm, *(m.median(c) for c in PHASES), m.median("data_wait_host_ms")]
                for m in arms
            ],
            "launch_bound": [f"{m.arm} at {m.seq_len}" for m in arms if m.is_launch_bound],
            "has_lengths": has_lengths,
            "group_headings": ["arm", *(g.value for g in Group), "ms", "factor at most"],
            "group_rows": [_group_row(measured) for measured in profiled],
            "kernel_headings": ["kernel", "group", *(f"{m.arm}, ms a step" for m in profiled)],
            "kernel_rows": _kernel_rows(profiled),
            **settings,
        },
    )
    return verdicts


def _verdict(compared: Compared, base: str, noise: float) -> str:
    ratio, own = compared.ratio, compared.measured
    at = f" at {own.seq_len}" if own.seq_len else ""
    more = ""
    if compared.verdict is Speed.same:
        more = f"; {least_seen(ratio, noise) - 1:.1%} would have been one"
    return (
        f"{own.arm}{at}: {compared.verdict.value}; {ratio.ratio:.3f} times as fast as {base} "
        f"({ratio.low:.3f} to {ratio.high:.3f}), noise {noise - 1:.1%}{more}"
    )


def _step_rows(
    arms: Sequence[Measured], noise: float, compared: Sequence[Compared]
) -> list[list[Any]]:
    found = {c.measured.arm: c for c in compared}
    rows = []
    for m in arms:
        own = found.get(m.arm)
        beside = ["", "", "", "", ""]
        if own is not None:
            r = own.ratio
            beside = [f"{r.ratio:.3f}", f"{r.low:.3f}", f"{r.high:.3f}", f"{noise - 1:.1%}"]
            beside.append(own.verdict.value)
        first = m.value("first_step_s")
        rows.append(
            [
                *(m.seq_len, m.arm, m.median(), *beside),
                *(round(m.value("tokens_per_s")), m.value("peak_memory_bytes") / 2**30),
                "" if math.isnan(first) else f"{first:.2f}",
            ]
        )
    return rows


def _group_row(measured: Measured) -> list[Any]:
    assert measured.kernels is not None
    rows, steps = measured.kernels
    total = sum(float(row["ms"]) for row in rows)
    shares = [
        sum(float(row["ms"]) for row in rows if row["group"] == group.value) / total
        for group in Group
    ]
    at_most = most_possible(shares[0]) if measured.arm == NATIVE else None
    return [
        measured.arm,
        *(f"{share:.1%}" for share in shares),
        total / steps,
        "" if at_most is None else f"{at_most:.2f}",
    ]


def _kernel_rows(profiled: Sequence[Measured]) -> list[list[Any]]:
    """Milliseconds a step of those that take most in any arm, side by side."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for measured in profiled:
        assert measured.kernels is not None
        rows, steps = measured.kernels
        for row in rows:
            key = (row["name"], row["group"])
            times.setdefault(key, {})[measured.arm] = float(row["ms"]) / steps
    most = sorted(times, key=lambda key: -max(times[key].values()))[:TOP]
    return [
        [f"`{name[:70]}`", group, *(f"{times[name, group].get(m.arm, 0):.3f}" for m in profiled)]
        for name, group in most
    ]

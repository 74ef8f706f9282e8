"""Plots of the benchmarks' CSVs.

    python scripts/plot_speed.py CSV... --out DIR

One picture for each case of `bench_softmax.py`: TB/s against the length of a row, a panel for each
dtype and direction, a line a system, the roof on top. And of `bench_attention.py`: bars of the
attentions with a learned bias, and of the GPT's time and memory. Files are written whole.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from scripts.benchmarks.record import Row, merged  # noqa: E402
from scripts.benchmarks.speed_text import short  # noqa: E402

COLOURS = {
    "roof": "black",
    "fused": "tab:blue",
    "fused + compiled": "navy",
    "fused (padded keys)": "tab:cyan",
    "native": "tab:red",
    "compiled": "tab:orange",
    "SDPA": "tab:green",
    "SDPA + compiled": "darkgreen",
    "FlexAttention": "tab:purple",
    "article": "tab:brown",
    "online": "tab:olive",
    "liger": "tab:pink",
    "quack": "tab:gray",
    "floor": "black",
}
FIRST = tuple(COLOURS)  # in the order of the legends
BIAS = "learned bias: "
GPT = "GPT"


def numbers(row: Row, *names: str) -> list[float]:
    """NaN where a cell is empty."""
    return [float(row.get(name) or "nan") for name in names]


def in_order(systems: Sequence[str]) -> list[str]:
    unique = dict.fromkeys(systems)
    return sorted(unique, key=lambda s: FIRST.index(s) if s in FIRST else len(FIRST))


def length(row: Row) -> int:
    """Tk, the last of the scores' sizes."""
    return int(row["shape"].split("x")[-1])


def speed_cases(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows with a roof, by case, where the case has more than one length."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("tb_per_s") and row.get("roof_tb_per_s"):
            cases.setdefault(row["case"], []).append(row)
    return {case: own for case, own in cases.items() if len({length(row) for row in own}) > 1}


def plot_case(case: str, rows: Sequence[Row], pyplot: Any) -> Any:
    """One figure: a row of panels a dtype, a panel a direction."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    size = (5 * len(directions) + 1.5, 3.2 * len(dtypes) + 0.6)
    figure, panels = pyplot.subplots(
        len(dtypes), len(directions), figsize=size, squeeze=False, sharex=True, sharey=True
    )
    for panel_row, dtype in zip(panels, dtypes, strict=True):
        for panel, direction in zip(panel_row, directions, strict=True):
            own = [r for r in rows if (r["dtype"], r["direction"]) == (dtype, direction)]
            _lines(panel, own)
            panel.set_title(f"{dtype}, {direction}", fontsize=10)
    highest = max(number for row in rows for number in numbers(row, "tb_per_s", "roof_tb_per_s"))
    panels[0, 0].set_ylim(0, 1.05 * highest)  # of all: the axis is shared
    for panel in panels[-1]:
        panel.set_xlabel("keys")
    for panel in panels[:, 0]:
        panel.set_ylabel("TB/s of bytes that must move")
    figure.suptitle(f"{case} ({about(rows)})", fontsize=11)
    _legend(figure, panels.ravel())
    return figure


def _lines(panel: Any, rows: Sequence[Row]) -> None:
    for system in in_order([row["system"] for row in rows]):
        points = sorted((length(r), *numbers(r, "tb_per_s")) for r in rows if r["system"] == system)
        panel.plot(*zip(*points, strict=True), "o-", ms=3, lw=1.4, label=system, **_colour(system))
    roof = {length(row): numbers(row, "roof_tb_per_s")[0] for row in rows}
    panel.plot(*zip(*sorted(roof.items()), strict=True), "--", lw=1.2, label="roof", color="black")
    panel.set_xscale("log", base=2)
    panel.grid(alpha=0.3)


def _colour(system: str) -> dict[str, str]:
    return {"color": COLOURS[system]} if system in COLOURS else {}


def plot_bars(title: str, groups: dict[str, dict[str, float]], unit: str, pyplot: Any) -> Any:
    """A panel a group, a bar a system, its value beside it; the groups' scales are their own."""
    columns = min(3, len(groups))
    height = math.ceil(len(groups) / columns)
    systems = in_order([s for group in groups.values() for s in group])
    size = (4.6 * columns, (0.3 * len(systems) + 0.9) * height + 0.6)
    figure, panels = pyplot.subplots(height, columns, figsize=size, squeeze=False)
    for panel in panels.ravel()[len(groups) :]:
        panel.axis("off")
    for panel, (name, values) in zip(panels.ravel(), groups.items(), strict=False):
        own = [s for s in systems if s in values][::-1]  # the first one on top
        known = [0 if math.isnan(values[s]) else values[s] for s in own]
        panel.barh(own, known, color=[COLOURS.get(s, "gray") for s in own], height=0.7)
        for position, system in enumerate(own):
            is_missing = math.isnan(values[system])
            text = "failed" if is_missing else short(values[system])
            panel.text(known[position], position, f" {text}", va="center", fontsize=8)
        panel.set_title(name, fontsize=9)
        panel.set_xlim(0, 1.18 * max(known, default=0) or 1)
        panel.tick_params(labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.suptitle(f"{title}, {unit}", fontsize=11)
    figure.tight_layout()
    return figure


def about(rows: Sequence[Row]) -> str:
    return f"{rows[0]['device']}, torch {rows[0]['torch']}"


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    named: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    inches, _ = figure.get_size_inches()
    figure.tight_layout(rect=(0.01, 0, 1 - 1.5 / inches, 1))  # room for the longest name
    order = in_order(list(named))
    figure.legend([named[label] for label in order], order, loc="center right", fontsize=8)


def bias_groups(rows: Sequence[Row], dtype: str) -> dict[str, dict[str, float]]:
    """Milliseconds of each system, by attention."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["case"].startswith(BIAS) and row["dtype"] == dtype:
            name = f"{row['case'].removeprefix(BIAS)} {row['shape']}"
            groups.setdefault(name, {})[row["system"]] = numbers(row, "ms_p50")[0]
    return groups


def gpt_groups(rows: Sequence[Row], column: str) -> dict[str, dict[str, float]]:
    """A column of each system, by length."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["case"].startswith(GPT) and row.get(column):
            name = f"T = {row['shape'].split('x')[2]}{row['case'].removeprefix(GPT)}"
            groups.setdefault(name, {})[row["system"]] = numbers(row, column)[0]
    return groups


def save(figure: Any, path: Path, pyplot: Any) -> None:
    """Write the picture whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        figure.savefig(name, format="png", dpi=110)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        pyplot.close(figure)


def file_name(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", title).strip("_").lower() + ".png"


def plot_all(rows: Sequence[Row], out: Path) -> list[Path]:
    """Every picture that the rows have something for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []

    def keep(name: str, figure: Any) -> None:
        paths.append(out / file_name(name))
        save(figure, paths[-1], pyplot)

    for case, own in speed_cases(rows).items():
        keep(case, plot_case(case, own, pyplot))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        if groups := bias_groups(rows, dtype):
            title = f"Attention with a learned bias, {dtype}, forward + backward ({about(rows)})"
            keep(f"attention bias {dtype}", plot_bars(title, groups, "ms", pyplot))
    for column, unit in (("ms_p50", "ms"), ("peak_gib", "peak GiB")):
        if groups := gpt_groups(rows, column):
            title = f"A step of a 6-layer GPT, forward + backward ({about(rows)})"
            keep(f"gpt {unit.split()[-1]}", plot_bars(title, groups, unit, pyplot))
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plots of the benchmarks' CSVs.")
    parser.add_argument("csv", nargs="+", type=Path, metavar="CSV", help="of the benchmarks")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the PNGs go")
    options = parser.parse_args(arguments)
    if missing := [str(path) for path in options.csv if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}; the benchmarks write them with --out")
    try:
        paths = plot_all(merged(options.csv), options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        parser.error(f"{error}; `pip install matplotlib` brings it")
    print("\n".join(map(str, paths)) or "nothing to plot: no case with two lengths, no attention")
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())

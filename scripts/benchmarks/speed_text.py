"""The README's tables of speed, as Markdown, from the rows of the benchmarks' CSVs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scripts.benchmarks.attention_record import BIAS_CASE, CHANGING_CASE, GPT_CASE
from scripts.benchmarks.record import Row

AS_GOOD = 1.02  # who takes at most so many times as long is as fast
GPT_COLUMNS = ("native", "compiled", "fused", "fused + compiled", "SDPA")
BIAS_COLUMNS = (*GPT_COLUMNS, "FlexAttention", "floor")
PADDED = "fused (padded keys)"
SMALL, SMALL_COLUMNS = "small ", ("native", "compiled", "fused")

BySystem = dict[str, Row]


def number(text: str | None) -> float:
    """NaN for an empty cell."""
    return float(text or "nan")


def short(value: float) -> str:
    """Three digits, never an exponent; a dash where there is no number."""
    if math.isnan(value):
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{min(decimals, 3)}f}"


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def source(rows: Sequence[Row]) -> str:
    """ "NVIDIA H200, torch 2.11, commit 1234567"; several where the rows come from several."""
    found = dict.fromkeys((r["device"], r["torch"].partition("+")[0], r["commit"]) for r in rows)
    return "; ".join(f"{d}, torch {t}, commit {c}" for d, t, c in found)


def listed(items: Sequence[str]) -> str:
    """ "a, b and c" """
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _grouped(rows: Sequence[Row], key: Callable[[Row], tuple[str, ...]]) -> dict[str, BySystem]:
    groups: dict[str, BySystem] = {}
    for row in rows:
        groups.setdefault(" ".join(key(row)), {})[row["system"]] = row
    return groups


def _ratios(groups: dict[str, BySystem], theirs: str, ours: str) -> list[tuple[str, float]]:
    """(group, our time over theirs) wherever both have a time."""
    pairs = [
        (name, _of(by, ours, "ms_p50") / _of(by, theirs, "ms_p50")) for name, by in groups.items()
    ]
    return [(name, ratio) for name, ratio in pairs if not math.isnan(ratio)]


def _sentence(groups: dict[str, BySystem], theirs: str, ours: str) -> str:
    """Where they are as good or better, or that they aren't; empty without a comparison."""
    ratios = _ratios(groups, theirs, ours)
    if not ratios:
        return ""
    good = [f"{name} ({ratio:.2f} times)" for name, ratio in ratios if ratio * AS_GOOD >= 1]
    if not good:
        return f"{_capital(ours)} is faster than {theirs} wherever both have a time."
    where = "everywhere: " if len(good) == len(ratios) else "at "
    return f"{_capital(theirs)} is as fast as {ours} or faster {where}{listed(good)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def gpt_text(rows: Sequence[Row]) -> str:
    """Time, memory and seconds to the first step of the GPT, by length."""

    def length(row: Row) -> str:
        return row["shape"].split("x")[2]

    fixed = _grouped([r for r in rows if r["case"] == GPT_CASE], lambda r: (f"T = {length(r)}",))
    changing = _grouped(
        [r for r in rows if r["case"] == CHANGING_CASE], lambda r: (f"T up to {length(r)}",)
    )
    lines = []
    for groups, what, column in (
        (fixed, "ms", "ms_p50"),
        (changing, "ms, lengths change", "ms_p50"),
        (fixed, "peak GiB", "peak_gib"),
        (changing, "peak GiB, lengths change", "peak_gib"),
        (fixed, "seconds to the first step", "first_step_s"),
        (changing, "seconds until every length was seen", "first_step_s"),
    ):
        for name, by_system in groups.items():
            cells = [short(_of(by_system, system, column)) for system in GPT_COLUMNS]
            compiled = _of(by_system, "SDPA + compiled", column)
            if not math.isnan(compiled):
                cells[-1] += f" ({short(compiled)} compiled)"
            if any(cell != "-" for cell in cells):
                lines.append([f"{name}: {what}", *cells])
    every = fixed | {f"{name} (lengths change)": by for name, by in changing.items()}
    notes = [by.get("fused", {}).get("note") for by in changing.values()]
    words = [
        *(f"Lengths that change: {note}." for note in notes if note),
        _sentence(every, "SDPA", "fused"),
        _sentence(every, "compiled", "fused"),
        _sentence(every, "compiled", "fused + compiled"),
    ]
    return _joined(table(("", *GPT_COLUMNS), lines), words, rows)


def _bias_groups(rows: Sequence[Row]) -> dict[str, BySystem]:
    return _grouped(
        [r for r in rows if r["case"].startswith(BIAS_CASE)],
        lambda r: (r["case"].removeprefix(BIAS_CASE), r["shape"], r["dtype"]),
    )


def bias_memory_text(rows: Sequence[Row]) -> str:
    """Peak memory of the same attentions."""
    columns = BIAS_COLUMNS[:-1]
    groups = _bias_groups(rows)
    lines = [
        [name, *(short(_of(by, system, "peak_gib")) for system in columns)]
        for name, by in groups.items()
    ]
    return _joined(table(("peak GiB", *columns), lines), (), rows)


def bias_text(rows: Sequence[Row]) -> str:
    """Milliseconds of the attentions with a learned bias."""
    groups = _bias_groups(rows)
    lines = []
    for name, by_system in groups.items():
        cells = [short(_of(by_system, system, "ms_p50")) for system in BIAS_COLUMNS]
        for index, system in enumerate(BIAS_COLUMNS):
            if by_system.get(system, {}).get("note", "").startswith("error"):
                cells[index] = "error"
        padded = _of(by_system, PADDED, "ms_p50")
        if not math.isnan(padded):
            cells[BIAS_COLUMNS.index("fused")] += f" ({short(padded)} with padded keys)"
        lines.append([name, *cells])
    words = [_sentence(groups, theirs, "fused") for theirs in ("SDPA", "compiled", "FlexAttention")]
    words.append(_sentence(groups, "compiled", "fused + compiled"))
    of_floor = [
        (number(by["fused"]["fraction_of_roof"]), name)
        for name, by in groups.items()
        if by.get("fused", {}).get("fraction_of_roof")
    ]
    if of_floor:
        share, name = min(of_floor)
        words.append(f"The slowest row of fused is {name}, {1 / share:.2f} times its floor.")
    return _joined(table(("", *BIAS_COLUMNS), lines), words, rows)


def softmax_text(rows: Sequence[Row]) -> str:
    """Fractions of the roof, worst to best, by case; and who is faster where."""
    ours = [r for r in rows if r["system"] == "fused" and r.get("fraction_of_roof")]
    columns = [(t, d) for t in ("bfloat16", "float32") for d in ("forward", "backward")]
    lines = []
    for case in dict.fromkeys(r["case"] for r in ours):
        cells = []
        for dtype, direction in columns:
            shares = [
                number(r["fraction_of_roof"])
                for r in ours
                if (r["case"], r["dtype"], r["direction"]) == (case, dtype, direction)
            ]
            cells.append(_range(shares))
        lines.append([case, *cells])
    groups = _grouped(rows, lambda r: (r["case"], r["shape"], r["dtype"], r["direction"]))
    words = [_goals(groups)]
    if ours:
        slowest = min(ours, key=lambda r: number(r["fraction_of_roof"]))
        words.append(
            f"The slowest cell is {slowest['case']} {slowest['shape']} {slowest['dtype']} "
            f"{slowest['direction']}: {number(slowest['fraction_of_roof']):.2f} of its roof."
        )
    others = dict.fromkeys(r["system"] for r in rows if r["system"] not in ("fused", "bound"))
    words += [_compared(groups, system) for system in others]
    headings = ("of the roof", *(f"{dtype} {direction}" for dtype, direction in columns))
    return _joined(table(headings, lines), words, rows)


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _goals(groups: dict[str, BySystem]) -> str:
    with_goal = {n: by for n, by in groups.items() if by.get("fused", {}).get("goal")}
    missed = [name for name, by in with_goal.items() if not _reached(by)]
    text = f"{len(with_goal) - len(missed)} of {len(with_goal)} goals are reached."
    return text if with_goal else ""


def _reached(by_system: BySystem) -> bool:
    """Goals are fractions of a roof; without one, how many times as fast as native."""
    share = _of(by_system, "fused", "fraction_of_roof")
    if math.isnan(share):
        share = _of(by_system, "native", "ms_p50") / _of(by_system, "fused", "ms_p50")
    return share >= _of(by_system, "fused", "goal")


def _compared(groups: dict[str, BySystem], system: str) -> str:
    """One sentence: how many times as fast, and the cell where fused does worst."""
    ratios = [
        (number(by[system]["ms_p50"]) / number(by["fused"]["ms_p50"]), name)
        for name, by in groups.items()
        if system in by and "fused" in by
    ]
    ratios = [pair for pair in ratios if not math.isnan(pair[0])]
    if not ratios:
        return ""
    (low, where), (high, _) = min(ratios), max(ratios)
    good = [name for ratio, name in ratios if ratio <= AS_GOOD]
    text = f"Against {system}: {low:.2f} to {high:.2f} times as fast in {len(ratios)} timings"
    if not good:
        return f"{text}."
    faster = sum(ratio < 1 for ratio, _ in ratios)
    return (
        f"{text}; {system} is as fast (within 2 %) or faster in {len(good)} of them, faster in "
        f"{faster}, most at {where}."
    )


def small_text(rows: Sequence[Row]) -> str:
    """Microseconds of warm, small problems, replayed from CUDA graphs."""
    groups = _grouped(
        [r for r in rows if r["case"].startswith(SMALL) and r["dtype"] == "bfloat16"],
        lambda r: (r["case"].removeprefix(SMALL), r["shape"], r["direction"]),
    )
    lines = [
        [name, *(short(1e3 * _of(by, system, "ms_p50")) for system in SMALL_COLUMNS)]
        for name, by in groups.items()
    ]
    words = [_sentence(groups, "compiled", "fused"), _sentence(groups, "native", "fused")]
    return _joined(table(("microseconds", *SMALL_COLUMNS), lines), words, rows)


def cpu_text(rows: Sequence[Row]) -> str:
    """Forward + backward on the CPU."""
    groups = _grouped(rows, lambda r: (r["dtype"], r["case"], f"[{r['shape'].replace('x', ', ')}]"))
    systems = [
        s for s in ("native", "compiled", "fused", "bound") if any(s in g for g in groups.values())
    ]
    lines = []
    for name, by_system in groups.items():
        cells = [_with_spread(by_system.get(system, {})) for system in systems]
        times = _of(by_system, "native", "ms_p50") / _of(by_system, "fused", "ms_p50")
        lines.append([name, *cells, f"{times:.1f}"])
    words = [_sentence(groups, "compiled", "fused")]
    return _joined(table(("ms", *systems, "native / fused"), lines), words, rows)


def _with_spread(row: Row) -> str:
    """ "26.9 (26.1 to 31.0)": the median, and the 20th and 80th percentile"""
    middle, low, high = (number(row.get(f"ms_p{share}")) for share in (50, 20, 80))
    return "-" if math.isnan(middle) else f"{short(middle)} ({short(low)} to {short(high)})"


def _of(by_system: BySystem, system: str, column: str) -> float:
    return number(by_system.get(system, {}).get(column))


def _joined(text: str, words: Sequence[str], rows: Sequence[Row]) -> str:
    said = " ".join(word for word in (*words, f"({source(rows)}.)") if word)
    return f"{text}\n\n{said}"

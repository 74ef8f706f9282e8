"""Pictures of speed: step times, phases, and both speed and memory over length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.comparison.speed_results import AGAIN, Measured
from train.plots import new_figure, save_figure

PHASES = {
    "forward_ms": ("forward", "tab:blue"),
    "backward_ms": ("backward", "tab:orange"),
    "optimizer_ms": ("optimizer", "tab:green"),
}


def plot_steps(arms: Sequence[Measured], path: Path) -> None:
    """For each arm the median step of every process as a dot, and their median as a bar."""
    figure, axes = _figure(len(arms))
    for place, measured in enumerate(arms):
        axes.barh(place, measured.median(), color="0.8")
        axes.plot(measured.ms(), [place] * len(measured.runs), "k.", ms=5)
    _names(axes, arms)
    axes.set(xlabel="ms a step: bar the median, dots the processes")
    save_figure(figure, path)


def plot_phases(arms: Sequence[Measured], path: Path) -> None:
    """Forward, backward, optimizer and what is left of a step, stacked."""
    figure, axes = _figure(len(arms))
    for place, measured in enumerate(arms):
        left = 0.0
        for column, (name, color) in PHASES.items():
            width = measured.median(column)
            label = name if place == 0 else None
            axes.barh(place, width, left=left, color=color, label=label)
            left += width
        rest = max(measured.median() - left, 0.0)
        axes.barh(place, rest, left=left, color="0.7", label="rest" if place == 0 else None)
    _names(axes, arms)
    axes.set(xlabel="ms a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars
    save_figure(figure, path)


def plot_lengths(arms: Sequence[Measured], path: Path) -> None:
    """Tokens a second and peak memory over the length of a sequence, a line for each arm."""
    figure = new_figure(10, 4.5)
    speed, memory = figure.subplots(1, 2)
    for name in dict.fromkeys(measured.arm for measured in arms if measured.arm != AGAIN):
        own = sorted((m for m in arms if m.arm == name), key=lambda m: m.seq_len)
        lengths = [m.seq_len for m in own]
        speed.plot(lengths, [m.value("tokens_per_s") for m in own], "o-", label=name)
        gib = [m.value("peak_memory_bytes") / 2**30 for m in own]
        memory.plot(lengths, gib, "o-", label=name)
    for axes, label in ((speed, "tokens a second"), (memory, "peak memory, GiB")):
        axes.set(xlabel="length of a sequence", ylabel=label, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    speed.legend()
    save_figure(figure, path)


def _figure(bars: int) -> tuple[Figure, Axes]:
    figure = new_figure(9, 1.2 + 0.45 * bars)
    return figure, figure.add_subplot()


def _names(axes: Axes, arms: Sequence[Measured]) -> None:
    axes.set_yticks(range(len(arms)), [measured.arm for measured in arms])
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")

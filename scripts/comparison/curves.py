"""Curves of arms beside those of native runs, and their picture. Shown, not judged step by step."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats

from train.plots import new_figure, save_figure

CONFIDENCE = 0.99
LAST = 0.1  # share of the steps that the end of a curve is
NOTHING = 1e-4  # nats a token: a smaller difference is none


@dataclass(frozen=True)
class Curve:
    """Losses of a run, nats a token, by optimizer step."""

    train: dict[int, float]
    val: dict[int, float]

    @property
    def final(self) -> float:
        """Mean validation loss over the last tenth of the steps."""
        last = max(self.val)
        return statistics.fmean(v for step, v in self.val.items() if step >= (1 - LAST) * last)


@dataclass(frozen=True)
class Spread:
    """Where the end of one more native run lies, by those that there are.

    The interval of a prediction from `count` normal values: mean ± t s sqrt(1 + 1/n); at least
    NOTHING wide to either side.
    """

    count: int
    mean: float
    half: float  # of the interval

    def holds(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half


def spread_of(values: Sequence[float]) -> Spread:
    """From at least two ends."""
    n = len(values)
    t = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    half = t * statistics.stdev(values) * (1 + 1 / n) ** 0.5
    return Spread(n, statistics.fmean(values), max(half, NOTHING))


def read_curve(run_dir: Path) -> Curve:
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses: list[dict[int, float]] = [
        {int(row["step"]): float(row[name]) for row in rows if row[name]}
        for name in ("train_loss", "val_loss")
    ]
    return Curve(*losses)


def plot_curves(
    curves: Mapping[str, Curve], natives: Sequence[Curve], candidate: str, path: Path
) -> None:
    """Validation loss of the arms over that of all native runs; below, differences to native."""
    figure = new_figure(9, 7)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    native = curves["native"]
    steps = sorted(native.val)
    own = np.array([native.val[step] for step in steps])
    band = np.array([[run.val[step] for step in steps] for run in natives])
    label = f"{len(natives)} native runs, from weights perturbed by about the last bit"
    above.fill_between(steps, band.min(0), band.max(0), color="0.8", label=label)
    below.fill_between(steps, (band - own).min(0), (band - own).max(0), color="0.8")
    colors = {"reference": "tab:blue", "sdpa": "tab:purple", candidate: "tab:orange"}
    colors["native"] = "black"
    for name, curve in curves.items():
        at = sorted(curve.val)
        color = colors[name]
        label = "float64 softmax" if name == "reference" else name
        above.plot(at, [curve.val[s] for s in at], "o-", ms=3, lw=1, color=color, label=label)
        differences = [curve.val[s] - native.val[s] for s in at]
        below.plot(at, differences, "o-", ms=3, lw=1, color=color)
    above.set(ylabel="validation loss, nats a token", title=f"{candidate} against native")
    below.set(ylabel="difference to native", xlabel="optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    save_figure(figure, path)


def plot_distances(
    distances: Mapping[str, Sequence[float]],
    limits: Sequence[float],
    steps: Sequence[int],
    path: Path,
) -> None:
    """Distance of each arm's q and k gradients to the float64 softmax, state by state."""
    figure = new_figure(9, 4.5)
    axes = figure.add_subplot()
    for name, values in distances.items():
        axes.plot(steps, values, "o-", label=name)
    axes.plot(steps, limits, "k--", label="limit")
    axes.set(
        yscale="log",
        xlabel="state: optimizer steps of the reference arm",
        ylabel="|g - g_ref| / |g_ref|",
        title="Gradients of q and k from the same weights and batches, against a float64 softmax",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_figure(figure, path)

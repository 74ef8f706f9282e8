"""The picture of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sms_plugin.callbacks.whole_file import whole_file
from train.metrics import MetricsRow


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches.

    No pyplot: it keeps figures in a global list and picks a backend by the display.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """As a PNG, whole or not at all."""
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


def plot_losses(
    rows: Iterable[MetricsRow], *, unigram_entropy: float, title: str, path: Path
) -> None:
    """Draw training and validation loss (nats a token) against the optimizer step, as a PNG.

    Args:
        rows: of a run.
        unigram_entropy: nats a token of a model that knows single tokens only; drawn as a line.
        title: above the axes.
        path: the PNG.
    """
    rows = list(rows)
    train = [(row.step, row.train_loss) for row in rows if row.train_loss is not None]
    val = [(row.step, row.val_loss) for row in rows if row.val_loss is not None]
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    axes.axhline(unigram_entropy, color="0.6", linestyle="--", label="entropy of single tokens")
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=0.8, label="training")
    if val:
        axes.plot(*zip(*val, strict=True), "o-", color="tab:orange", label="validation")
    axes.set(title=title, xlabel="optimizer step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)

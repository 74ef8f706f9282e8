"""Runs of the trainer that take seconds, and what is read of them."""

from __future__ import annotations

import csv
from pathlib import Path

from train.config import (
    Config,
    load_config,
)

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "trainer=cpu",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "data.seq_len=24",
    "data.min_len=6",
    "data.batch_size=4",
    "data.val_batches=2",
]


def small_config(run_dir: Path, *overrides: str) -> Config:
    return load_config([*SMALL, f"run_dir={run_dir}", *overrides])


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def train_losses(run_dir: Path) -> list[float]:
    return [float(row["train_loss"]) for row in read_metrics(run_dir) if row["train_loss"]]

"""One arm of a comparison in a process of its own.

python -m scripts.comparison.worker train CONFIG.yaml ARM [--states 40,80]
python -m scripts.comparison.worker judge CONFIG.yaml ARM,ARM --states DIR --batches 0,1 --out F
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from scripts.comparison.arms import arm
from scripts.comparison.gradients import compare_states
from sms_plugin.callbacks.whole_file import whole_file
from train.config import Config, to_config
from train.data import load_corpus, token_data
from train.record import write_json
from train.run import train


class StepWitness(Callback):
    """What shows that two runs can be compared: weights on the way, batches, the first gradient.

    Args:
        folder: where weights go, a file for each of `states`.
        states: optimizer steps after which they are saved; 0: the initial ones.
    """

    def __init__(self, folder: Path, states: list[int]) -> None:
        self.folder, self.states = folder, set(states)
        self.first_gradient_norm: float | None = None
        self._batches = hashlib.sha256()

    @property
    def data_order_sha256(self) -> str:
        return self._batches.hexdigest()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        tensors = [batch] if isinstance(batch, Tensor) else [batch[name] for name in sorted(batch)]
        for tensor in tensors:
            self._batches.update(tensor.cpu().numpy().tobytes())

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.first_gradient_norm is None:  # Lightning clips after this hook
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.first_gradient_norm = float(torch.nn.utils.get_total_norm(gradients))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step in self.states:
            self.states.remove(trainer.global_step)
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / state_name(trainer.global_step)) as unfinished:
                torch.save(pl_module.model.state_dict(), unfinished)


def state_name(step: int) -> str:
    return f"step-{step:06d}.pt"


def load(path: Path) -> Config:
    node = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    return to_config(node, Config)  # type: ignore[arg-type]


def train_arm(cfg: Config, name: str, states: list[int]) -> None:
    """Train; the run folder gets arm.json, and states/ if there are some to save."""
    run_dir = Path(cfg.run_dir)
    witness = StepWitness(run_dir / "states", states)
    chosen = arm(name)
    summary = train(
        replace(cfg, softmax=replace(cfg.softmax, name=chosen.softmax)),
        choose=chosen.choose,
        callbacks=[witness],
    )
    values = {
        "arm": name,
        "data_order_sha256": witness.data_order_sha256,
        "first_gradient_norm": witness.first_gradient_norm,
        "summary": summary,
    }
    write_json(run_dir / "arm.json", values)


def judge_arms(cfg: Config, names: list[str], states: Path, batches: list[int], out: Path) -> None:
    """Losses and gradients of the arms from each state, as JSON."""
    corpus = load_corpus(cfg.data, cfg.seed)
    data = token_data(cfg, corpus, max(batches) + 1)
    files = sorted(states.glob("step-*.pt"))
    found = [(int(file.stem.removeprefix("step-")), file) for file in files]
    results = compare_states(cfg, [arm(name) for name in names], found, corpus, data, batches)
    write_json(out, {name: [asdict(state) for state in states] for name, states in results.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One arm of a comparison.")
    parser.add_argument("task", choices=["train", "judge"])
    parser.add_argument("config", type=Path)
    parser.add_argument("arms")
    parser.add_argument("--states", default="")
    parser.add_argument("--batches", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    cfg = load(options.config)
    if options.task == "train":
        train_arm(cfg, options.arms, [int(step) for step in options.states.split(",") if step])
    else:
        batches = [int(index) for index in options.batches.split(",")]
        judge_arms(cfg, options.arms.split(","), Path(options.states), batches, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

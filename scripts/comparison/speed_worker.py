"""Training steps of one arm, timed or profiled, in a process of its own.

python -m scripts.comparison.speed_worker time CONFIG.yaml
python -m scripts.comparison.speed_worker profile CONFIG.yaml
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

import sms_plugin
from scripts.comparison.worker import load
from sms_plugin.callbacks import ForwardBackwardTimer
from train.config import Config
from train.data import load_corpus, token_data
from train.module import LanguageModel
from train.profiling import ACTIVE_STEPS, KernelProfiler
from train.record import calls_since, check_calls, environment, write_json
from train.run import choose_softmax
from train.throughput import PeakMemory, run_device
from train.trainer import quieten


class Stopwatch(Callback):
    """Seconds to the end of the first step, and from the warm-up to the last step.

    Waits for the device three times in all.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.first_step_s = self.steady_s = 0.0
        self._steps = 0
        self._since = 0.0

    def on_train_start(self, *args: Any) -> None:
        self._since = self._now()

    def on_train_batch_end(self, *args: Any) -> None:
        self._steps += 1
        if self._steps == 1:
            self.first_step_s = self._now() - self._since
        if self._steps == self.warmup_steps:
            self._since = self._now()

    def on_train_end(self, *args: Any) -> None:
        self.steady_s = self._now() - self._since

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def run_steps(cfg: Config, callbacks: list[Callback]) -> dict[str, Any]:
    """Train without loggers, checkpoints and validation; what is known of it afterwards.

    Args:
        cfg: max_steps counts the warm-up.
        callbacks: for the Trainer.
    """
    quieten()
    device = run_device(cfg)
    corpus = load_corpus(cfg.data, cfg.seed)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    module = LanguageModel(cfg, corpus.vocab_size)
    choose_softmax(module, cfg.softmax.name)
    if cfg.compile:
        module.model.compile()
    before = sms_plugin.call_counts()
    batches = cfg.trainer.max_steps * cfg.trainer.accumulate_grad_batches
    data = token_data(cfg, corpus, batches)
    memory = PeakMemory(device)
    trainer = pl.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=1,
        precision=cfg.trainer.precision,  # type: ignore[arg-type]  # Lightning checks the word
        max_steps=cfg.trainer.max_steps,
        limit_val_batches=0,
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        callbacks=callbacks,
        default_root_dir=cfg.run_dir,
        barebones=True,
    )
    trainer.fit(module, data)
    calls = calls_since(before)
    check_calls(cfg.softmax.name, calls, device.type)
    return {
        "softmax": cfg.softmax.name.name,
        "compile": cfg.compile,
        "seq_len": cfg.data.seq_len,
        "batch_size": cfg.data.batch_size,
        "parameters": sum(weight.numel() for weight in module.parameters()),
        "call_counts": calls,
        "peak_memory_bytes": memory.bytes(),
        "environment": environment(device),
    }


def time_steps(cfg: Config) -> None:
    """speed.json and timing.csv in the run folder."""
    warmup = cfg.trainer.timer_warmup_steps
    timer = ForwardBackwardTimer(cfg.run_dir, warmup_steps=warmup)
    watch = Stopwatch(warmup)
    values = run_steps(cfg, [timer, watch])
    steps = cfg.trainer.max_steps - warmup
    tokens = cfg.data.batch_size * cfg.data.seq_len * cfg.trainer.accumulate_grad_batches
    write_json(
        Path(cfg.run_dir) / "speed.json",
        {
            **values,
            "first_step_s": watch.first_step_s,
            "tokens_per_s": steps * tokens / watch.steady_s,
            "median_ms": {name: spread.median for name, spread in timer.summary().items()},
        },
    )


def profile_steps(cfg: Config) -> None:
    """kernels.csv and trace.json.gz in the run folder."""
    skip = cfg.trainer.timer_warmup_steps
    cfg.trainer.max_steps = skip + ACTIVE_STEPS
    values = run_steps(cfg, [KernelProfiler(Path(cfg.run_dir), skip=skip)])
    write_json(Path(cfg.run_dir) / "profile.json", {**values, "steps": ACTIVE_STEPS})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Training steps of one arm.")
    parser.add_argument("task", choices=["time", "profile"])
    parser.add_argument("config", type=Path)
    options = parser.parse_args(arguments)
    cfg = load(options.config)
    (time_steps if options.task == "time" else profile_steps)(cfg)
    return 0


if __name__ == "__main__":
    sys.exit(main())

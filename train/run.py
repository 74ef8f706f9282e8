"""Train a small Transformer: `python train/run.py softmax=fused`; settings are in conf/."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# As a script, the path begins with train/; the packages lie in the checkout's root. It comes last,
# so that an installed sms_plugin is the one that runs.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import hydra
import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback

import sms_plugin
from sms_plugin.callbacks import ForwardBackwardTimer
from sms_plugin.patch import PatchReport
from train import adapter  # noqa: F401  teaches patch_attention the model's core
from train.checks import SettingError, check_settings
from train.config import CONF_DIR, Config, Profiler, Softmax, register_schema, to_config
from train.data import Corpus, load_corpus, token_data
from train.metrics import MetricsRecorder
from train.module import LanguageModel
from train.overrides import exit_on_mistakes
from train.profiling import KernelProfiler
from train.record import calls_since, check_calls, describe, environment, finish, write_settings
from train.resume import check_same_run, find_checkpoint, runs_left_out
from train.status import one_line_errors, run_status
from train.throughput import PeakMemory, flops_per_token, peak_flops
from train.trainer import build_trainer

Choose = Callable[[LanguageModel, Softmax], PatchReport | None]


def train(
    cfg: Config, *, choose: Choose | None = None, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Train as configured; the run folder gets metrics, timing, plot, checkpoints and a summary.

    Args:
        cfg: every setting; `train.config.load_config` makes one from overrides.
        choose: gives the new module its softmax, in place of `choose_softmax`.
        callbacks: more of them for the Trainer.

    Returns:
        What summary.json holds.

    Raises:
        ValueError: for settings that can't be trained with.
        RuntimeError: when the softmax that ran is not the one asked for, or a loss isn't finite.
    """
    with run_status(Path(cfg.run_dir)):
        check_settings(cfg)
        return _train(cfg, choose or choose_softmax, callbacks)


def _train(cfg: Config, choose: Choose, more_callbacks: Sequence[Callback]) -> dict[str, Any]:
    started = time.perf_counter()
    checkpoint = find_checkpoint(cfg)
    if checkpoint is not None:
        notes = check_same_run(cfg, checkpoint)
        if cfg.ckpt_path == "last":
            notes += runs_left_out(checkpoint)
        print("\n".join([f"going on from {checkpoint}", *notes]))
    run_dir = Path(cfg.run_dir)

    micro_batches = cfg.trainer.accumulate_grad_batches * cfg.trainer.devices
    recorder = MetricsRecorder(
        run_dir / "metrics.csv",
        max_steps=cfg.trainer.max_steps,
        tokens_per_step=micro_batches * cfg.data.batch_size * cfg.data.seq_len,
    )
    timer = ForwardBackwardTimer(run_dir, warmup_steps=cfg.trainer.timer_warmup_steps)
    callbacks: list[Callback] = [timer, *more_callbacks]
    if cfg.profiler is Profiler.torch:
        callbacks.append(KernelProfiler(run_dir, skip=cfg.trainer.timer_warmup_steps))
    trainer = build_trainer(cfg, run_dir, recorder, callbacks)
    device = trainer.strategy.root_device
    write_settings(cfg, device)

    corpus = load_corpus(cfg.data, cfg.seed)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    module = LanguageModel(cfg, corpus.vocab_size)
    weights_sha256 = module.weights_sha256()
    report = choose(module, cfg.softmax.name)
    if cfg.compile:
        module.model.compile()  # in place: checkpoints are those of the model as it is
    calls_before = sms_plugin.call_counts()
    parameters = sum(weight.numel() for weight in module.parameters())
    flops = flops_per_token(module.model, cfg.data.seq_len)
    most_flops = peak_flops(device, cfg.trainer.precision)
    if most_flops is not None:
        recorder.tokens_per_s_at_peak = most_flops * cfg.trainer.devices / flops
    data = token_data(cfg, corpus, cfg.trainer.max_steps * micro_batches)
    print_start(cfg, parameters, corpus, trainer)
    memory = PeakMemory(device)
    trainer.fit(module, data, ckpt_path=checkpoint)
    if cfg.trainer.max_steps % cfg.trainer.val_every:  # the last weights were not validated
        trainer.validate(module, data, verbose=False)

    calls = calls_since(calls_before)
    check_calls(cfg.softmax.name, calls, device.type)
    val_loss = recorder.rows[cfg.trainer.max_steps].val_loss
    assert val_loss is not None
    tokens_per_s = cfg.trainer.max_steps * recorder.tokens_per_step / recorder.train_seconds
    at_peak = recorder.tokens_per_s_at_peak
    summary = {
        "softmax": cfg.softmax.name.name,
        "compile": cfg.compile,
        "profiler": cfg.profiler.name,
        "patched": asdict(report) if report else None,
        "call_counts": calls,
        "seed": cfg.seed,
        "steps": cfg.trainer.max_steps,
        "first_train_loss": recorder.rows[0].train_loss,
        "val_loss": val_loss,
        "unigram_entropy": corpus.unigram_entropy,
        "val_loss_over_unigram_entropy": val_loss / corpus.unigram_entropy,
        "train_seconds": recorder.train_seconds,
        "total_seconds": time.perf_counter() - started,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops,
        "model_flops_utilization": None if at_peak is None else tokens_per_s / at_peak,
        "peak_memory_bytes": memory.bytes(),
        "step_times": {name: vars(spread) for name, spread in timer.summary().items()},
        "parameters": parameters,
        "initial_weights_sha256": weights_sha256,
        "data_sha256": corpus.sha256,
        "data": describe(corpus),
        "environment": environment(device),
    }
    if trainer.is_global_zero:
        finish(summary, recorder, run_dir)
    return summary


def choose_softmax(module: LanguageModel, softmax: Softmax) -> PatchReport | None:
    """Patch the model to the softmax asked for; `native` is the model as it is written."""
    if softmax is Softmax.native:
        print("softmax=native: the chain of train/models as it is written, nothing patched")
        return None
    if softmax is Softmax.fused:
        # Now, so that a library that can't be had ends the run here, and no step waits for it.
        from sms_plugin import extension

        extension.load()
    report = sms_plugin.patch_attention(module, softmax=softmax.name)
    print(report)
    return report


def print_start(cfg: Config, parameters: int, corpus: Corpus, trainer: pl.Trainer) -> None:
    if not trainer.is_global_zero:
        return
    print(
        f"model: {parameters:,} parameters on {trainer.strategy.root_device}\n"
        f"data: {describe(corpus)}\n"
        f"      sha256 {corpus.sha256}\n"
        f"entropy of single tokens: {corpus.unigram_entropy:.3f} nats\n"
        f"run folder: {cfg.run_dir}"
    )


def from_where_typed(cfg: Config) -> Config:
    """Relative paths count from where the command was typed, also with hydra.job.chdir=true."""
    if cfg.data.path is not None:
        cfg.data.path = to_absolute_path(str(Path(cfg.data.path).expanduser()))
    if cfg.ckpt_path not in (None, "last"):
        cfg.ckpt_path = to_absolute_path(str(Path(cfg.ckpt_path).expanduser()))
    return cfg


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def main(node: DictConfig) -> None:
    cfg = from_where_typed(to_config(node, Config))
    with one_line_errors(Path(cfg.run_dir)):
        refuse_sweeps_of_processes(cfg)
        train(cfg)


def refuse_sweeps_of_processes(cfg: Config) -> None:
    """Lightning starts the whole command again for each process, and each would sweep."""
    strategy = cfg.trainer.strategy
    if HydraConfig.get().mode is RunMode.MULTIRUN and strategy.startswith(("ddp", "fsdp")):
        raise SettingError(
            f"-m and trainer.strategy={strategy} don't go together: every process would sweep; "
            "start the runs one after the other"
        )


if __name__ == "__main__":
    exit_on_mistakes(sys.argv[1:])
    register_schema()
    main()

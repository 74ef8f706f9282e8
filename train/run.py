"""Train a small Transformer: `python train/run.py softmax=fused`; settings are in conf/."""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# As a script, the path begins with train/; the packages lie in the checkout's root. It comes last,
# so that an installed sms_plugin is the one that runs.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import hydra
import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_only

import sms_plugin
from sms_plugin.callbacks import ForwardBackwardTimer
from sms_plugin.callbacks.whole_file import whole_file
from sms_plugin.patch import PatchReport
from train import adapter  # noqa: F401  teaches patch_attention the model's core
from train.config import CONF_DIR, Config, ModelKind, Softmax, register_schema, to_config
from train.data import Corpus, TokenData, load_corpus
from train.metrics import LossBar, MetricsRecorder
from train.module import LanguageModel
from train.overrides import exit_on_mistakes
from train.plots import plot_losses
from train.resume import check_same_run, find_checkpoint
from train.status import run_status


def train(cfg: Config) -> dict[str, Any]:
    """Train as configured; the run folder gets metrics, timing, plot, checkpoints and a summary.

    Args:
        cfg: every setting; `train.config.load_config` makes one from overrides.

    Returns:
        What summary.json holds.

    Raises:
        ValueError: for settings that can't be trained with.
        RuntimeError: when the softmax that ran is not the one asked for, or a loss isn't finite.
    """
    if cfg.trainer.max_steps < 1:
        raise ValueError(f"trainer.max_steps must be at least 1, got {cfg.trainer.max_steps}")
    with run_status(Path(cfg.run_dir)):
        return _train(cfg)


def _train(cfg: Config) -> dict[str, Any]:
    started = time.perf_counter()
    checkpoint = find_checkpoint(cfg)
    if checkpoint is not None:
        check_same_run(cfg, checkpoint)
        print(f"going on from {checkpoint}")
    run_dir = Path(cfg.run_dir)
    write_config(cfg)

    corpus = load_corpus(cfg.data, cfg.seed)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    module = LanguageModel(cfg, corpus.vocab_size)
    weights_sha256 = module.weights_sha256()
    report = choose_softmax(module, cfg.softmax.name)
    calls_before = sms_plugin.call_counts()

    micro_batches = cfg.trainer.accumulate_grad_batches * cfg.trainer.devices
    recorder = MetricsRecorder(
        run_dir / "metrics.csv",
        max_steps=cfg.trainer.max_steps,
        tokens_per_step=micro_batches * cfg.data.batch_size * cfg.data.seq_len,
    )
    timer = ForwardBackwardTimer(run_dir, warmup_steps=cfg.trainer.timer_warmup_steps)
    trainer = build_trainer(cfg, run_dir, recorder, timer)
    data = TokenData(
        corpus,
        cfg.data,
        seed=cfg.seed,
        train_batches=cfg.trainer.max_steps * micro_batches,
        is_masked=cfg.model.kind is ModelKind.encoder,
    )
    print_start(cfg, module, corpus, trainer)
    trainer.fit(module, data, ckpt_path=checkpoint)
    if cfg.trainer.max_steps % cfg.trainer.val_every:  # the last weights were not validated
        trainer.validate(module, data, verbose=False)

    calls = calls_since(calls_before)
    check_calls(cfg.softmax.name, calls, trainer.strategy.root_device.type)
    val_loss = recorder.rows[cfg.trainer.max_steps].val_loss
    assert val_loss is not None
    summary = {
        "softmax": cfg.softmax.name.name,
        "patched": json.loads(report.to_json()) if report else None,
        "call_counts": calls,
        "seed": cfg.seed,
        "steps": cfg.trainer.max_steps,
        "first_train_loss": recorder.rows[0].train_loss,
        "val_loss": val_loss,
        "unigram_entropy": corpus.unigram_entropy,
        "val_loss_over_unigram_entropy": val_loss / corpus.unigram_entropy,
        "train_seconds": recorder.train_seconds,
        "total_seconds": time.perf_counter() - started,
        "tokens_per_s": cfg.trainer.max_steps * recorder.tokens_per_step / recorder.train_seconds,
        "step_times": {name: vars(spread) for name, spread in timer.summary().items()},
        "parameters": sum(weight.numel() for weight in module.parameters()),
        "initial_weights_sha256": weights_sha256,
        "data_sha256": corpus.sha256,
        "data": describe(corpus),
        "environment": environment(module.device),
    }
    if trainer.is_global_zero:
        finish(summary, recorder, run_dir)
    return summary


@rank_zero_only
def write_config(cfg: Config) -> None:
    with whole_file(Path(cfg.run_dir) / "config.yaml") as unfinished:
        unfinished.write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))


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


def build_trainer(
    cfg: Config, run_dir: Path, recorder: MetricsRecorder, timer: ForwardBackwardTimer
) -> pl.Trainer:
    """A Trainer for max_steps optimizer steps with a validation every val_every of them."""
    if cfg.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise RuntimeError(
            f"trainer.accelerator=gpu, but torch {torch.__version__} sees no GPU; use trainer=cpu, "
            "or trainer=default, which takes a GPU if there is one"
        )
    # The loaders only slice a tensor in memory: workers would cost more than they save.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning's, of newer torch
    # TokenData goes on where the checkpoint was, in the folder that it may lie in.
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty.*")
    # What Lightning would say of the device is in our own lines.
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)
    is_terminal = sys.stdout.isatty()
    # Checkpoint names have no '=', for a command line of Hydra takes none in a value.
    checkpoint = ModelCheckpoint(
        run_dir / "checkpoints",
        filename="best",
        monitor="val_loss",
        save_last=True,
        auto_insert_metric_name=False,
        enable_version_counter=False,
    )
    callbacks: list[Callback] = [recorder, timer, checkpoint]
    if is_terminal:
        callbacks.append(LossBar(recorder))
    return pl.Trainer(
        accelerator=cfg.trainer.accelerator,
        strategy=cfg.trainer.strategy,
        devices=cfg.trainer.devices,
        precision=cfg.trainer.precision,  # type: ignore[arg-type]  # Lightning checks the word
        max_steps=cfg.trainer.max_steps,
        val_check_interval=cfg.trainer.val_every * cfg.trainer.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        callbacks=callbacks,
        default_root_dir=run_dir,
        logger=False,
        enable_progress_bar=is_terminal,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # ours knows its rank
    )


def calls_since(before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The operator's calls by name and device, those `before` left out."""
    return {
        op: {device: n - before[op][device] for device, n in devices.items()}
        for op, devices in sms_plugin.call_counts().items()
    }


def check_calls(softmax: Softmax, calls: dict[str, dict[str, int]], device: str) -> None:
    """Compare the operator's own counters with the softmax that was configured.

    Raises:
        RuntimeError: when softmax=fused did not call it on `device` in both directions, or when
            another softmax called it.
    """
    if softmax is Softmax.fused and not all(devices[device] for devices in calls.values()):
        raise RuntimeError(
            f"softmax=fused, but the fused operator was not called on {device} forward and "
            f"backward: {calls}; this run did not train with it, so don't use its results"
        )
    if softmax is not Softmax.fused and any(sum(devices.values()) for devices in calls.values()):
        raise RuntimeError(
            f"softmax={softmax.name}, but the fused operator was called: {calls}; this run is no "
            "comparison to it"
        )


def environment(device: torch.device) -> dict[str, str | int]:
    """Versions and the machine."""
    is_gpu = device.type == "cuda"
    return {
        "sms_plugin": sms_plugin.__version__,
        "torch": torch.__version__,
        "pytorch_lightning": pl.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def print_start(cfg: Config, module: LanguageModel, corpus: Corpus, trainer: pl.Trainer) -> None:
    if not trainer.is_global_zero:
        return
    parameters = sum(weight.numel() for weight in module.parameters())
    print(
        f"model: {parameters:,} parameters on {trainer.strategy.root_device}\n"
        f"data: {describe(corpus)}\n"
        f"      sha256 {corpus.sha256}\n"
        f"entropy of single tokens: {corpus.unigram_entropy:.3f} nats\n"
        f"run folder: {cfg.run_dir}"
    )


def describe(corpus: Corpus) -> str:
    if not corpus.files:
        return corpus.origin
    return (
        f"{corpus.files} files of {corpus.origin}, {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.val):,} to validate, {corpus.vocab_size} kinds"
    )


def finish(summary: dict[str, Any], recorder: MetricsRecorder, run_dir: Path) -> None:
    """Write the plot and the summary, and print what matters of it."""
    plot_losses(
        (recorder.rows[step] for step in sorted(recorder.rows)),
        unigram_entropy=summary["unigram_entropy"],
        title=f"softmax={summary['softmax']}, seed {summary['seed']}",
        path=run_dir / "losses.png",
    )
    with whole_file(run_dir / "summary.json") as unfinished:
        unfinished.write_text(json.dumps(summary, indent=2) + "\n")
    counts = ", ".join(
        f"{op} {n} on {device}"
        for op, devices in summary["call_counts"].items()
        for device, n in devices.items()
        if n
    )
    print(
        f"calls of the fused operator: {counts or 'none'}\n"
        f"validation loss {summary['val_loss']:.4f} = "
        f"{summary['val_loss_over_unigram_entropy']:.2f} x the entropy of single tokens "
        f"({summary['unigram_entropy']:.4f})\n"
        f"{summary['train_seconds']:.1f} s of training, {summary['tokens_per_s']:,.0f} tokens/s\n"
        f"run folder: {run_dir}"
    )


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def main(node: DictConfig) -> None:
    cfg = to_config(node)
    if HydraConfig.get().mode is RunMode.MULTIRUN and cfg.trainer.strategy.startswith("ddp"):
        raise ValueError(
            "-m and trainer=ddp don't go together: Lightning starts the whole command again for "
            "each process, and each would sweep; start the runs one after the other"
        )
    train(cfg)


if __name__ == "__main__":
    exit_on_mistakes(sys.argv[1:])
    register_schema()
    main()

"""The Lightning Trainer of a run."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.strategies import FSDPStrategy, Strategy

from train.config import Config, LoggerName
from train.interrupt import StopBetweenSteps
from train.metrics import LossBar, MetricsRecorder
from train.models.transformer import Block
from train.run_folder import LAST


def build_trainer(
    cfg: Config, run_dir: Path, recorder: MetricsRecorder, callbacks: list[Callback]
) -> pl.Trainer:
    """A Trainer for max_steps optimizer steps with a validation every val_every of them.

    Args:
        cfg: the run's.
        run_dir: where checkpoints and logs go.
        recorder: what the progress bar shows.
        callbacks: beside the recorder and the checkpoints.

    Raises:
        RuntimeError: for a device that isn't there.
    """
    _check_devices(cfg)
    quieten()
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
    bar = [LossBar(recorder)] if is_terminal else []
    return pl.Trainer(
        accelerator=cfg.trainer.accelerator,
        strategy=_strategy(cfg.trainer.strategy),
        devices=cfg.trainer.devices,
        precision=cfg.trainer.precision,  # type: ignore[arg-type]  # Lightning checks the word
        max_steps=cfg.trainer.max_steps,
        val_check_interval=cfg.trainer.val_every * cfg.trainer.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        callbacks=[
            recorder,
            *callbacks,
            StopBetweenSteps(recorder, run_dir / LAST),
            checkpoint,
            *bar,
        ],
        default_root_dir=run_dir,
        logger=_loggers(cfg, run_dir),
        enable_progress_bar=is_terminal,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # ours knows its rank
    )


def _check_devices(cfg: Config) -> None:
    needs_gpu = cfg.trainer.accelerator == "gpu" or cfg.trainer.strategy.startswith("fsdp")
    if needs_gpu and not torch.cuda.is_available():
        asked = "strategy=fsdp" if cfg.trainer.strategy.startswith("fsdp") else "accelerator=gpu"
        raise RuntimeError(
            f"trainer.{asked}, but torch {torch.__version__} sees no GPU; use trainer=cpu, or "
            "trainer=default, which takes a GPU if there is one"
        )


def _strategy(name: str) -> str | Strategy:
    if name != "fsdp":
        return name
    # A unit for each block; whole checkpoints, so that any strategy can go on from them.
    return FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full")


def _loggers(cfg: Config, run_dir: Path) -> list[Logger]:
    """Those asked for; metrics.csv is there in any case."""
    makers = {
        LoggerName.csv: lambda: CSVLogger(run_dir, name="csv", version=""),
        LoggerName.tensorboard: lambda: TensorBoardLogger(run_dir, name="tensorboard", version=""),
    }
    return [makers[name]() for name in dict.fromkeys(cfg.loggers)]


def quieten() -> None:
    """What Lightning says of things that are as they should be."""
    # The loaders only slice a tensor in memory: workers would cost more than they save.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning's, of newer torch
    # TokenData goes on where the checkpoint was, in the folder that it may lie in.
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    # Losses go to loggers at validations, whatever that interval.
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty.*")
    # What Lightning would say of the device is in our own lines.
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)

"""Settings that can't be trained with, said before anything is read or built."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from train.config import Config, Softmax
from train.throughput import run_device

STRATEGIES = ("auto", "ddp", "fsdp")


class SettingError(ValueError):
    """A setting breaks its rule."""


def check_settings(cfg: Config) -> None:
    """Raise SettingError for the first setting that breaks its rule, with rule and value."""
    check_at_least(_bounds(cfg))
    for name, share in (
        ("model.dropout", cfg.model.dropout),
        ("optimizer.beta1", cfg.optimizer.beta1),
        ("optimizer.beta2", cfg.optimizer.beta2),
    ):
        if not 0 <= share < 1:
            raise SettingError(f"{name} must be at least 0 and below 1, got {share}")
    if not 0 < cfg.model.learning_rate < float("inf"):
        raise SettingError(
            f"model.learning_rate must be a number above 0, got {cfg.model.learning_rate}"
        )
    if not cfg.trainer.strategy.startswith(STRATEGIES):
        raise SettingError(
            f"trainer.strategy must be one of {', '.join(STRATEGIES)}, or one of Lightning's that "
            f"begins so, got {cfg.trainer.strategy}"
        )
    _check_memory(cfg)


def check_at_least(bounds: Iterable[tuple[str, float, float]]) -> None:
    """Raise SettingError for the first (name, value, least) whose value is too small."""
    for name, value, least in bounds:
        if not value >= least:  # NaN isn't
            raise SettingError(f"{name} must be at least {least}, got {value}")


def _bounds(cfg: Config) -> tuple[tuple[str, float, float], ...]:
    return (
        ("model.n_layer", cfg.model.n_layer, 1),
        ("model.n_head", cfg.model.n_head, 1),
        ("model.n_embd", cfg.model.n_embd, 1),
        ("data.seq_len", cfg.data.seq_len, 1),
        ("data.batch_size", cfg.data.batch_size, 1),
        ("data.val_batches", cfg.data.val_batches, 1),
        ("data.num_workers", cfg.data.num_workers, 0),
        ("optimizer.warmup_steps", cfg.optimizer.warmup_steps, 0),
        ("optimizer.weight_decay", cfg.optimizer.weight_decay, 0),
        ("optimizer.final_lr_ratio", cfg.optimizer.final_lr_ratio, 0),
        ("trainer.max_steps", cfg.trainer.max_steps, 1),
        ("trainer.val_every", cfg.trainer.val_every, 1),
        ("trainer.devices", cfg.trainer.devices, 1),
        ("trainer.accumulate_grad_batches", cfg.trainer.accumulate_grad_batches, 1),
        ("trainer.gradient_clip_val", cfg.trainer.gradient_clip_val, 0),
        ("trainer.timer_warmup_steps", cfg.trainer.timer_warmup_steps, 0),
    )


def _check_memory(cfg: Config) -> None:
    """Scores of one layer that fill the memory by themselves.

    They would end in the middle of the first step, on a CPU by the system's killing the process.
    """
    if cfg.softmax.name is Softmax.sdpa:
        return  # no scores are written
    device = run_device(cfg)
    memory = _memory_bytes()
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    item = 4 if cfg.trainer.precision.startswith("32") else 2
    needed = cfg.data.batch_size * cfg.model.n_head * cfg.data.seq_len**2 * item
    if memory is not None and needed > memory:
        raise SettingError(
            f"data.seq_len={cfg.data.seq_len} with data.batch_size={cfg.data.batch_size}: the "
            f"attention scores of one layer take {needed / 2**30:,.0f} GiB, the device has "
            f"{memory / 2**30:,.0f}; use shorter or fewer examples (with "
            "trainer.accumulate_grad_batches), or softmax=sdpa, which never writes them"
        )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None  # a system that doesn't say

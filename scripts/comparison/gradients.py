"""Gradients of all arms from the same weights and batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

import sms_plugin
from scripts.comparison.arms import Arm
from scripts.comparison.judge import ALL, QK, StateResult, Sums
from train.config import Config
from train.data import Corpus, TokenData
from train.module import LanguageModel
from train.throughput import run_device

REFERENCE = "reference"


def compare_states(
    cfg: Config,
    arms: Sequence[Arm],
    states: Sequence[tuple[int, Path]],
    corpus: Corpus,
    data: TokenData,
    batches: Sequence[int],
) -> dict[str, list[StateResult]]:
    """Losses and gradients of each arm from each state, on the same batches.

    Args:
        cfg: of the runs.
        arms: the reference among them.
        states: optimizer steps and a file with the weights.
        corpus: that was trained on.
        data: over it.
        batches: their indices.

    Returns:
        Results by arm, state by state.
    """
    device = run_device(cfg)
    module = LanguageModel(cfg, corpus.vocab_size)
    if cfg.trainer.precision == "bf16-true":
        module = module.to(torch.bfloat16)
    modules = {}
    for arm in sorted(arms, key=lambda arm: arm.name != REFERENCE):  # it comes first
        own = modules[arm.name] = deepcopy(module).to(device)
        arm.choose(own, arm.softmax)
    source = data.train_batches()
    results: dict[str, list[StateResult]] = {name: [] for name in modules}
    for index_of_state, (step, path) in enumerate(states, start=1):
        print(f"state {index_of_state} of {len(states)}")
        weights = torch.load(path, map_location=device, weights_only=True)
        found: dict[str, dict[str, Any]] = {}
        for own in modules.values():
            own.model.load_state_dict(weights)
        for index in batches:
            batch = to_device(source[index], device)
            references: dict[str, Tensor] = {}
            for name, own in modules.items():
                entry = found.setdefault(
                    name,
                    {"losses": [], "norms": [], "sums": {ALL: Sums(), QK: Sums()}, "calls": (0, 0)},
                )
                before = calls_of(device)
                loss, gradients = gradients_of(own, batch, cfg, index)
                entry["calls"] = tuple(
                    n + now - then
                    for n, now, then in zip(entry["calls"], calls_of(device), before, strict=True)
                )
                if name == REFERENCE:
                    references = gradients
                norm = add_up(entry["sums"], gradients, references, own)
                entry["losses"].append(loss)
                entry["norms"].append(norm)
        for name, entry in found.items():
            results[name].append(
                StateResult(
                    step,
                    tuple(entry["losses"]),
                    tuple(entry["norms"]),
                    entry["sums"],
                    entry["calls"],
                )
            )
    return results


def gradients_of(
    module: LanguageModel, batch: Any, cfg: Config, seed: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch, and the gradient of each parameter by name."""
    module.zero_grad(set_to_none=True)
    pl.seed_everything(seed, verbose=False)  # the same dropout in all arms
    with autocast(cfg, module.device):
        loss = module.loss(batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def autocast(cfg: Config, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if cfg.trainer.precision == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def add_up(
    sums: dict[str, Sums],
    gradients: dict[str, Tensor],
    references: dict[str, Tensor],
    module: LanguageModel,
) -> float:
    """Add one batch to the sums; the norm of its gradient."""
    square = 0.0
    for name, gradient in gradients.items():
        g, r = gradient.double(), references[name].double()
        square += float(g.square().sum())
        _add(sums[ALL], g, r)
        for rows in query_and_key_rows(module, name):
            _add(sums[QK], g[rows], r[rows])
    return square**0.5


def _add(sums: Sums, g: Tensor, r: Tensor) -> None:
    sums.difference += float((g - r).square().sum())
    sums.reference += float(r.square().sum())
    sums.product += float((g * r).sum())


def query_and_key_rows(module: LanguageModel, name: str) -> Iterator[slice]:
    """Which rows of a parameter make queries and keys: two thirds of a joint projection."""
    if ".qkv." in name:
        rows = module.get_parameter(name).shape[0]
        yield slice(0, rows * 2 // 3)


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def calls_of(device: torch.device) -> tuple[int, int]:
    counts = sms_plugin.call_counts()
    return (
        counts["scaled_mask_softmax"][device.type],
        counts["scaled_mask_softmax_backward"][device.type],
    )

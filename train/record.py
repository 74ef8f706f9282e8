"""What a run folder says of its run: settings, environment, calls, summary."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.utilities import rank_zero_only

import sms_plugin
from sms_plugin.callbacks.whole_file import whole_file
from train.config import Config, Softmax
from train.data import Corpus
from train.metrics import MetricsRecorder
from train.plots import plot_losses

CHECKOUT = Path(__file__).resolve().parents[1]
Calls = dict[str, dict[str, int]]  # by operator and device


@rank_zero_only
def write_settings(cfg: Config, device: torch.device) -> None:
    """config.yaml and environment.json, before anything can fail."""
    run_dir = Path(cfg.run_dir)
    with whole_file(run_dir / "config.yaml") as unfinished:
        unfinished.write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    values = {**environment(device), "command": shlex.join(sys.argv)}
    write_json(run_dir / "environment.json", values)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(values, indent=2) + "\n")


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Versions and the machine."""
    is_gpu = device.type == "cuda"
    return {
        "sms_plugin": sms_plugin.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "pytorch_lightning": pl.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """Of this checkout, with a + if files differ from it; None without git."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def calls_since(before: Calls) -> Calls:
    """The operator's calls by name and device, those `before` left out."""
    return {
        op: {device: n - before[op][device] for device, n in devices.items()}
        for op, devices in sms_plugin.call_counts().items()
    }


def check_calls(softmax: Softmax, calls: Calls, device: str) -> None:
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
    write_json(run_dir / "summary.json", summary)
    counts = ", ".join(
        f"{op} {n} on {device}"
        for op, devices in summary["call_counts"].items()
        for device, n in devices.items()
        if n
    )
    mfu = summary["model_flops_utilization"]
    print(
        f"calls of the fused operator: {counts or 'none'}\n"
        f"validation loss {summary['val_loss']:.4f} = "
        f"{summary['val_loss_over_unigram_entropy']:.2f} x the entropy of single tokens "
        f"({summary['unigram_entropy']:.4f})\n"
        f"{summary['train_seconds']:.1f} s of training, {summary['tokens_per_s']:,.0f} tokens/s"
        + ("" if mfu is None else f", {mfu:.1%} of the device's peak")
        + f", {summary['peak_memory_bytes'] / 2**30:.2f} GiB at the peak\n"
        f"run folder: {run_dir}"
    )

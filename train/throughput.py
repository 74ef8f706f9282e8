"""How much of a device a training uses: floating-point work, and memory."""

from __future__ import annotations

import resource
import sys

import torch
from lightning_fabric.utilities.throughput import get_available_flops

from train.config import Config
from train.models import Transformer


def flops_per_token(model: Transformer, seq_len: int) -> float:
    """Floating-point operations that training on one token takes, forward and backward.

    `6 N + 12 L C T`: N weights that are multiplied with, of which the tied embedding is the output
    layer; L layers of width C over T positions, counted whole also where half are masked.
    Recomputation isn't counted. Source: PaLM, appendix B, https://arxiv.org/abs/2204.02311.
    """
    weights = sum(weight.numel() for weight in model.parameters())
    if model.positions is not None:  # it is looked up, not multiplied with
        weights -= model.positions.weight.numel()
    return 6.0 * weights + 12.0 * len(model.blocks) * model.tokens.embedding_dim * seq_len


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations a second that a GPU has at most in `precision`; None: a CPU, or not known."""
    if device.type != "cuda":
        return None
    dtype = torch.float32
    if precision.startswith("bf16"):
        dtype = torch.bfloat16
    elif precision.startswith("16"):
        dtype = torch.float16
    return get_available_flops(device, dtype)


class PeakMemory:
    """Bytes at the peak since it was made: of the device's allocator, or of the whole process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resident if sys.platform == "darwin" else resident * 1024


def run_device(cfg: Config) -> torch.device:
    """Where a run with these settings computes: the first GPU if it may and there is one."""
    use_gpu = cfg.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.device("cuda", 0) if use_gpu else torch.device("cpu")

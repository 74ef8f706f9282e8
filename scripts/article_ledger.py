"""The article's ledger: what the chain and the fused operator cost at [8, 32, 1024, 1024] float32.

    python scripts/article_ledger.py --out DIR [--no-ncu]

Kernels launched (torch's profiler), bytes that really left and reached the memory (ncu's counters),
time and peak memory, forward and backward. The chain is the article's: scores / sqrt(d), + mask,
softmax; its mask is an additive causal one, [1, 1, 1024, 1024]. Writes ledger.csv and ledger.md.

ncu runs this script again, around each kernel; without it, or where the driver keeps the counters
from users, the columns of the bytes stay empty and a line says why.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import sms_plugin  # noqa: E402
from scripts.benchmarks.ledger_table import Entry, as_markdown, write_whole  # noqa: E402
from scripts.benchmarks.ncu_counters import METRICS, CountersUnavailable, read_counters  # noqa: E402
from scripts.benchmarks.record import commit, device_name, write_rows  # noqa: E402
from scripts.benchmarks.timing import time_cuda  # noqa: E402

SHAPE = (8, 32, 1024, 1024)  # (B, H, T, T)
D = 64
DIRECTIONS = ("forward", "backward")
NCU_SECONDS = 240
MARKER = "spin_kernel"  # of torch.cuda._sleep, which separates what ncu counts

Softmax = Callable[[Tensor, Tensor], Tensor]


def chain(scores: Tensor, mask: Tensor) -> Tensor:
    """The article's four lines, without the matrix product."""
    scores = scores / math.sqrt(D)
    scores = scores + mask
    return torch.softmax(scores, dim=-1)


def fused(scores: Tensor, mask: Tensor) -> Tensor:
    return sms_plugin.scaled_mask_softmax(scores, mask, D**-0.5)


def fused_causal(scores: Tensor, mask: Tensor) -> Tensor:
    """The same result without the mask's tensor: half of the scores needn't be read."""
    return sms_plugin.scaled_mask_softmax(scores, scale=D**-0.5, is_causal=True)


def softmaxes() -> dict[str, Softmax]:
    return {
        "chain": chain,
        "chain, compiled": torch.compile(chain),
        "fused": fused,
        "fused, is_causal": fused_causal,
    }


def make_operands(shape: Sequence[int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, mask, grad_probs)"""
    scores = torch.randn(tuple(shape), device=device, requires_grad=True)
    T = shape[-1]
    above = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    return (
        scores,
        sms_plugin.additive_mask(above, torch.float32)[None, None],
        torch.randn_like(scores),
    )


def ideal_bytes(system: str, direction: str) -> int:
    """What has to be moved, each operand once; causal: half of what is read."""
    scores, mask = math.prod(SHAPE) * 4, SHAPE[-1] ** 2 * 4
    if system == "fused, is_causal":
        return scores * 3 // 2 if direction == "forward" else scores * 2
    return 2 * scores + mask if direction == "forward" else 3 * scores


def count_kernels(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call launches."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or ())


def measure(system: str, softmax: Softmax) -> list[Entry]:
    """Forward and backward, without ncu's columns."""
    scores, mask, grad = make_operands(SHAPE, "cuda")
    softmax(scores, mask)  # libraries and compilers
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    entries = []
    torch.cuda.reset_peak_memory_stats()
    probs = softmax(scores, mask)
    torch.cuda.synchronize()
    peaks = [torch.cuda.max_memory_allocated() - before]
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(probs, scores, grad)
    torch.cuda.synchronize()
    peaks.append(torch.cuda.max_memory_allocated() - before)
    del probs

    torch.compiler.reset()
    with functorch_config.patch(donated_buffer=False):  # one forward, many backwards
        probs = softmax(scores, mask)
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: softmax(scores, mask),
            "backward": lambda: torch.autograd.grad(probs, scores, grad, retain_graph=True),
        }
        for (direction, call), peak in zip(calls.items(), peaks, strict=True):
            entries.append(
                Entry(
                    system=system,
                    direction=direction,
                    kernels=count_kernels(call),
                    ideal_bytes=ideal_bytes(system, direction),
                    ms=time_cuda([call, call]),  # 1 GiB a tensor: cold without further ones
                    peak_gib=peak / 2**30,
                )
            )
    return entries


def run_for_ncu() -> None:
    """What ncu watches: marker, forward, marker, backward of each system, all warmed up."""
    scores, mask, grad = make_operands(SHAPE, "cuda")
    arms = softmaxes()
    for softmax in arms.values():
        torch.autograd.grad(softmax(scores, mask), scores, grad)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for softmax in arms.values():
        torch.cuda._sleep(1000)
        probs = softmax(scores, mask)
        torch.cuda._sleep(1000)
        torch.autograd.grad(probs, scores, grad)
        del probs
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def find_ncu() -> str:
    """Raises CountersUnavailable where there is none."""
    found = shutil.which("ncu")
    if found is None:
        places = sorted(Path("/").glob("usr/local/cuda*/bin/ncu"))
        places += sorted(Path("/").glob("opt/nvidia/nsight-compute/*/ncu"))
        found = str(places[-1]) if places else None
    if found is None:
        raise CountersUnavailable(
            "ncu isn't on the PATH, nor in /usr/local/cuda*/bin: install Nsight Compute"
        )
    return found


def add_counters(entries: Sequence[Entry]) -> None:
    """Fill in the bytes of the entries, which are in the order of `run_for_ncu`."""
    command = [find_ncu(), "--clock-control", "none", "--cache-control", "none"]
    command += ["--target-processes", "all", "--profile-from-start", "off"]
    command += ["--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    command += [sys.executable, str(Path(__file__).resolve()), "--watched"]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes to follow
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=NCU_SECONDS,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise CountersUnavailable(f"ncu didn't end within {NCU_SECONDS} s") from error
    parts = read_counters(done.stdout, done.stderr, MARKER)
    if len(parts) != len(entries):
        raise CountersUnavailable(
            f"ncu saw {len(parts)} parts instead of {len(entries)}: {done.stderr.strip()[-300:]}"
        )
    for entry, part in zip(entries, parts, strict=True):
        entry.bytes_read, entry.bytes_written = part.bytes_read, part.bytes_written
        entry.ncu_kernels = part.kernels


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The article's ledger: chain against fused.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for ledger.csv and ledger.md")
    parser.add_argument("--no-ncu", action="store_true", help="leave the bytes moved out")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)  # by ncu
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU: torch.cuda.is_available() is False")
    if options.watched:
        run_for_ncu()
        return 0
    if options.out is None:
        parser.error("--out DIR is missing")

    entries = []
    for system, softmax in softmaxes().items():
        entries += measure(system, softmax)
        torch.cuda.empty_cache()
    notes = []
    if not options.no_ncu:
        try:
            add_counters(entries)
        except CountersUnavailable as error:
            notes.append(f"Bytes moved weren't counted: {error}")
    about = {"device": device_name("cuda"), "torch": torch.__version__, "commit": commit()}
    rows = [about | entry.cells() for entry in entries]
    write_rows(options.out / "ledger.csv", rows, list(rows[0]))
    text = as_markdown(entries, ", ".join((about["device"], f"torch {about['torch']}")), notes)
    write_whole(options.out / "ledger.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

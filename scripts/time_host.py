"""The host's cost of a small call: fused against the native chain, where the kernels cost nothing.

    python scripts/time_host.py [--device cpu|cuda]

Microseconds of the calling thread at [1, 4, 16, 64] float32: the best of five loops, since anything
else on the machine can only add to it. On a GPU the loop runs ahead of the device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import sms_plugin  # noqa: E402

SHAPE = (1, 4, 16, 64)
CALLS = 1000
LOOPS = 5

Softmax = Callable[[Tensor, "Tensor | None", float], Tensor]


def chain(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    z = scores * scale
    return torch.softmax(z if mask is None else z.masked_fill(mask, -torch.inf), dim=-1)


def microseconds(call: Callable[[], object], device: str) -> float:
    best = float("inf")
    for loop in range(LOOPS + 1):  # the first one warms up
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        elapsed = time.perf_counter() - started
        if device == "cuda":
            torch.cuda.synchronize()
        if loop > 0:
            best = min(best, elapsed / CALLS * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    device = parser.parse_args().device
    if device == "cuda" and not has_gpu:
        print("no CUDA GPU: torch.cuda.is_available() is False")
        return 1
    torch.set_num_threads(1)
    scores = torch.randn(SHAPE, device=device)
    tracked = scores.clone().requires_grad_()
    grad = torch.randn_like(scores)
    mask = torch.rand(SHAPE[-1], device=device) < 0.2

    def forward(softmax: Softmax, term: Tensor | None) -> float:
        with torch.no_grad():
            return microseconds(lambda: softmax(scores, term, 0.3), device)

    def both(softmax: Softmax, term: Tensor | None) -> float:
        def call() -> object:
            return torch.autograd.grad(softmax(tracked, term, 0.3), tracked, grad)

        return microseconds(call, device)

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, microseconds a call at {list(SHAPE)}")
    print(f"{'':30}{'fused':>8}{'chain':>8}{'ratio':>8}")
    for kind, term in (("no mask", None), ("bool mask", mask)):
        for direction, measure in (("forward", forward), ("forward + backward", both)):
            fused = measure(sms_plugin.scaled_mask_softmax, term)
            native = measure(chain, term)
            label = f"{kind}, {direction}"
            print(f"{label:30}{fused:8.1f}{native:8.1f}{fused / native:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

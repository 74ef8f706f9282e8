"""A few small calls of every kind, for compute-sanitizer to watch.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python scripts/sanitize_cases.py

Without the caching allocator each tensor is an allocation of its own: one byte too far is seen.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT)]

from cases import (  # type: ignore[import-not-found]  # noqa: E402
    make_case,
    make_scores,
    random_mask,
)
from compare import check  # type: ignore[import-not-found]  # noqa: E402

import sms_plugin  # noqa: E402

# One length for each way that a row can be mapped to threads, and its odd neighbour.
LENGTHS = (1, 3, 7, 33, 49, 64, 127, 130, 257, 343, 512, 1000, 1025, 2048, 4097, 8192, 16390, 40000)
CASES = ("none", "bool", "bias", "causal+mask+bias")


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA GPU: torch.cuda.is_available() is False")
        return 1
    count = 0
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for length in LENGTHS:
            for case in CASES if length <= 2048 else CASES[-1:]:
                check(
                    sms_plugin.scaled_mask_softmax,
                    **make_case(case, 1, 2, 3, length, dtype, "cuda"),
                )
                count += 1
        buffer = make_scores((5 * 130 + 3,), dtype, "cuda")
        for offset in (1, 3):  # rows that no vector load may cross
            rows = buffer[offset : offset + 5 * 130].view(5, 130)
            mask = random_mask((5, 131), "cuda")[:, 1:]
            check(sms_plugin.scaled_mask_softmax, rows, mask, 0.5, True, bias=rows[:1])
            check(sms_plugin.scaled_mask_softmax, rows.mT, None, 0.5, bias=rows.mT[:, :1])
            count += 2
    torch.cuda.synchronize()
    print(f"{count} calls, forward and backward, all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Memory of the CPU kernels: nothing outside an operand is touched, nothing unwritten is used.

Each test runs in a process of its own, since a failure ends it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, check, upstream
from torch import Tensor

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax

LENGTHS = [
    *range(1, 40),
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    130,
    255,
    257,
    1000,
    1023,
    1025,
    2049,
    4097,
]


def run_alone(function: str, **environment: str) -> None:
    """Call a function of this file in a new process."""
    folders = [str(Path(__file__).parent), str(Path(sms_plugin.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import test_memory; test_memory.{function}(); print('all right')"],
        cwd=folders[0],  # where python -c looks first: no checkout, which may lack a library
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-2000:]}"
    assert "all right" in done.stdout


def calls_of_every_kind() -> None:
    """Forward and backward; terms of each broadcast form, so that each way of summing is used."""
    for dtype in DTYPES:
        for length in LENGTHS:
            scores = make_scores((2, 3, length), dtype, seed=length)
            for shape in ((), (1,), (length,), (3, 1), (2, 1, 1), (2, 3, 1), (3, length)):
                bias = make_scores(shape, dtype, seed=1, size=0.1)
                check(softmax, scores, random_mask((3, 1)), 0.5, bias=bias)
            check(softmax, scores, random_mask((length,)), 0.5, True)


def calls_before_a_guard_page() -> None:
    """Each operand ends where memory ends: a vector load past it is a segmentation fault."""
    for dtype in DTYPES:
        for length in LENGTHS:
            scores = make_scores((3, length), dtype, seed=length)
            mask, grad = random_mask((3, length)), upstream(scores)
            for bias in (scores[:1].double(), scores[:1].bfloat16(), scores):
                for is_causal in (False, True):
                    guarded = [at_the_end_of_memory(t) for t in (scores, mask, bias, grad)]
                    check(
                        softmax,
                        guarded[0],
                        guarded[1],
                        0.5,
                        is_causal,
                        bias=guarded[2],
                        grad_probs=guarded[3],
                    )
            check(softmax, at_the_end_of_memory(scores.mT.contiguous()).mT)


def at_the_end_of_memory(values: Tensor) -> Tensor:
    """The same values, directly before a page that may not be read."""
    page = mmap.PAGESIZE
    size = (values.nbytes + page - 1) // page * page
    mapping = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    moved = torch.frombuffer(
        mapping, dtype=values.dtype, count=values.numel(), offset=size - values.nbytes
    )
    return moved.view(values.shape).copy_(values)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's MALLOC_PERTURB_")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_fresh_memory_holds_garbage(threads: str) -> None:
    """glibc fills what it hands out with bytes that are huge numbers and NaN."""
    run_alone("calls_of_every_kind", MALLOC_PERTURB_="128", OMP_NUM_THREADS=threads)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_past_an_operand_is_read() -> None:
    run_alone("calls_before_a_guard_page")

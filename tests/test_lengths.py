"""Every short row, the lengths around each power of two, and rows beyond every known ceiling."""

from __future__ import annotations

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, check

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax

BLOCKS = [range(1, 45), range(45, 90), range(90, 131)]
ODD_LENGTHS = [191, 192, 193, 255, 256, 257, 383, 511, 513, 769, 1000, 1023, 1025, 1537]
LONG = [2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 10000, 16384, 16385, 32768, 49157, 65536]


def hold_to_contract(Tq: int, Tk: int, H: int, dtype: torch.dtype, device: str) -> None:
    """Dense, padded, causal, and all at once with a bias, forward and backward."""
    scores = make_scores((1, H, Tq, Tk), dtype, device, seed=Tk)
    mask = random_mask((1, 1, 1, Tk), device, seed=Tk)
    bias = make_scores((H, Tq, Tk), dtype, device, seed=Tk + 1, size=0.05)
    check(softmax, scores, None, 0.5)
    check(softmax, scores, mask, 0.5)
    check(softmax, scores, bias[0], 0.5)
    check(softmax, scores, None, 0.5, True)
    check(softmax, scores, mask, 0.5, True, bias=bias)


@pytest.mark.parametrize("lengths", BLOCKS, ids=lambda r: f"{r[0]}-{r[-1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_short_length(device: str, dtype: torch.dtype, lengths: range) -> None:
    for length in lengths:
        hold_to_contract((1, 3, 4, 7)[length % 4], length, (1, 3, 12)[length % 3], dtype, device)


@pytest.mark.parametrize("length", ODD_LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_powers_of_two(device: str, dtype: torch.dtype, length: int) -> None:
    hold_to_contract(5, length, 3, dtype, device)


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_ceiling(device: str, dtype: torch.dtype, length: int) -> None:
    """Kernels elsewhere end at 1024, 2048, 4096 or 16384 keys."""
    scores = make_scores((1, 1, 3, length), dtype, device, seed=length)
    check(softmax, scores, None, 0.5)
    mask = random_mask((1, 1, 1, length), device, seed=length)
    check(softmax, scores, mask, 0.5, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_131072_keys(device: str, dtype: torch.dtype) -> None:
    check(softmax, make_scores((1, 1, 2, 131072), dtype, device))
    constant = softmax(torch.zeros(2, 131072, dtype=dtype, device=device))
    assert bool((constant == 1 / 131072).all())


def test_a_million_keys(device: str) -> None:
    check(softmax, make_scores((1, (1 << 20) + 3), torch.float32, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_causal_square(device: str, dtype: torch.dtype) -> None:
    check(softmax, make_scores((1, 1, 1025, 1025), dtype, device), is_causal=True)


@pytest.mark.slow
def test_causal_square_of_4097(device: str) -> None:
    check(softmax, make_scores((1, 1, 4097, 4097), torch.bfloat16, device), is_causal=True)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 13])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (7, 13), (50, 50)], ids=str)
def test_row_counts_that_divide_by_nothing(device: str, sizes: tuple[int, int], batch: int) -> None:
    for dtype in (torch.float16, torch.float32):
        scores = make_scores((batch, 1, *sizes), dtype, device, seed=batch)
        check(softmax, scores, None, 0.5)
        check(softmax, scores, random_mask((batch, 1, 1, sizes[1]), device), 0.5, True)


def test_385_queries_and_keys(device: str) -> None:
    check(softmax, make_scores((3, 1, 385, 385), torch.float16, device), scale=0.5)


@pytest.mark.parametrize("length", [1, 31, 64, 100, 1024, 3000])
def test_one_outlier_anywhere(device: str, length: int) -> None:
    """Each column is read: an outlier of 30 takes the whole row wherever it stands."""
    columns = torch.arange(length, device=device)[:: max(1, length // 64)]
    scores = make_scores((len(columns), length), torch.float32, device, size=0.1)
    rows = torch.arange(len(columns), device=device)
    scores[rows, columns] += scores.max() + 40
    probs = check(softmax, scores)
    assert torch.equal(probs.argmax(-1), columns)

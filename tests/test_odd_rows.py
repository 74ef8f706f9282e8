"""Rows that need care (NaN, infinity, huge z, infinite gradients) beside rows that don't.

Kernels treat the two kinds differently. Neither may change a bit of the other, wherever they meet:
several rows share a warp, a warp's rows share a block, and a long row is cut into parts.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, check
from torch import Tensor

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax

INF, NAN = math.inf, math.nan
LENGTHS = [4, 8, 33, 64, 127, 256, 1000, 1025, 4096]
LONG = [40_000, 131_072, 131_075]


def forward_and_backward(scores: Tensor, grad: Tensor, **options: object) -> list[Tensor]:
    scores = scores.detach().requires_grad_()
    probs = softmax(scores, **options)
    return [probs.detach(), *torch.autograd.grad(probs, scores, grad)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal to the bit, but for the sign of 0; NaN equals NaN."""
    return all(
        torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0))
        for a, b in zip(ours, theirs, strict=True)
    )


def with_care_needed(scores: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Every second row odd, in each of several ways in turn; infinite gradients where p is 0."""
    scores, grad = scores.clone(), grad.clone()
    largest = torch.finfo(scores.dtype).max
    huge = min(largest / 4, 2.0**30)
    for row in range(0, scores.shape[0], 2):
        kind = row // 2 % 5
        if kind == 0:
            scores[row] = scores[row].sign() * huge
        elif kind == 1:
            scores[row, row % scores.shape[1]] = NAN
        elif kind == 2:
            scores[row, -1] = INF
        elif kind == 3:
            scores[row] = -INF
        else:
            scores[row, 0] = -INF
            grad[row, 0] = INF
    return scores, grad


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_as_if_alone(device: str, dtype: torch.dtype, length: int) -> None:
    plain = make_scores((23, length), dtype, device)
    scores, grad = with_care_needed(plain, make_scores((23, length), dtype, device, seed=5))
    together = forward_and_backward(scores, grad, scale=0.5)
    for row in range(23):
        alone = forward_and_backward(scores[row : row + 1], grad[row : row + 1], scale=0.5)
        assert same(alone, [part[row : row + 1] for part in together]), row
    # Rows that need no care are what they are among their like, and finite.
    among_their_like = forward_and_backward(plain, grad.nan_to_num(posinf=1.0), scale=0.5)
    assert same([p[1::2] for p in together], [p[1::2] for p in among_their_like])
    assert all(bool(part[1::2].isfinite().all()) for part in together)


@pytest.mark.parametrize("kind", ["bool", "float", "bias", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_masked_row_as_if_alone(device: str, dtype: torch.dtype, kind: str) -> None:
    length = 130
    scores, grad = with_care_needed(
        make_scores((23, length), dtype, device), make_scores((23, length), dtype, device, seed=5)
    )
    terms: dict[str, Tensor] = {}
    if kind in ("bool", "both"):
        terms["mask"] = random_mask((1, length), device)
    if kind == "float":
        terms["mask"] = make_scores((1, length), dtype, device, seed=2, size=0.1)
    if kind in ("bias", "both"):
        terms["bias"] = make_scores((23, length), dtype, device, seed=3, size=0.1)
    together = forward_and_backward(scores, grad, scale=0.5, **terms)
    for row in range(23):
        own = {n: t[row : row + 1] if len(t) > 1 else t for n, t in terms.items()}
        alone = forward_and_backward(scores[row : row + 1], grad[row : row + 1], scale=0.5, **own)
        assert same(alone, [part[row : row + 1] for part in together]), row


@pytest.mark.parametrize("exponent", [19, 20, 21, 22, 23, 24, 26, 30])
@pytest.mark.parametrize("length", [7, 64, 1000, 40_000])
def test_huge_z(device: str, length: int, exponent: int) -> None:
    """Differences of a few units on top of a huge z: exact in float32 up to 2^24."""
    step = max(1.0, 2.0 ** (exponent - 22))
    generator = torch.Generator().manual_seed(exponent)
    drops = torch.randint(0, 6, (4, length), generator=generator) * step
    scores = (2.0**exponent - drops).to(device)
    check(softmax, scores, exact_z=True)
    check(softmax, -scores, exact_z=True)
    check(softmax, scores / 4, None, 4.0, exact_z=True)


@pytest.mark.parametrize("largest", [-5000, -2200, -2037, -700, 0, 9, 1900, 2100, 6000])
def test_exact_z_far_from_the_maximum(device: str, largest: int) -> None:
    """Within 1e-6 down to probs of 1e-35: the exponent has no error of its own size."""
    generator = torch.Generator().manual_seed(abs(largest))
    for length in (5, 64, 1001, 40_000):
        drops = torch.randint(0, 81, (3, length), generator=generator)
        drops[:, 0] = 0
        drops[:, -1] = 2097 + abs(largest)  # D is beyond 2096
        check(softmax, (largest - drops).float().to(device), exact_z=True)


@pytest.mark.parametrize("last", [2048, 4096, 8192, 20_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nan_alone_in_its_part(device: str, dtype: torch.dtype, last: int) -> None:
    """The last key that a row sees is NaN, and the only one in the part that it falls into."""
    for length in (16_388, 32_776, 131_072):
        scores = make_scores((1, length), dtype, device)
        scores[0, min(last, length - 1)] = NAN
        removed = torch.arange(length, device=device) > last
        assert bool(check(softmax, scores, removed).isnan()[0, : last + 1].all())


@pytest.mark.parametrize(
    ("first", "others"), [(0, -9), (2**23 + 1, 2**23 - 2), (1 - 2**23, -1 - 2**23)]
)
def test_parts_on_either_side_of_care(device: str, first: int, others: int) -> None:
    """One part of a row needs care and another doesn't; all z are exact, and D is beyond 2096."""
    for length in (16_388, 131_072):
        scores = torch.full((1, length), first - 3000.0, device=device)
        scores[0, 0] = first
        scores[0, 2048:4096] = others
        check(softmax, scores, exact_z=True)


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_of_a_long_row_differ(device: str, dtype: torch.dtype, length: int) -> None:
    """Pieces without a kept key, huge next to small, and a maximum that only one piece has."""
    scores = make_scores((6, length), dtype, device)
    third = length // 3
    scores[0, :third] = -INF
    scores[1, third:] = -INF
    scores[2, third : 2 * third] -= 1000
    scores[3, -1] += 100
    scores[4, ::7] = -INF
    check(softmax, scores[:5])
    check(softmax, scores[:5], random_mask((1, length), device))
    causal = check(softmax, scores[:5].unsqueeze(0), is_causal=True)
    assert bool((causal[0, 0, : length - 4] != 0).any()) and not causal[0, 0, length - 4 :].any()
    scores[5, :third] = scores[5, :third].sign() * 2.0**25
    check(softmax, scores[5:], exact_z=True)


@pytest.mark.parametrize("length", LONG)
def test_care_for_long_rows(device: str, length: int) -> None:
    scores, grad = with_care_needed(
        make_scores((11, length), torch.float32, device),
        make_scores((11, length), torch.float32, device, seed=5),
    )
    together = forward_and_backward(scores, grad)
    for row in range(11):
        alone = forward_and_backward(scores[row : row + 1], grad[row : row + 1])
        assert same(alone, [part[row : row + 1] for part in together]), row


@pytest.mark.parametrize("scale", [-0.5, -3.0, 0.0, 1e-30, 1e30, 2.0**-61, 2.0**61])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_off_the_common_path(device: str, dtype: torch.dtype, scale: float) -> None:
    size = min(1.0, 1 / abs(scale)) if scale else 1.0
    for length in (6, 64, 1025):
        scores = make_scores((5, length), dtype, device, size=size)
        check(softmax, scores, None, scale)
        check(softmax, scores, random_mask((5, length), device), scale)
        check(softmax, scores, None, scale, bias=make_scores((5, length), dtype, device, seed=4))

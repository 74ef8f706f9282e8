"""Rows without a key, NaN and infinities, the ends of each format, and sizes of zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES
from torch import Tensor

import sms_plugin

Check = Callable[..., Tensor]
INF, NAN = torch.inf, torch.nan


def tensor(values: object, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("form", ["bool", "row", "additive", "bias", "mask and bias", "scores"])
@pytest.mark.parametrize("length", [4, 33, 257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_row(check: Check, device: str, dtype: torch.dtype, length: int, form: str) -> None:
    """No key left: probs and gradients exactly 0 (`check` allows no error there), others right."""
    scores = make_scores((1, 2, 4, length), dtype, device)
    dead = torch.zeros(4, length, dtype=torch.bool, device=device)
    dead[1] = True
    additive = sms_plugin.additive_mask(dead, dtype)
    arguments: dict[str, Tensor] = {
        "bool": {"mask": dead},
        "row": {"mask": dead[:, :1]},
        "additive": {"mask": additive},
        "bias": {"bias": additive},
        "mask and bias": {"mask": random_mask((4, length), device), "bias": additive},
        "scores": {},
    }[form]
    if form == "scores":
        scores[:, :, 1] = -INF
    probs = check(scores, scale=0.5, **arguments)
    assert not probs[:, :, 1].any()
    assert bool(probs.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_is_dead(check: Check, device: str, dtype: torch.dtype) -> None:
    scores = make_scores((2, 3, 70), dtype, device)
    for mask in (
        torch.ones((), dtype=torch.bool, device=device),
        torch.full((), -INF, device=device),
        torch.full((70,), -INF, dtype=dtype, device=device),
    ):
        assert not check(scores, mask, 0.5).any()


@pytest.mark.parametrize("scale", [1.0, -2.0, 0.0])
def test_dead_by_causality(check: Check, device: str, scale: float) -> None:
    """More queries than keys: the first ones see nothing; garbage there is never read."""
    scores = make_scores((2, 9, 4), torch.float32, device)
    scores[:, :5] = NAN
    assert not check(scores, None, scale, True)[:, :5].any()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_under_a_bool_mask(
    check: Check, device: str, dtype: torch.dtype, garbage: float
) -> None:
    mask = random_mask((5, 100), device, removed=0.5)
    scores = make_scores((5, 100), dtype, device)
    clean = check(scores, mask, 0.5)
    assert torch.equal(check(scores.masked_fill(mask, garbage), mask, 0.5), clean)
    bias = torch.zeros(5, 100, dtype=dtype, device=device)
    assert torch.equal(check(scores, mask, 0.5, bias=bias.masked_fill(mask, garbage)), clean)


@pytest.mark.parametrize("garbage", [NAN, INF])
def test_garbage_in_the_future(check: Check, device: str, garbage: float) -> None:
    scores = make_scores((2, 40, 40), torch.float32, device)
    future = torch.ones(40, 40, dtype=torch.bool, device=device).triu(1)
    clean = check(scores, None, 0.5, True)
    assert torch.equal(check(scores.masked_fill(future, garbage), None, 0.5, True), clean)
    additive = torch.zeros(40, 40, device=device).masked_fill(future, garbage)
    assert torch.equal(check(scores, additive, 0.5, True), clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_by_hand(check: Check, device: str, dtype: torch.dtype) -> None:
    def row(scores: list[float], mask: object = None) -> list[float]:
        term = None
        if mask is not None:
            term = torch.tensor(mask, device=device)
            term = term if term.dtype == torch.bool else term.to(dtype)
        return check(tensor(scores, device, dtype), term).double().tolist()

    def near(values: list[float]) -> object:
        return pytest.approx(values, rel=2e-2, nan_ok=True)

    assert row([NAN, 1, 2], [True, False, False]) == near([0, 0.2689414, 0.7310586])
    assert row([-INF, 0, 1]) == near([0, 0.2689414, 0.7310586])
    assert row([NAN, -INF, -INF]) == near([NAN] * 3)
    assert row([NAN, 0], [-INF, 0.0]) == near([NAN] * 2)
    assert row([INF, 0]) == near([NAN] * 2)
    assert row([INF, 0, 1], [-INF, 0.0, 0.0]) == near([NAN] * 3)
    assert row([INF, INF]) == near([NAN] * 2)
    assert row([NAN, 0, 5], [False, False, True]) == near([NAN, NAN, 0])
    assert row([-INF, -INF]) == [0, 0]
    assert row([0, 0], [INF, 0.0]) == near([NAN] * 2)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("length", [5, 128, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_diverged_row_stays_alone(
    check: Check, device: str, dtype: torch.dtype, length: int, bad: float
) -> None:
    """NaN or +inf at any kept key makes its whole row NaN, and no other row."""
    scores = make_scores((4, length), dtype, device)
    clean = check(scores)
    for column in (0, length // 2, length - 1):
        poisoned = scores.clone()
        poisoned[2, column] = bad
        probs = check(poisoned)
        assert bool(probs[2].isnan().all())
        assert torch.equal(probs[[0, 1, 3]], clean[[0, 1, 3]])


def test_diverged_causal_row(check: Check, device: str) -> None:
    """The row is NaN at its keys, 0 in its future; rows before the NaN don't see it."""
    scores = make_scores((6, 6), torch.float32, device)
    scores[:, 3] = NAN
    probs = check(scores, is_causal=True)
    assert bool(probs[:3].isfinite().all())
    assert bool(probs[3:].tril(3).isnan().any(-1).all())
    assert not probs.triu(1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("term_dtype", DTYPES, ids=str)
def test_dtype_minimum_is_a_number(
    check: Check, device: str, dtype: torch.dtype, term_dtype: torch.dtype
) -> None:
    """Padding and causality built from dtype minima, added: only -inf removes."""
    low = torch.finfo(term_dtype).min
    scores = tensor([0.25, 0.125, 0.25, 0.75, 1.0], device, dtype)
    is_resolved = scores.double() + low != low  # beside -65504, float32 still sees these scores
    if bool(is_resolved.any()) or (dtype == torch.float64 and term_dtype != torch.float64):
        scores = torch.zeros_like(scores)
    mask = tensor([low, -INF, -INF, low, low], device, term_dtype)
    third = pytest.approx([1 / 3, 0, 0, 1 / 3, 1 / 3], rel=1e-2)
    assert check(scores, mask, exact_z=True).tolist() == third
    everywhere = torch.full((5,), low, dtype=term_dtype, device=device)
    fifth = pytest.approx([0.2] * 5, rel=1e-2)
    assert check(scores, everywhere, exact_z=True).tolist() == fifth
    # Doubly removed cells stay level with the singly removed ones, and below the kept.
    assert check(scores, everywhere, bias=everywhere, exact_z=True).tolist() == fifth
    assert check(scores, mask, bias=everywhere, exact_z=True).tolist() == third
    some = tensor([low, 0, -INF, low, 0], device, term_dtype)
    probs = check(scores, some, bias=some, exact_z=True).tolist()
    assert [p == 0 for p in probs] == [True, False, True, True, False]


def test_float64_terms_beyond_float32(check: Check, device: str) -> None:
    """Clamped, not turned into -inf; above the range it is +inf, hence NaN."""
    scores = torch.zeros(3, device=device)
    far = tensor([-1e300, -1e200, -INF], device, torch.float64)
    assert check(scores, far, exact_z=True).tolist() == [0.5, 0.5, 0]
    assert check(scores, bias=far, exact_z=True).tolist() == [0.5, 0.5, 0]
    assert check(scores, far, bias=far, exact_z=True).tolist() == [0.5, 0.5, 0]
    far[0] = 1e300
    assert check(scores, far, exact_z=True).isnan().tolist() == [True] * 3
    assert check(scores.double(), far, exact_z=True).tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_ends_of_the_format(check: Check, device: str, dtype: torch.dtype) -> None:
    high = torch.finfo(dtype).max
    assert check(tensor([high, high], device, dtype), exact_z=True).tolist() == [0.5, 0.5]
    assert check(tensor([-high, -high], device, dtype), exact_z=True).tolist() == [0.5, 0.5]
    assert check(tensor([high, -high], device, dtype), exact_z=True).tolist() == [1, 0]
    overflowing = check(tensor([high, 0], device, dtype), None, 4.0, exact_z=True)
    assert overflowing.isnan().tolist() == [True, True]


def test_masked_means_gone(check: Check, device: str) -> None:
    """Not -10000: a row whose kept scores are lower gave all its weight to the removed key."""
    mask = tensor([False, False, True], device, torch.bool)
    right = pytest.approx([0.7310585786, 0.2689414214, 0], rel=1e-5)
    for shift in (0, -40000):
        scores = tensor([-20000.0, -20001, 5], device) + shift
        assert check(scores, mask, exact_z=True).tolist() == right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(0, 4, 8, 8), (2, 0, 8, 8), (2, 2, 0, 8), (2, 2, 8, 0), (0,), (0, 0), (3, 0), (0, 3)],
    ids=str,
)
def test_zero_size(check: Check, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """An empty result of the same shape, empty gradients, and no error left behind."""
    scores = torch.empty(shape, dtype=dtype, device=device)
    masks: list[Tensor | None] = [None, torch.zeros(shape, dtype=torch.bool, device=device)]
    masks += [torch.zeros(shape[-1:], device=device), torch.zeros((), device=device)]
    masks += [torch.ones((1,) * len(shape), dtype=torch.bool, device=device)]
    for mask in masks:
        for is_causal in (False, True)[: len(shape)]:
            probs = check(scores, mask, 0.5, is_causal)
            assert probs.shape == shape
            assert not probs.isnan().any()
    check(
        scores, bias=torch.zeros((1,) * len(shape), device=device)
    )  # its gradient sums nothing: 0
    assert torch.ones(3, device=device).sum().item() == 3  # no sticky error


def test_last_dimension_of_one(check: Check, device: str) -> None:
    assert bool((check(make_scores((3, 5, 1), torch.float16, device)) == 1).all())
    dead = torch.ones(5, 1, dtype=torch.bool, device=device)
    assert not check(make_scores((3, 5, 1), torch.float16, device), dead).any()

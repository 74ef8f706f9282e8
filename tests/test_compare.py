"""The yardstick is right, and it rejects wrong results."""

from __future__ import annotations

import decimal

import numpy as np
import pytest
import torch
from cases import make_scores, random_mask
from compare import (
    DTYPES,
    FORMATS,
    compare_grads,
    compare_probs,
    exact_dz,
    exact_probs,
    upstream,
    widen,
)

LENGTHS = (2, 3, 7, 31, 64, 129, 1000, 1024, 4096)
ROWS = 6
SCALE = 0.5


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64)).to(dtype)


def masked_case(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (ROWS, length) and a mask that keeps the first key and removes the second."""
    mask = random_mask((ROWS, length), seed=length)
    mask[:, 1] = True
    return make_scores((ROWS, length), dtype, seed=length, size=1 / SCALE), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", [[0.25, -3.5, 1.75], [100.0, 99.0, -40.0, 3.0], [0.0, 0.0]])
def test_yardstick_is_decimal_arithmetic(row: list[float], dtype: torch.dtype) -> None:
    """Forty decimal digits: the yardstick is some bits better than what it measures."""
    with decimal.localcontext(prec=40):
        weights = [(decimal.Decimal(x) * decimal.Decimal(SCALE)).exp() for x in row]
        total = sum(weights)
        right = [w / total for w in weights]
        got = exact_probs(torch.tensor(row, dtype=dtype), None, SCALE).probs
        spare = 2**6 if np.finfo(np.longdouble).eps < 2.0**-60 or dtype == torch.float32 else 1
        for value, wanted in zip(got, right, strict=True):
            high = float(value)  # a longdouble is the sum of two floats
            exactly = decimal.Decimal(high) + decimal.Decimal(float(value - high))
            assert abs(exactly - wanted) <= wanted * decimal.Decimal(
                4 * FORMATS[dtype].unit / spare
            )


def test_yardstick_knows_hand_values() -> None:
    inf, nan = torch.inf, torch.nan
    row = exact_probs(torch.tensor([-20000.0, -20001, 5]), torch.tensor([False, False, True])).probs
    np.testing.assert_allclose(row, [0.7310585786, 0.2689414214, 0], rtol=1e-9)
    row = exact_probs(torch.zeros(2), torch.tensor([0.0, -10]), 0.125).probs
    np.testing.assert_allclose(row, [0.9999546021, 0.0000453979], rtol=1e-6)
    rows = exact_probs(torch.zeros(5, 2), is_causal=True).probs
    np.testing.assert_array_equal(rows, [[0, 0]] * 3 + [[1, 0], [0.5, 0.5]])
    lowest = torch.finfo(torch.float32).min
    scores, mask = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([lowest, -inf, lowest])
    np.testing.assert_array_equal(exact_probs(scores, mask, bias=mask).probs, [0.5, 0, 0.5])
    row = exact_probs(torch.tensor([nan, 1.0, 2]), torch.tensor([False, True, False])).probs
    np.testing.assert_array_equal(row, [nan, 0, nan])
    np.testing.assert_array_equal(exact_probs(torch.tensor([inf, 0.0])).probs, [nan, nan])
    np.testing.assert_array_equal(exact_probs(torch.tensor([-inf, -inf])).probs, [0, 0])


def test_yardstick_of_the_gradient_is_autograd() -> None:
    scores = make_scores((5, 9), torch.float64).requires_grad_()
    probs = (scores * SCALE).softmax(-1)
    grad = upstream(probs)
    (right,) = torch.autograd.grad(probs, scores, grad)
    dz, _ = exact_dz(grad.double().numpy(), exact_probs(scores, None, SCALE).probs)
    np.testing.assert_allclose((SCALE * dz).astype(float), right.numpy(), rtol=1e-12, atol=1e-18)


def test_format_rounds_as_torch_does() -> None:
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.cat([values, values * 2.0**-14, values * 2.0**-22, torch.zeros(1).double()])
    for dtype in (torch.float16, torch.float32):
        right = values.to(dtype).double().numpy()
        np.testing.assert_array_equal(FORMATS[dtype].round(values.numpy()), right)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_probs_are_rejected(dtype: torch.dtype, length: int) -> None:
    scores, mask = masked_case(length, dtype)
    exact = exact_probs(scores, mask, SCALE)
    compare_probs(rounded(exact.probs, dtype), exact).demand()

    kept_count = exact.kept.sum(-1, keepdims=True)
    wrong = {
        "all zero": np.zeros_like(exact.probs),
        "uniform": np.full_like(exact.probs, 1 / length),
        "uniform over the kept keys": exact.kept / kept_count,
        "one column to the right": np.roll(exact.probs, 1, axis=-1),
        "scale off by 1%": exact_probs(scores, mask, SCALE * 1.01).probs,
        "no scale": exact_probs(scores, mask).probs,
        "the other polarity": exact_probs(scores, ~mask, SCALE).probs,
        "no mask": exact_probs(scores, None, SCALE).probs,
        "-10 instead of removed": exact_probs(scores, -10.0 * mask, SCALE).probs,
        "the last column missed": np.concatenate(
            [exact_probs(scores[:, :-1], mask[:, :-1], SCALE).probs, exact.probs[:, -1:] * 0], -1
        ),
        "NaN": np.full_like(exact.probs, np.nan),
    }
    if length == 2:  # one kept key: its probability is 1 whatever the scale
        for name in ("uniform over the kept keys", "scale off by 1%", "no scale"):
            del wrong[name]
        del wrong["the last column missed"]
    elif exact.probs[:, -1].max() < FORMATS[dtype].unit:
        del wrong["the last column missed"]
    for name, probs in wrong.items():
        comparison = compare_probs(rounded(probs, dtype), exact)
        assert not comparison.passed, f"{name} is accepted: {comparison}"
        with pytest.raises(AssertionError, match="times the allowed error"):
            comparison.demand()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unmasked_wrong_probs_are_rejected(dtype: torch.dtype, length: int) -> None:
    scores = make_scores((ROWS, length), dtype, seed=length, size=1 / SCALE)
    exact = exact_probs(scores, None, SCALE)
    for probs in (
        np.zeros_like(exact.probs),
        np.full_like(exact.probs, 1 / length),
        np.roll(exact.probs, -1, axis=-1),
        exact_probs(scores, None, SCALE * 1.01).probs,
    ):
        assert not compare_probs(rounded(probs, dtype), exact).passed


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_gradients_are_rejected(dtype: torch.dtype, length: int) -> None:
    scores = make_scores((ROWS, length), dtype, seed=length, size=1 / SCALE)
    exact = exact_probs(scores, None, SCALE)
    saved = rounded(exact.probs, dtype)
    grad = upstream(saved)
    bias = torch.zeros(length, dtype=dtype)
    probs = widen(saved, dtype) if dtype in (torch.float16, torch.bfloat16) else exact.probs
    wide_grad = widen(grad, dtype)
    dz, _ = exact_dz(wide_grad, probs)

    def accepted(grad_z: np.ndarray, factor: float = SCALE) -> bool:
        comparisons = compare_grads(
            grad,
            exact,
            SCALE,
            saved=saved,
            grad_scores=rounded(factor * grad_z, dtype),
            additive=[("grad_bias", bias, rounded(grad_z.sum(0), dtype))],
        )
        scores_pass, bias_pass = comparisons[1].passed, comparisons[3].passed
        assert scores_pass == bias_pass or factor != SCALE, comparisons
        return scores_pass

    assert accepted(dz)
    assert not accepted(np.zeros_like(dz))
    assert not accepted(dz, factor=1.0)
    assert not accepted(probs * wide_grad)
    assert not accepted(np.roll(dz, 1, axis=-1))
    assert not accepted(dz, factor=SCALE * 1.05)
    assert not accepted(dz + np.nan)


def test_zero_where_removed_is_exact() -> None:
    scores, mask = masked_case(16, torch.float32)
    exact = exact_probs(scores, mask, SCALE)
    probs = rounded(exact.probs, torch.float32)
    probs[0, 1] = 1e-40
    assert not compare_probs(probs, exact).passed


def test_shape_dtype_and_layout_are_compared() -> None:
    exact = exact_probs(torch.zeros(4, 4))
    right = torch.full((4, 4), 0.25)
    assert compare_probs(right, exact).passed
    assert not compare_probs(right.double(), exact).passed
    assert not compare_probs(right.t(), exact).passed
    assert not compare_probs(right[:3], exact).passed
    with pytest.raises(ValueError, match="exact_z"):
        compare_probs(right[0], exact_probs(torch.full((4,), 1e6)))

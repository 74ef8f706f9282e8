"""Masks and biases: polarity, every broadcast form, dtypes, and what composes with what.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, check, exact_probs
from torch import Tensor

import sms_plugin

Check = Callable[..., Tensor]
softmax = sms_plugin.scaled_mask_softmax

BROADCAST_FORMS = [
    ((2, 3, 4, 5), (1,)),
    ((2, 3, 4, 5), ()),
    ((2, 3, 4, 5), (5,)),
    ((2, 3, 4, 5), (1, 5)),
    ((2, 3, 4, 5), (4, 1)),
    ((2, 3, 4, 5), (4, 5)),
    ((2, 3, 4, 5), (1, 1, 5)),
    ((2, 3, 4, 5), (3, 1, 5)),
    ((2, 3, 4, 5), (3, 4, 5)),
    ((2, 3, 4, 5), (1, 1, 1, 5)),
    ((2, 3, 4, 5), (2, 1, 1, 5)),
    ((2, 3, 4, 5), (2, 1, 4, 5)),
    ((2, 3, 4, 5), (1, 3, 4, 5)),
    ((2, 3, 4, 5), (2, 3, 4, 1)),
    ((2, 3, 4, 5), (2, 1, 1, 1)),
    ((2, 3, 4, 5), (2, 3, 4, 5)),
    ((4, 5), ()),
    ((4, 5), (5,)),
    ((4, 5), (4, 1)),
    ((4, 5), (4, 5)),
    ((5,), ()),
    ((5,), (1,)),
    ((5,), (5,)),
    ((2, 1, 3, 4, 5), (3, 1, 5)),
    ((2, 1, 3, 4, 5), (2, 1, 1, 1, 5)),
    ((2, 1, 3, 4, 5), (2, 1, 3, 4, 1)),
    ((2, 3, 2, 1, 3, 5), (3, 1, 1, 3, 5)),
    ((2, 3, 2, 1, 3, 5), (2, 1, 2, 1, 1, 5)),
    ((2, 3, 2, 2, 2, 3, 5), (2, 1, 2, 1, 2, 1, 5)),
]


def memory_layouts(values: Tensor) -> dict[str, Tensor]:
    """The same values contiguous, with their dimensions reversed in memory, strided, and offset."""
    dims = list(range(values.dim()))
    backwards = values.permute(dims[::-1]).contiguous().permute(dims[::-1])
    strided = torch.stack([values, values], -1)[..., 0] if values.dim() else values
    buffer = torch.zeros(values.numel() + 1, dtype=values.dtype, device=values.device)
    offset = buffer[1:].view(values.shape)
    offset.copy_(values)
    return {"contiguous": values, "permuted": backwards, "strided": strided, "offset": offset}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("shape", "mask_shape"), BROADCAST_FORMS, ids=str)
def test_broadcast_forms(
    device: str, shape: tuple[int, ...], mask_shape: tuple[int, ...], kind: str
) -> None:
    """Each form equals the materialised mask, whatever its strides; (..., Tq, 1) removes rows."""
    generator = torch.Generator().manual_seed(len(shape))
    mask = torch.rand(mask_shape, generator=generator) < 0.4
    mask = (mask if kind == "bool" else torch.randn(mask_shape, generator=generator)).to(device)
    scores = make_scores(shape, torch.float32, device)
    full = mask.expand(shape)
    right = check(softmax, scores, full.contiguous(), 0.5)
    for values in (*memory_layouts(mask).values(), full):
        assert torch.equal(check(softmax, scores, values, 0.5), right)
        if kind == "float":
            assert torch.equal(check(softmax, scores, scale=0.5, bias=values), right)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_partly_expanded_masks(device: str, kind: str) -> None:
    """Stride 0 in the middle, as expand() of a mask that was made for one head or one query."""
    scores = make_scores((2, 3, 4, 6), torch.float32, device)
    for start in ((2, 1, 4, 6), (2, 3, 1, 6), (2, 3, 4, 1), (1, 3, 1, 6)):
        values = random_mask(start, device) if kind == "bool" else make_scores(start, device=device)
        expanded = values.expand(2, 3, 4, 6)
        right = check(softmax, scores, expanded.contiguous())
        assert torch.equal(check(softmax, scores, expanded), right)
        assert torch.equal(check(softmax, scores, values), right)


def test_mask_and_bias_broadcast_differently(device: str) -> None:
    scores = make_scores((2, 3, 4, 5), torch.float32, device)
    for mask_shape in ((2, 1, 1, 5), (4, 5), (2, 3, 4, 1)):
        for bias_shape in ((1, 3, 4, 5), (3, 1, 1), (2, 1, 4, 5), (5,)):
            generator = torch.Generator().manual_seed(1)
            bias = torch.randn(bias_shape, generator=generator).to(device)
            for is_causal in (False, True):
                mask = random_mask(mask_shape, device)
                check(softmax, scores, mask, 0.5, is_causal, bias=bias)
                additive = sms_plugin.additive_mask(mask, torch.bfloat16)
                check(softmax, scores, additive, 0.5, is_causal, bias=bias)


def test_true_removes(check: Check, device: str) -> None:
    """As `masked_fill` and `nn.MultiheadAttention`; SDPA's masks are converted."""
    scores = torch.zeros(1, 1, 1, 4, device=device)
    mask = torch.tensor([True, False, False, False], device=device)
    third = torch.tensor([0, 1 / 3, 1 / 3, 1 / 3], device=device)
    torch.testing.assert_close(check(scores, mask)[0, 0, 0], third)
    kept = check(scores, sms_plugin.mask_from_keep(mask))
    assert kept[0, 0, 0].tolist() == [1, 0, 0, 0]
    additive = check(scores, sms_plugin.additive_mask(mask, torch.float32))
    assert torch.equal(additive, check(scores, mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bool_equals_additive(device: str, dtype: torch.dtype) -> None:
    scores = make_scores((2, 3, 9, 40), dtype, device)
    mask = random_mask((2, 1, 9, 40), device)
    mask[1, :, 4] = True
    for mask_dtype in DTYPES:
        additive = sms_plugin.additive_mask(mask, mask_dtype)
        assert torch.equal(softmax(scores, mask, 0.5), softmax(scores, additive, 0.5))


def test_conversions() -> None:
    keep = torch.tensor([[True, False]])
    assert sms_plugin.mask_from_keep(keep).tolist() == [[False, True]]
    for dtype in DTYPES:
        additive = sms_plugin.additive_mask(~keep, dtype)
        assert additive.dtype == dtype
        assert additive.tolist() == [[0.0, -torch.inf]]
    with pytest.raises(TypeError, match="keep"):
        sms_plugin.mask_from_keep(torch.zeros(2))
    with pytest.raises(TypeError, match="mask"):
        sms_plugin.additive_mask(torch.zeros(2), torch.float32)
    with pytest.raises(TypeError, match="dtype"):
        sms_plugin.additive_mask(keep, torch.int64)


def test_float_mask_is_added_not_tested_for_zero(check: Check, device: str) -> None:
    scores = make_scores((3, 7, 9), torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    check(scores, torch.randn(7, 9, generator=generator).to(device))
    plain = check(scores)
    assert torch.equal(check(scores, torch.zeros(7, 9, device=device)), plain)
    torch.testing.assert_close(check(scores, torch.ones(7, 9, device=device)), plain)


@pytest.mark.parametrize("term_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_term_dtypes(
    check: Check, device: str, dtype: torch.dtype, term_dtype: torch.dtype
) -> None:
    """A term of any float dtype, exactly as stored; the result keeps the dtype of the scores."""
    scores = make_scores((2, 2, 5, 33), dtype, device)
    term = make_scores((2, 1, 5, 33), term_dtype, device, seed=3, size=0.1)
    assert check(scores, term, 0.5, backward=False).dtype == dtype
    assert check(scores, scale=0.5, bias=term, backward=False).dtype == dtype
    both = check(scores, term, 0.5, True, bias=term[:1, :, :1], backward=False)
    assert both.dtype == dtype


def test_causality_is_aligned_bottom_right(check: Check, device: str) -> None:
    def rows(queries: int, keys: int) -> list[list[float]]:
        return check(torch.zeros(1, 1, queries, keys, device=device), is_causal=True)[0, 0].tolist()

    fifth = pytest.approx([0.2] * 5)
    assert rows(2, 5) == [[0.25] * 4 + [0], fifth]
    assert rows(1, 5) == [fifth]
    assert rows(5, 2) == [[0, 0]] * 3 + [[1, 0], [0.5, 0.5]]
    assert rows(3, 3) == [[1, 0, 0], [0.5, 0.5, 0], pytest.approx([1 / 3] * 3)]
    assert rows(1, 1) == [[1]]


def test_mask_and_causality_both_apply(check: Check, device: str) -> None:
    scores = torch.zeros(1, 1, 4, 4, device=device)
    first = torch.tensor([True, False, False, False], device=device)
    third = pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    right = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0], third]
    additive = sms_plugin.additive_mask(first, torch.float32)
    for arguments in ({"mask": first}, {"mask": additive}, {"bias": additive}):
        assert check(scores, is_causal=True, **arguments)[0, 0].tolist() == right
    left_padding = first.view(1, 1, 1, 4)
    assert check(scores, left_padding, is_causal=True)[0, 0].tolist() == right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 9), (9, 1), (2, 130), (130, 2), (7, 64), (64, 7), (40, 41), (41, 40)]
)
def test_causal_rectangles(
    check: Check, device: str, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    scores = make_scores((2, 3, *sizes), dtype, device)
    check(scores, scale=0.5, is_causal=True)
    check(scores, random_mask((2, 1, 1, sizes[1]), device), 0.5, True)
    check(scores, make_scores(sizes, dtype, device), 0.5, True)


@pytest.mark.parametrize("leading", [(), (2,), (1, 1, 2), (2, 1, 2, 2)], ids=str)
def test_causality_counts_rows_of_the_last_two_dimensions(
    check: Check, device: str, leading: tuple[int, ...]
) -> None:
    check(make_scores((*leading, 5, 8), torch.float32, device), is_causal=True)


def test_padding_mask_alone_equals_the_shorter_row(device: str) -> None:
    scores = make_scores((1, 2, 6, 20), torch.float64, device)
    keys = torch.arange(20, device=device) >= 13
    padded, alone = softmax(scores, keys), softmax(scores[..., :13])
    torch.testing.assert_close(padded[..., :13], alone, rtol=1e-13, atol=0)
    assert not padded[..., 13:].any()


def test_the_tests_materialised_mask_is_numpys(device: str) -> None:
    """The yardstick broadcasts as NumPy does; so does the operator, from a 6-d view."""
    scores = make_scores((2, 1, 3, 2, 4, 5), torch.float32, device)
    mask = random_mask((3, 1, 4, 1), device)
    right = exact_probs(scores, mask.expand(scores.shape).clone()).probs
    assert (exact_probs(scores, mask).probs == right).all()

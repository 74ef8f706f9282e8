"""Strides and storage offsets of every operand: the same values give the same bits.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, check, upstream
from torch import Tensor

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax


def at_offset(values: Tensor, offset: int) -> Tensor:
    """The same values, `offset` elements after the start of an allocation."""
    buffer = torch.empty(values.numel() + offset + 8, dtype=values.dtype, device=values.device)
    moved = buffer[offset : offset + values.numel()].view(values.shape)
    return moved.copy_(values)


def strided_views(dense: Tensor) -> dict[str, Tensor]:
    """The values of `dense` (B, H, Tq, Tk) in the layouts that attention code produces."""
    B, H, Tq, Tk = dense.shape
    padded = dense.new_full((B, H, Tq, Tk + 7), torch.nan)
    padded[..., :Tk] = dense
    wide = dense.new_full((B, H, 2 * Tq, Tk), torch.nan)
    wide[:, :, ::2] = dense
    shifted = dense.new_full((B, H, Tq, Tk + 3), torch.nan)
    shifted[..., 3:] = dense
    return {
        "heads inside": dense.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        "batch innermost": dense.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        "keys before queries": dense.mT.contiguous().mT,
        "keys first": dense.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "padded rows": padded[..., :Tk],
        "every other row": wide[:, :, ::2],
        "rows from the fourth column": shifted[..., 3:],
        "every other column": torch.stack([dense, dense.neg()], -1)[..., 0],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [5, 49, 64, 130])
def test_strided_scores(device: str, length: int, dtype: torch.dtype) -> None:
    dense = make_scores((2, 3, 6, length), dtype, device)
    mask = random_mask((2, 1, 1, length), device)
    right = check(softmax, dense, mask, 0.5, True)
    for name, view in strided_views(dense).items():
        assert torch.equal(check(softmax, view, mask, 0.5, True), right), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_gradients(device: str, dtype: torch.dtype) -> None:
    scores = make_scores((2, 3, 6, 40), dtype, device).requires_grad_()
    bias = torch.zeros(3, 1, 40, dtype=dtype, device=device, requires_grad=True)
    probs = softmax(scores, scale=0.5, bias=bias)
    dense = upstream(probs)
    right = torch.autograd.grad(probs, [scores, bias], dense, retain_graph=True)
    for name, view in strided_views(dense).items():
        got = torch.autograd.grad(probs, [scores, bias], view, retain_graph=True)
        for g, r in zip(got, right, strict=True):
            assert torch.equal(g, r), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_scores(device: str, dtype: torch.dtype) -> None:
    for shape in ((2, 1, 6, 40), (1, 3, 1, 40), (2, 3, 6, 1), (1, 1, 1, 1)):
        scores = make_scores(shape, dtype, device).expand(2, 3, 6, 40)
        right = check(softmax, scores.contiguous(), None, 0.5)
        assert torch.equal(check(softmax, scores, None, 0.5), right)


def test_overlapping_windows(device: str) -> None:
    """Rows that share memory, as relative-position code makes them."""
    windows = make_scores((100,), torch.float32, device).unfold(0, 30, 7)  # (11, 30)
    right = check(softmax, windows.contiguous(), is_causal=True)
    assert torch.equal(check(softmax, windows, is_causal=True), right)


def test_strides_of_dimensions_of_size_one_mean_nothing(device: str) -> None:
    values = make_scores((1, 3, 1, 40), torch.float32, device)
    odd = values.as_strided((1, 3, 1, 40), (7, 40, 13, 1))
    assert torch.equal(softmax(odd), softmax(values))
    single = make_scores((3, 1), torch.float32, device).as_strided((3, 1), (1, 5))
    assert bool((softmax(single) == 1).all())


@pytest.mark.parametrize("length", [7, 64, 128, 130, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storage_offsets(device: str, dtype: torch.dtype, length: int) -> None:
    """A slice that starts at an odd element is misaligned for vector loads."""
    scores = make_scores((1, 1, 5, length), dtype, device)
    mask = random_mask((1, 1, 1, length), device)
    bias = make_scores((5, length), dtype, device, size=0.1)
    grad = upstream(scores)
    plain = check(softmax, scores, scale=0.5)
    right = check(softmax, scores, mask, 0.5, True, bias=bias, grad_probs=grad)
    for offset in range(8):
        moved = at_offset(scores, offset)
        assert torch.equal(softmax(moved, scale=0.5), plain)
        got = check(
            softmax,
            moved,
            at_offset(mask, 2 * offset + 1),
            0.5,
            True,
            bias=at_offset(bias, (3 * offset) % 8),
            grad_probs=at_offset(grad, (5 * offset) % 8),
        )
        assert torch.equal(got, right)


@pytest.mark.parametrize("length", [64, 65, 130])
def test_offsets_of_bool_masks(device: str, length: int) -> None:
    scores = make_scores((2, 4, length), torch.float16, device)
    for shape in ((length,), (4, length), (2, 4, length)):
        mask = random_mask(shape, device)
        right = check(softmax, scores, mask)
        for offset in range(1, 16):
            assert torch.equal(softmax(scores, at_offset(mask, offset)), right)


@pytest.mark.parametrize("term_dtype", DTYPES, ids=str)
def test_offsets_of_float_terms(device: str, term_dtype: torch.dtype) -> None:
    scores = make_scores((2, 4, 67), torch.bfloat16, device)
    term = make_scores((4, 67), term_dtype, device, size=0.1)
    right = check(softmax, scores, term, bias=term)
    for offset in range(1, 8):
        moved = at_offset(term, offset)
        assert torch.equal(softmax(scores, moved, bias=at_offset(term, 8 - offset)), right)


def test_transposed_bias_table(device: str) -> None:
    """A relative-position table is stored (Tq, Tk, H) and read as (H, Tq, Tk), not copied."""
    table = make_scores((6, 10, 3), torch.float32, device, size=0.1)
    bias = table.permute(2, 0, 1)
    scores = make_scores((2, 3, 6, 10), torch.float32, device)
    right = check(softmax, scores, bias=bias.contiguous())
    assert torch.equal(check(softmax, scores, bias=bias), right)


def test_neighbours_are_not_written(device: str) -> None:
    """What lies before and after a slice in memory stays as it was."""
    for dtype in DTYPES:
        buffer = make_scores((40 * 9,), dtype, device)
        before = buffer.clone()
        inside = buffer[3 : 3 + 4 * 67].view(4, 67).requires_grad_()
        probs = softmax(inside, is_causal=True)
        torch.autograd.grad(probs, inside, upstream(probs))
        assert torch.equal(buffer, before)

"""Gradients of scores, bias and float masks: against the yardstick, differences, and at zeros.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CASES, make_case, make_scores, random_mask
from compare import DTYPES, compare_grads, exact_probs, upstream
from torch import Tensor

import sms_plugin

Check = Callable[..., Tensor]
softmax = sms_plugin.scaled_mask_softmax

# Shapes of a learned term for scores (2, 3, 4, 5): none of them is expanded in memory.
TERM_SHAPES = [
    (), (5,), (4, 1), (4, 5), (1, 1, 5), (3, 1, 5), (3, 4, 5), (2, 1, 1, 5), (2, 1, 4, 5),
    (1, 3, 4, 1), (1, 3, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5),
]  # fmt: skip


@pytest.mark.parametrize("length", [16, 77, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(check: Check, device: str, case: str, dtype: torch.dtype, length: int) -> None:
    check(**make_case(case, 2, 3, length, length, dtype, device))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1 / 3, 40.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(check: Check, device: str, dtype: torch.dtype, scale: float) -> None:
    """The gradient of the bias isn't multiplied by the scale, nor got by dividing by it."""
    scores = make_scores((2, 3, 6, 40), dtype, device, size=1 / (abs(scale) or 1))
    bias = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    check(scores, None, scale, bias=bias)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", TERM_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_learned_term(
    check: Check, device: str, dtype: torch.dtype, shape: tuple[int, ...], name: str
) -> None:
    term = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if term.dim() > 0:
        term.flatten()[0] = -torch.inf
    check(make_scores((2, 3, 4, 5), dtype, device), scale=0.3, **{name: term})


@pytest.mark.parametrize("term_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_term_of_another_dtype(
    check: Check, device: str, dtype: torch.dtype, term_dtype: torch.dtype
) -> None:
    """Its gradient has its own dtype, and is summed in float32 before it is rounded to it."""
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn((1, 3, 7, 19), generator=generator).to(device, term_dtype)
    mask = torch.randn((5, 1, 1, 19), generator=generator).to(device, term_dtype)
    check(make_scores((5, 3, 7, 19), dtype, device), mask, 0.5, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1, 4, 1, 1), (64,), (300, 1, 1, 1), (1, 1, 8, 64)], ids=str)
def test_long_sums(check: Check, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A 16-bit sum of 300 * 4 * 8 rows would stop growing."""
    scores = make_scores((300, 4, 8, 64), dtype, device)
    check(scores, scale=0.5, bias=torch.zeros(shape, dtype=dtype, device=device))


def test_both_terms_with_causality(check: Check, device: str) -> None:
    for is_causal in (False, True):
        mask = torch.randn(2, 1, 1, 9, generator=torch.Generator().manual_seed(4))
        mask[1, ..., 6:] = -torch.inf
        bias = torch.randn(3, 7, 9, generator=torch.Generator().manual_seed(5))
        scores = make_scores((2, 3, 7, 9), torch.float32, device)
        check(scores, mask.to(device), 0.5, is_causal, bias=bias.to(device))


def test_bool_mask_with_learned_bias(check: Check, device: str) -> None:
    mask = random_mask((2, 1, 7, 9), device)
    mask[0, :, 3] = True  # a dead row
    bias = torch.randn(3, 7, 9, generator=torch.Generator().manual_seed(5)).to(device)
    check(make_scores((2, 3, 7, 9), torch.float32, device), mask, 0.5, True, bias=bias)


@pytest.mark.parametrize("wanted", ["scores", "mask", "bias"])
def test_only_one_input_wants_a_gradient(device: str, wanted: str) -> None:
    generator = torch.Generator().manual_seed(6)
    inputs = {
        "scores": torch.randn(2, 3, 4, 5, generator=generator),
        "mask": torch.randn(2, 1, 1, 5, generator=generator),
        "bias": torch.randn(3, 4, 5, generator=generator),
    }
    inputs = {name: value.to(device) for name, value in inputs.items()}
    exact = exact_probs(**inputs, scale=0.3)
    inputs[wanted].requires_grad_()
    probs = softmax(**inputs, scale=0.3)
    grad = upstream(probs)
    probs.backward(grad)
    assert [name for name, value in inputs.items() if value.grad is not None] == [wanted]
    got = inputs[wanted].grad
    assert got.shape == inputs[wanted].shape
    if wanted == "scores":
        found = compare_grads(grad, exact, 0.3, grad_scores=got)
    else:
        found = compare_grads(grad, exact, 0.3, additive=[(wanted, inputs[wanted], got)])
    for comparison in found:
        comparison.demand()


def test_nothing_wants_a_gradient(device: str) -> None:
    scores = torch.randn(3, 4, device=device)
    assert not softmax(scores).requires_grad
    assert not softmax(scores, bias=torch.zeros(4, device=device)).requires_grad
    with torch.no_grad():
        assert not softmax(scores.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        assert softmax(scores).is_inference()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_gradient_at_a_removed_key_is_never_read(
    check: Check, device: str, dtype: torch.dtype, bad: float
) -> None:
    """entr(probs) and log(probs) have infinite gradients exactly where probs is 0."""
    scores = make_scores((6, 33), dtype, device)
    mask = random_mask((6, 33), device)
    mask[2] = True
    grad = upstream(scores).masked_fill(mask, bad)
    additive = sms_plugin.additive_mask(mask, dtype)
    bias = torch.zeros(33, dtype=dtype, device=device)
    for term in (mask, additive):
        check(scores, term, 0.5, bias=bias, grad_probs=grad)


def test_gradient_where_probs_underflowed(device: str) -> None:
    scores = torch.tensor([[0.0, -1000, 1]], device=device, requires_grad=True)
    probs = softmax(scores)
    assert probs[0, 1] == 0
    (got,) = torch.autograd.grad(probs, scores, torch.tensor([[1.0, torch.inf, 2]], device=device))
    assert got[0, 1] == 0
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("loss", [torch.special.entr, torch.log], ids=["entr", "log"])
def test_entropy_and_log_losses_are_finite(device: str, loss: Callable[[Tensor], Tensor]) -> None:
    scores = make_scores((2, 5, 8), torch.float32, device).requires_grad_()
    bias = torch.zeros(5, 8, device=device, requires_grad=True)
    values = loss(softmax(scores, is_causal=True, bias=bias))
    weights = upstream(values)
    kept = torch.ones(5, 8, dtype=torch.bool, device=device).tril(3)
    got = torch.autograd.grad((values.masked_fill(~kept, 0) * weights).sum(), [scores, bias])
    through_zeros = torch.autograd.grad(
        loss(softmax(scores, is_causal=True, bias=bias)), [scores, bias], weights
    )
    for clean, other in zip(got, through_zeros, strict=True):
        assert bool(clean.isfinite().all())
        torch.testing.assert_close(clean, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_incoming_gradient_of_any_layout(check: Check, device: str, dtype: torch.dtype) -> None:
    scores = make_scores((4, 6, 70), dtype, device)
    dense = upstream(torch.empty(70, 6, 4, dtype=dtype, device=device))
    buffer = upstream(torch.empty(4 * 6 * 70 + 8, dtype=dtype, device=device))
    check(scores, grad_probs=dense.permute(2, 1, 0))
    check(scores, grad_probs=dense[:, :1, :1].permute(2, 1, 0).expand(4, 6, 70))
    check(scores, grad_probs=dense[:1].permute(2, 1, 0).expand(4, 6, 70))
    for offset in range(1, 8):
        check(scores, grad_probs=buffer[offset : offset + 4 * 6 * 70].view(4, 6, 70))


def test_dead_row_poisons_no_weight(device: str) -> None:
    """The gradients of a layer are those of the batch without the dead query."""
    generator = torch.Generator().manual_seed(8)
    layer = torch.nn.Linear(8, 8).to(device)
    queries = torch.randn(2, 4, 8, generator=generator).to(device)
    keys = torch.randn(2, 4, 8, generator=generator).to(device)
    weights = torch.randn(2, 4, 4, generator=generator).to(device)
    mask = torch.zeros(4, 4, dtype=torch.bool, device=device)
    mask[1] = True
    alive = [0, 2, 3]

    def grads(rows: list[int], lost: list[int]) -> tuple[Tensor, ...]:
        scores = layer(queries)[:, rows] @ layer(keys).transpose(-1, -2)
        probs = softmax(scores, mask[rows], 8**-0.5)
        loss = (probs * weights[:, rows])[:, lost].sum()
        return torch.autograd.grad(loss, list(layer.parameters()))

    got, right = grads([0, 1, 2, 3], alive), grads(alive, [0, 1, 2])
    for g, r in zip(got, right, strict=True):
        assert bool(g.isfinite().all())
        torch.testing.assert_close(g, r, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["additive", "bool"])
def test_gradcheck(device: str, kind: str, is_causal: bool) -> None:
    mask = random_mask((2, 1, 3, 4), device)
    term = sms_plugin.additive_mask(mask, torch.float64) if kind == "additive" else mask
    bias = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    scores = torch.randn(2, 2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)

    def function(scores: Tensor, bias: Tensor) -> Tensor:
        return softmax(scores, term, 0.7, is_causal, bias=bias)

    assert torch.autograd.gradcheck(function, (scores, bias))
    assert torch.autograd.gradgradcheck(function, (scores, bias))

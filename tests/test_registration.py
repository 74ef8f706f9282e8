"""What torch checks of a registered operator, and what this project promises of its two.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, compare_grads, exact_probs, upstream
from torch import Tensor

import sms_plugin

forward_op = torch.ops.sms_plugin.scaled_mask_softmax.default
backward_op = torch.ops.sms_plugin.scaled_mask_softmax_backward.default

LAYOUTS = ["contiguous", "transposed", "expanded", "sliced"]


def layout(name: str, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scores (2, 3, 4, 6)."""
    if name == "transposed":
        return make_scores((2, 4, 3, 6), dtype, device).transpose(1, 2)
    if name == "expanded":
        return make_scores((2, 1, 4, 6), dtype, device).expand(2, 3, 4, 6)
    if name == "sliced":
        return make_scores((2, 3, 4, 9), dtype, device)[..., 1:7]
    return make_scores((2, 3, 4, 6), dtype, device)


def terms(name: str, device: str) -> tuple[Tensor | None, Tensor | None]:
    mask: Tensor | None = None
    bias: Tensor | None = None
    if name in ("bool", "bool and bias"):
        mask = random_mask((2, 1, 1, 6), device)
    if name in ("float", "float and bias"):
        mask = make_scores((4, 6), torch.float32, device, size=0.1).requires_grad_()
    if name.endswith("bias"):
        bias = make_scores((3, 1, 6), torch.float32, device, size=0.1).requires_grad_()
    return mask, bias


@pytest.mark.parametrize(
    "name", ["none", "bool", "float", "bias", "bool and bias", "float and bias"]
)
@pytest.mark.parametrize("form", LAYOUTS)
def test_opcheck_forward(device: str, form: str, name: str) -> None:
    scores = layout(form, device).detach().requires_grad_()
    mask, bias = terms(name, device)
    torch.library.opcheck(forward_op, (scores, mask, bias, 0.5, name != "bool"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_dtypes(device: str, dtype: torch.dtype) -> None:
    scores = layout("contiguous", device, dtype).requires_grad_()
    torch.library.opcheck(forward_op, (scores, None, scores[0, 0].detach(), 0.5, False))


@pytest.mark.parametrize("wanted", ["none", "mask", "bias", "both"])
@pytest.mark.parametrize("form", LAYOUTS)
def test_opcheck_backward(device: str, form: str, wanted: str) -> None:
    probs = forward_op(layout("contiguous", device), None, None, 0.5, False).requires_grad_()
    grad = layout(form, device).detach().requires_grad_()
    mask_dtype = torch.float32 if wanted in ("mask", "both") else None
    bias_dtype = torch.bfloat16 if wanted in ("bias", "both") else None
    arguments = (grad, probs, 0.5, False, [4, 6], mask_dtype, [3, 1, 6], bias_dtype)
    torch.library.opcheck(backward_op, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_operator_alone(device: str, dtype: torch.dtype) -> None:
    """From given probs; a gradient that isn't wanted comes back empty, in the dtype of probs."""
    scores = make_scores((2, 3, 4, 6), dtype, device)
    probs = forward_op(scores, None, None, 0.5, False)
    grad = upstream(probs)
    grad_scores, grad_mask, grad_bias = backward_op(
        grad, probs, 0.5, False, [2, 1, 1, 6], torch.float64, [], None
    )
    assert (tuple(grad_bias.shape), grad_bias.dtype) == ((0,), dtype)
    exact = exact_probs(scores, None, 0.5)
    mask = torch.zeros(2, 1, 1, 6, dtype=torch.float64)
    for comparison in compare_grads(
        grad, exact, 0.5, saved=probs, grad_scores=grad_scores, additive=[("mask", mask, grad_mask)]
    ):
        comparison.demand()


def test_schemas() -> None:
    assert str(forward_op._schema) == (
        "sms_plugin::scaled_mask_softmax(Tensor scores, Tensor? mask, Tensor? bias, float scale, "
        "bool is_causal) -> Tensor"
    )
    for op in (forward_op, backward_op):
        assert not op._schema.is_mutable


@pytest.mark.parametrize("form", LAYOUTS)
def test_meta_tensors(form: str) -> None:
    scores = layout(form, "cpu").to("meta").requires_grad_()
    bias = torch.zeros(3, 1, 6, device="meta", requires_grad=True)
    probs = sms_plugin.scaled_mask_softmax(scores, is_causal=True, bias=bias)
    assert probs.is_meta
    assert probs.is_contiguous()
    assert (probs.shape, probs.dtype) == (scores.shape, scores.dtype)
    grads = torch.autograd.grad(probs, [scores, bias], torch.empty_like(probs))
    assert [g.shape for g in grads] == [scores.shape, bias.shape]


def test_meta_of_the_largest_shapes() -> None:
    scores = torch.empty(64, 128, 8192, 8192, device="meta", dtype=torch.bfloat16)
    assert sms_plugin.scaled_mask_softmax(scores, is_causal=True).shape == scores.shape


def counts(device: str) -> tuple[int, int]:
    found = sms_plugin.call_counts()
    return found["scaled_mask_softmax"][device], found["scaled_mask_softmax_backward"][device]


def test_call_counts(device: str) -> None:
    """One call a forward, one a backward with all gradients; none from other implementations."""
    scores = make_scores((2, 3, 4, 6), torch.float32, device).requires_grad_()
    bias = torch.zeros(3, 1, 6, device=device, requires_grad=True)
    mask = random_mask((2, 1, 1, 6), device)
    sms_plugin.scaled_mask_softmax(scores)  # the library is loaded
    other = "cuda" if device == "cpu" else "cpu"
    before, before_other = counts(device), counts(other)
    probs = sms_plugin.scaled_mask_softmax(scores, mask, 0.5, True, bias=bias)
    assert counts(device) == (before[0] + 1, before[1])
    torch.autograd.grad(probs, [scores, bias], upstream(probs))
    assert counts(device) == (before[0] + 1, before[1] + 1)
    assert counts(other) == before_other
    for impl in ("native", "reference"):
        sms_plugin.ScaledMaskSoftmax(impl)(scores, mask)
    assert counts(device) == (before[0] + 1, before[1] + 1)


def test_call_counts_have_the_promised_form() -> None:
    found = sms_plugin.call_counts()
    assert set(found) == {"scaled_mask_softmax", "scaled_mask_softmax_backward"}
    for by_device in found.values():
        assert set(by_device) == {"cpu", "cuda"}
        assert all(type(count) is int for count in by_device.values())
    assert "graph" in (sms_plugin.call_counts.__doc__ or "")


def test_calls_from_many_threads(device: str) -> None:
    scores = make_scores((4, 5, 40), torch.float32, device)
    right = sms_plugin.scaled_mask_softmax(scores, is_causal=True)
    before = counts(device)[0]
    results: list[Any] = [None] * 8

    def work(index: int) -> None:
        for _ in range(10):
            results[index] = sms_plugin.scaled_mask_softmax(scores, is_causal=True)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, right) for result in results)
    assert counts(device)[0] == before + 80

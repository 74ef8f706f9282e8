"""The same bits from run to run, and a row whose bits don't depend on the company it is in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import CASES, make_case, make_scores, random_mask
from compare import DTYPES, upstream
from torch import Tensor

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax

LENGTHS = [1, 3, 7, 8, 17, 31, 33, 64, 100, 127, 129, 255, 256, 385, 1000, 1023, 1025, 2049]
LONG = [4097, 8192, 16385, 65537, 131072]


def forward_and_backward(scores: Tensor, grad: Tensor, **arguments: object) -> list[Tensor]:
    """[probs, grad_scores]"""
    scores = scores.detach().requires_grad_()
    probs = softmax(scores, **arguments)  # type: ignore[arg-type]
    return [probs.detach(), *torch.autograd.grad(probs, scores, grad)]


def same(got: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(g.flatten(), r.flatten()) for g, r in zip(got, right, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_run_to_run(device: str, case: str, dtype: torch.dtype) -> None:
    """Probs and all gradients; the sum of a bias gradient over many rows has a fixed order too."""
    arguments = make_case(case, 5, 3, 65, 65, dtype, device)
    arguments["scores"].requires_grad_()
    arguments["bias"] = torch.zeros(3, 1, 65, dtype=dtype, device=device)
    wanted = [arguments["scores"], arguments["bias"].requires_grad_()]
    if case == "additive":
        wanted.append(arguments["mask"].requires_grad_())

    def run() -> list[Tensor]:
        probs = softmax(**arguments)
        return [probs, *torch.autograd.grad(probs, wanted, upstream(probs))]

    first = run()
    for _ in range(4):
        assert same(run(), first)


@pytest.mark.parametrize(
    "shape", [(), (1, 1, 1, 33), (1, 8, 1, 1), (1, 8, 128, 33), (64, 1, 1, 33)]
)
def test_bias_gradient_run_to_run(device: str, shape: tuple[int, ...]) -> None:
    scores = make_scores((64, 8, 128, 33), torch.bfloat16, device)
    bias = torch.zeros(shape, device=device, requires_grad=True)
    grad = upstream(scores)
    runs = [torch.autograd.grad(softmax(scores, bias=bias), bias, grad)[0] for _ in range(4)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def companies(row: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(where it lies, the row (Tk,) there): alone, at every alignment, and as a column."""
    length = row.shape[-1]
    yield "alone", row
    yield "alone in four dimensions", row.view(1, 1, 1, length)
    for offset in range(1, 8):
        buffer = row.new_zeros(length + offset)
        buffer[offset:] = row
        yield f"at offset {offset}", buffer[offset:]
    buffer = row.new_zeros(length, 3)
    buffer[:, 1] = row
    yield "in a column", buffer[:, 1]


@pytest.mark.parametrize("length", LENGTHS + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_alone(device: str, dtype: torch.dtype, length: int) -> None:
    row = make_scores((3, length), dtype, device, seed=length)[2]
    grad = upstream(row)
    right = forward_and_backward(row, grad, scale=0.5)
    for place, view in companies(row):
        got = forward_and_backward(view, grad.view(view.shape), scale=0.5)
        assert same(got, right), place
    for place, view in companies(grad):
        if view.dim() == 1:
            assert same(forward_and_backward(row, view, scale=0.5), right), f"gradient {place}"


@pytest.mark.parametrize("length", LENGTHS + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_among_others(device: str, dtype: torch.dtype, length: int) -> None:
    """Each row of a batch has the bits that it has alone, for few rows and for many."""
    counts = (2, 3, 13, 700) if length <= 256 else (2, 3, 13) if length <= 8192 else (2, 5)
    for count in counts:
        scores = make_scores((count, length), dtype, device, seed=count)
        grad = upstream(scores)
        probs, grad_scores = forward_and_backward(scores, grad, scale=0.5)
        for index in sorted({0, 1, count // 2, count - 2, count - 1}):
            alone = forward_and_backward(scores[index].clone(), grad[index].clone(), scale=0.5)
            assert same(alone, [probs[index], grad_scores[index]]), f"row {index} of {count}"


@pytest.mark.parametrize("length", [7, 64, 130, 1000, 1025, 4097])
@pytest.mark.parametrize("kind", ["bool", "float", "bias", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_row_among_others(device: str, dtype: torch.dtype, kind: str, length: int) -> None:
    """Whether the mask is the row's own or shared by all doesn't matter either."""
    scores = make_scores((2, 3, 5, length), dtype, device)
    grad = upstream(scores)
    shared: dict[str, Tensor] = {}
    if kind in ("bool", "both"):
        shared["mask"] = random_mask((2, 1, 5, length), device)
    if kind == "float":
        shared["mask"] = make_scores((2, 1, 1, length), dtype, device, seed=2, size=0.1)
    if kind in ("bias", "both"):
        shared["bias"] = make_scores((3, 5, length), torch.float32, device, seed=3, size=0.1)
    probs, grad_scores = forward_and_backward(scores, grad, scale=0.5, **shared)
    for b, h, i in ((0, 0, 0), (1, 2, 4), (0, 1, 3), (1, 0, 2)):
        own = {n: t.expand(2, 3, 5, length)[b, h, i].clone() for n, t in shared.items()}
        alone = forward_and_backward(scores[b, h, i].clone(), grad[b, h, i], scale=0.5, **own)
        assert same(alone, [probs[b, h, i], grad_scores[b, h, i]]), (b, h, i)


@pytest.mark.parametrize("length", [5, 64, 130, 257, 1000, 1025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_row_among_others(device: str, dtype: torch.dtype, length: int) -> None:
    """The last rows of a causal square are those of a short query block: cached decoding."""
    scores = make_scores((2, length, length), dtype, device)
    grad = upstream(scores)
    right = forward_and_backward(scores, grad, scale=0.5, is_causal=True)
    for queries in (1, 3, length // 2):
        few = forward_and_backward(
            scores[:, -queries:], grad[:, -queries:], scale=0.5, is_causal=True
        )
        assert same(few, [part[:, -queries:] for part in right]), queries


@pytest.mark.parametrize("length", [33, 1000, 16385])
def test_other_rows_values_do_not_matter(device: str, length: int) -> None:
    for dtype in DTYPES:
        scores = make_scores((6, length), dtype, device)
        right = softmax(scores)[2]
        scores[[0, 1, 3, 4, 5]] = torch.nan
        assert torch.equal(softmax(scores)[2], right)


@pytest.mark.parametrize("length", [33, 1025, 16385])
def test_threads_do_not_matter(length: int) -> None:
    scores = make_scores((50, length), torch.float32)
    grad = upstream(scores)
    bias = torch.zeros(length, requires_grad=True)

    def run() -> list[Tensor]:
        grad_bias = torch.autograd.grad(softmax(scores, bias=bias), bias, grad)[0]
        return [*forward_and_backward(scores, grad), grad_bias]

    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("length", [*LENGTHS, 49, 63, 343, 4097, 20_000, 33_003, 70_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_order_of_summation(device: str, dtype: torch.dtype, length: int) -> None:
    """Terms that add nothing take other kernels, and change no bit."""
    shape = (2, 3, 5, length) if length < 10_000 else (2, length)
    scores = make_scores(shape, dtype, device)
    grad = upstream(scores)
    right = forward_and_backward(scores, grad)
    zeros = torch.zeros(shape[-2:], dtype=dtype, device=device)
    for terms in (
        {"mask": zeros.bool()},
        {"mask": zeros},
        {"mask": zeros.float()},
        {"bias": zeros},
        {"mask": zeros.bool(), "bias": zeros},
        {"mask": zeros, "bias": zeros},
        {"bias": zeros.mT.contiguous().mT},  # columns with a stride
    ):
        assert same(forward_and_backward(scores, grad, **terms), right), terms.keys()


@pytest.mark.parametrize("length", [1, 7, 8, 49, 63, 70, 127, 128, 343, 1000, 1023, 4097])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_wanted_do_not_matter(device: str, dtype: torch.dtype, length: int) -> None:
    """grad_scores has the same bits whether a bias gradient is asked for or not."""
    scores = make_scores((4, 3, 9, length), dtype, device).requires_grad_()
    grad = upstream(scores)
    alone = torch.autograd.grad(softmax(scores), scores, grad)[0]
    for shape in ((3, 9, length), (4, 3, 9, length), (9, 1)):
        bias = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        both = torch.autograd.grad(softmax(scores, bias=bias), [scores, bias], grad)
        assert torch.equal(both[0], alone), shape

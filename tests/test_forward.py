"""Values of the forward operator: against the yardstick, and known faults by their numbers.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from cases import CASES, make_case, make_scores, padding_mask
from compare import DTYPES, compare_probs, exact_probs
from torch import Tensor

import sms_plugin

Check = Callable[..., Tensor]


@pytest.mark.parametrize("length", [16, 77, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases(check: Check, device: str, case: str, dtype: torch.dtype, length: int) -> None:
    check(**make_case(case, 2, 3, length, length, dtype, device), backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_articles_shape(check: Check, device: str, dtype: torch.dtype) -> None:
    """[2, 4, 128, 128] with an additive causal mask, and with the flag: the same probabilities."""
    arguments = make_case("causal", 2, 4, 128, 128, dtype, device)
    by_flag = check(**arguments, backward=False)
    future = torch.ones(128, 128, dtype=torch.bool, device=device).triu(1)
    arguments |= {"is_causal": False, "mask": sms_plugin.additive_mask(future, dtype)}
    by_mask = check(**arguments, backward=False)
    assert torch.equal(by_flag == 0, by_mask == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_in_float64_is_the_yardstick(device: str, dtype: torch.dtype) -> None:
    arguments = make_case("causal+mask+bias", 2, 3, 20, 33, dtype, device)
    got = sms_plugin.reference.scaled_mask_softmax(**arguments, dtype=torch.float64)
    assert got.dtype == torch.float64
    right = exact_probs(**arguments).probs.astype(float)
    torch.testing.assert_close(got.cpu(), torch.from_numpy(right), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("offset", [-1e7, 1e7])
def test_a_common_offset_changes_nothing(check: Check, device: str, offset: float) -> None:
    scores = torch.tensor([0.0, 1, 2], device=device) + offset
    probs = check(scores, exact_z=True)
    torch.testing.assert_close(
        probs.cpu(), torch.tensor([0.0900305732, 0.2447284711, 0.6652409558]), rtol=1e-6, atol=0
    )


def test_large_positive_bias_does_not_overflow(check: Check, device: str) -> None:
    bias = torch.tensor([2000.0, 1999], device=device)
    right = torch.tensor([0.7310585786, 0.2689414214])
    for arguments in ({"bias": bias}, {"mask": bias}):
        probs = check(torch.zeros(2, device=device), exact_z=True, **arguments)
        torch.testing.assert_close(probs.cpu(), right, rtol=1e-6, atol=0)


def test_float16_at_the_end_of_its_range(check: Check, device: str) -> None:
    scores = torch.tensor([60000.0, 59968], dtype=torch.float16, device=device)
    for scale in (1.0, 2.0):  # twice 60000 is no float16: the scale isn't applied in 16 bits
        assert check(scores, None, scale, exact_z=True).tolist() == [1.0, 0.0]


def test_scaled_scores_are_not_rounded_to_16_bits(check: Check, device: str) -> None:
    scores = torch.tensor([100.0, 100.5], dtype=torch.bfloat16, device=device)
    assert check(scores, None, 0.1).tolist() == [0.48828125, 0.51171875]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_itself_is_not_rounded(check: Check, device: str, dtype: torch.dtype) -> None:
    """0.1 is no bfloat16: rounded, it is off by 0.1 %, which these scores make visible."""
    check(make_scores((8, 100), dtype, device, size=20.0), None, 0.1)
    check(make_scores((8, 100), dtype, device, size=20.0), None, 1 / 3)


def test_negative_scale(check: Check, device: str) -> None:
    scores = torch.tensor([300.0, 299], dtype=torch.float16, device=device)
    assert check(scores, None, -250.0, exact_z=True).tolist() == [0.0, 1.0]
    check(make_scores((4, 50), torch.float32, device), None, -0.7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_zero_is_uniform_over_the_kept(check: Check, device: str, dtype: torch.dtype) -> None:
    scores = torch.tensor([1.0, torch.inf, -3, torch.nan, 7, 0], dtype=dtype, device=device)
    mask = torch.tensor([False, True, False, True, False, False], device=device)
    probs = check(scores, mask, 0.0)  # 0 * inf is never met: selection comes first
    assert probs.tolist() == [0.25, 0, 0.25, 0, 0.25, 0.25]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_does_not_touch_mask_or_bias(check: Check, device: str, dtype: torch.dtype) -> None:
    scores = torch.zeros(2, dtype=dtype, device=device)
    term = torch.tensor([0.0, -10], dtype=dtype, device=device)
    right = torch.tensor([0.9999546021, 0.0000453979]).to(dtype)
    for arguments in ({"mask": term}, {"bias": term}, {"mask": term / 2, "bias": term / 2}):
        probs = check(scores, scale=0.125, **arguments)
        torch.testing.assert_close(probs.cpu(), right)


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        (torch.float16, 4096),
        (torch.bfloat16, 512),
        (torch.float16, 16384),
        (torch.bfloat16, 16384),
        (torch.float16, 65536),
        (torch.float32, 65536),
    ],
    ids=str,
)
def test_the_sum_is_not_kept_in_16_bits(
    check: Check, device: str, dtype: torch.dtype, length: int
) -> None:
    probs = check(torch.zeros(1, 1, 1, length, dtype=dtype, device=device), backward=False)
    assert bool((probs == 1 / length).all())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_long_rows_sum_to_one(check: Check, device: str, dtype: torch.dtype, bound: float) -> None:
    probs = check(make_scores((3, 8192), dtype, device, size=0.3), backward=False)
    assert (probs.double().sum(-1) - 1).abs().max().item() < bound


def test_half_precision_on_the_cpu(check: Check) -> None:
    """A fused module once ran the device kernel on host pointers: rows summed to 1e-5."""
    scores = make_scores((1, 4, 200, 200), torch.float16)
    probs = check(scores, torch.ones(1, 1, 200, 200, dtype=torch.bool).triu(1))
    torch.testing.assert_close(
        probs.double().sum(-1), torch.ones(1, 4, 200, dtype=torch.double), atol=2e-3, rtol=0
    )


def test_result_is_contiguous_and_new(device: str) -> None:
    scores = make_scores((2, 3, 8, 9), torch.float32, device).transpose(1, 2)
    probs = sms_plugin.scaled_mask_softmax(scores)
    assert probs.is_contiguous()
    assert probs.shape == scores.shape
    assert (probs.dtype, probs.device) == (scores.dtype, scores.device)
    assert probs.data_ptr() != scores.data_ptr()


@pytest.mark.parametrize("impl", ["fused", "native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_module_has_the_functions_signature(device: str, case: str, impl: str) -> None:
    arguments = make_case(case, 2, 2, 9, 9, torch.float32, device)
    if arguments.get("mask") is not None:  # the native chain is NaN where no key is left
        arguments["mask"] = arguments["mask"].clone()
        arguments["mask"][..., 0] = 0
    module = sms_plugin.ScaledMaskSoftmax(impl)
    probs = module(**arguments)
    ratio = compare_probs(probs.contiguous(), exact_probs(**arguments)).ratio
    assert ratio <= (8 if impl == "native" else 1)
    assert not list(module.parameters())
    assert not module.state_dict()


def test_module_forward_has_the_functions_parameters() -> None:
    def spelled(function: Callable[..., Tensor]) -> list[tuple[str, object, object]]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in found if p.name != "self"]

    public = spelled(sms_plugin.scaled_mask_softmax)
    assert [name for name, _, _ in public] == ["scores", "mask", "scale", "is_causal", "bias"]
    assert public[-1][1] == inspect.Parameter.KEYWORD_ONLY
    assert spelled(sms_plugin.ScaledMaskSoftmax.forward) == public
    assert spelled(sms_plugin.reference.scaled_mask_softmax)[: len(public)] == public


def test_polarity_of_the_padding_case(device: str) -> None:
    """The tests' own padding masks remove the padding, not the tokens."""
    probs = sms_plugin.scaled_mask_softmax(
        torch.zeros(2, 1, 1, 4, device=device), padding_mask(2, 4, device)
    )
    assert probs[:, 0, 0].tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0]]

"""Each wrong argument: the exception's type, what its text names, and that nothing is launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sms_plugin

Arguments = dict[str, Any]


def scores(shape: tuple[int, ...] = (2, 1, 4, 4)) -> torch.Tensor:
    return torch.zeros(shape)


# name: (arguments made on a device, exception, what the message must name)
CASES: dict[str, tuple[Callable[[str], Arguments], type[Exception], list[str]]] = {
    "integer scores": (
        lambda d: {"scores": torch.zeros(2, 3, dtype=torch.int64, device=d)},
        TypeError,
        ["scores", "float16", "bfloat16", "float32", "float64", "int64"],
    ),
    "bool scores": (
        lambda d: {"scores": torch.zeros(2, 3, dtype=torch.bool, device=d)},
        TypeError,
        ["scores", "float32", "bool"],
    ),
    "complex scores": (
        lambda d: {"scores": torch.zeros(2, 3, dtype=torch.complex64, device=d)},
        TypeError,
        ["scores", "float32", "complex64"],
    ),
    "float8 scores": (
        lambda d: {"scores": torch.zeros(2, 3, device=d).to(torch.float8_e4m3fn)},
        TypeError,
        ["scores", "float32", "float8_e4m3fn"],
    ),
    "scores that are a list": (lambda d: {"scores": [1.0, 2.0]}, TypeError, ["scores", "list"]),
    "0-d scores": (
        lambda d: {"scores": torch.zeros((), device=d)},
        ValueError,
        ["scores", "dimension", "0"],
    ),
    "0-d causal scores": (
        lambda d: {"scores": torch.zeros((), device=d), "is_causal": True},
        ValueError,
        ["scores"],
    ),
    "1-d causal scores": (
        lambda d: {"scores": torch.zeros(5, device=d), "is_causal": True},
        ValueError,
        ["is_causal", "scores", r"\(5,\)", "unsqueeze"],
    ),
    "scale that is a tensor": (
        lambda d: {"scores": scores().to(d), "scale": torch.tensor(0.5, device=d)},
        TypeError,
        ["scale", "number", "[Tt]ensor", "gradient"],
    ),
    "scale that is a parameter": (
        lambda d: {"scores": scores().to(d), "scale": torch.nn.Parameter(torch.ones(1))},
        TypeError,
        ["scale", "number"],
    ),
    "scale that is text": (
        lambda d: {"scores": scores().to(d), "scale": "0.5"},
        TypeError,
        ["scale", "number", "str"],
    ),
    "scale that is None": (
        lambda d: {"scores": scores().to(d), "scale": None},
        TypeError,
        ["scale", "number", "None"],
    ),
    "mask that is a list": (
        lambda d: {"scores": scores().to(d), "mask": [True, False]},
        TypeError,
        ["mask", "tensor", "None", "list"],
    ),
    "bool bias": (
        lambda d: {"scores": scores().to(d), "bias": torch.zeros(4, device=d).bool()},
        TypeError,
        ["bias", "float32", "bool", "mask"],
    ),
    "integer bias": (
        lambda d: {"scores": scores().to(d), "bias": torch.zeros(4, device=d).int()},
        TypeError,
        ["bias", "float32", "int32"],
    ),
    "complex mask": (
        lambda d: {"scores": scores().to(d), "mask": torch.zeros(4, device=d).cfloat()},
        TypeError,
        ["mask", "bool", "float", "complex64"],
    ),
    "empty mask": (
        lambda d: {"scores": scores().to(d), "mask": torch.empty(0, device=d)},
        ValueError,
        ["mask", "empty", r"\(0,\)", r"\(2, 1, 4, 4\)", "None"],
    ),
    "empty bool mask": (
        lambda d: {"scores": scores().to(d), "mask": torch.empty(2, 1, 4, 0, device=d).bool()},
        ValueError,
        ["mask", "empty", "None"],
    ),
    "empty bias": (
        lambda d: {"scores": scores().to(d), "bias": torch.empty(0, device=d)},
        ValueError,
        ["bias", "empty", "None"],
    ),
}
for _dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
    CASES[f"{_dtype} mask"] = (
        lambda d, dtype=_dtype: {
            "scores": scores().to(d),
            "mask": torch.ones(4, device=d).to(dtype),
        },
        TypeError,
        ["mask", "bool", "float", str(_dtype).removeprefix("torch.")],
    )
for _name in ("mask", "bias"):
    for _shape, _term_shape in (
        ((1, 1, 4, 4), (3, 1, 4, 4)),
        ((2, 1, 4, 4), (2, 8, 4, 4)),
        ((2, 1, 4, 4), (4, 5)),
        ((2, 1, 4, 4), (3,)),
        ((2, 1, 4, 4), (1, 2, 1, 4, 4)),
        ((4, 4), (1, 4, 4)),
        ((4,), (4, 1)),
        ((2, 1, 4, 1), (4,)),
        ((0, 4), (2, 4)),
        ((2, 0), (3,)),
    ):
        CASES[f"{_name} {_term_shape} for {_shape}"] = (
            lambda d, name=_name, shape=_shape, term=_term_shape: {
                "scores": scores(shape).to(d),
                name: torch.zeros(term, device=d),
            },
            ValueError,
            [_name, re.escape(str(_term_shape)), re.escape(str(_shape)), "broadcast"],
        )


@pytest.mark.parametrize("impl", ["fused", "reference", "native"])
@pytest.mark.parametrize("name", CASES)
def test_wrong_argument(device: str, name: str, impl: str) -> None:
    """Operator, argument, rule, value; from every implementation the same; nothing is launched."""
    make, error, named = CASES[name]
    arguments = make(device)
    before = sms_plugin.call_counts()
    with pytest.raises(error, match="scaled_mask_softmax") as caught:
        sms_plugin.ScaledMaskSoftmax(impl)(**arguments)
    for part in named:
        assert re.search(part, str(caught.value)), f"{part!r} isn't in {caught.value}"
    assert sms_plugin.call_counts() == before


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_mixed_devices(device: str, name: str) -> None:
    other = "meta" if device == "cpu" else "cpu"
    before = sms_plugin.call_counts()
    with pytest.raises(RuntimeError) as caught:
        sms_plugin.scaled_mask_softmax(scores().to(device), **{name: torch.zeros(4, device=other)})
    for part in (name, device, other):
        assert part in str(caught.value)
    assert sms_plugin.call_counts() == before


@pytest.mark.cuda
def test_scores_on_the_cpu_and_mask_on_the_gpu(cuda: str) -> None:
    with pytest.raises(RuntimeError, match=r"cuda.*cpu"):
        sms_plugin.scaled_mask_softmax(scores(), torch.zeros(4, device=cuda))


def test_sparse_scores(device: str) -> None:
    with pytest.raises(TypeError, match="strided"):
        sms_plugin.scaled_mask_softmax(torch.eye(4, device=device).to_sparse())


def test_bias_is_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        sms_plugin.scaled_mask_softmax(scores(), None, 1.0, False, torch.zeros(4))  # type: ignore[misc]


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match=r"fused.*native.*compiled.*reference.*'fuzed'"):
        sms_plugin.ScaledMaskSoftmax("fuzed")


@pytest.mark.parametrize("scale", [2, True + 1, torch.finfo(torch.float32).eps])
def test_any_python_number_is_a_scale(device: str, scale: float) -> None:
    values = torch.randn(3, 4, device=device)
    right = torch.softmax(values * float(scale), -1)
    torch.testing.assert_close(sms_plugin.scaled_mask_softmax(values, scale=scale), right)


def test_wrong_argument_under_transforms(device: str) -> None:
    """The text is about what the user passed, in a transform too."""
    values = torch.randn(5, 3, 4, device=device)
    with pytest.raises(ValueError, match=r"mask.*broadcast"):
        torch.func.vmap(sms_plugin.scaled_mask_softmax)(values, torch.zeros(5, 7, device=device))


def test_a_call_after_an_error_is_right(device: str) -> None:
    values = torch.randn(3, 4, device=device)
    with pytest.raises(ValueError, match="broadcast"):
        sms_plugin.scaled_mask_softmax(values, torch.zeros(7, device=device))
    torch.testing.assert_close(sms_plugin.scaled_mask_softmax(values), values.softmax(-1))

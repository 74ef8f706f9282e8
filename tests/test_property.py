"""Random shapes, strides, offsets, masks, biases and dtypes against the yardstick; seeded.

Legend: scores (..., Tq, Tk); a term broadcasts to them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import DTYPES, check
from torch import Tensor

import sms_plugin

pytest.importorskip("hypothesis", reason="hypothesis isn't installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# More, for an hour of search by hand: SMS_PLUGIN_EXAMPLES=20000 pytest tests/test_property.py
EXAMPLES = int(os.environ.get("SMS_PLUGIN_EXAMPLES", "200"))
MAX_ELEMENTS = 30_000

SIZES = st.sampled_from([1, 1, 2, 3, 5])
LENGTHS = st.one_of(
    st.integers(1, 40),
    st.sampled_from([63, 64, 65, 127, 128, 130, 255, 257, 511, 1000, 1023, 1025]),
)


@dataclass(frozen=True)
class Operand:
    """A tensor to be: its values come from a seed, its place in memory from the rest."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]  # of the dimensions in memory
    expanded: tuple[bool, ...]  # dimensions with stride 0
    gap: int  # elements between rows
    offset: int  # elements before the first
    seed: int
    kind: str  # of values: "normal", "wide", "holes" (with -inf), "bool"

    def make(self, device: str) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        stored = [1 if e else n for n, e in zip(self.shape, self.expanded, strict=True)]
        in_memory = [stored[d] for d in self.order]
        if in_memory:
            in_memory[-1] += self.gap
        count = 1
        for size in in_memory:
            count *= size
        values = torch.randn(count, generator=generator)
        if self.kind == "bool":
            values = values > 0.4
        elif self.kind == "wide":
            values = values * 30
        elif self.kind == "holes":
            values = values.masked_fill(values > 1, -torch.inf)
        buffer = torch.zeros(self.offset + count, dtype=self.dtype, device=device)
        buffer[self.offset :] = values.to(self.dtype).to(device)
        view = buffer[self.offset :].view(in_memory)
        if in_memory:
            view = view[..., : in_memory[-1] - self.gap]
        back = [self.order.index(d) for d in range(len(self.order))]
        return view.permute(back).expand(self.shape)


@st.composite
def operands(draw: Any, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Operand:
    is_plain = draw(st.booleans())
    dims = tuple(range(len(shape)))
    order = dims if is_plain else tuple(draw(st.permutations(dims)))
    expanded = tuple(not is_plain and draw(st.integers(0, 5)) == 0 for _ in dims)
    gap = 0 if is_plain else draw(st.sampled_from([0, 0, 1, 3, 8]))
    offset = draw(st.integers(0, 9))
    return Operand(shape, dtype, order, expanded, gap, offset, draw(st.integers(0, 2**20)), kind)


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    leading = draw(st.lists(SIZES, min_size=0, max_size=3))
    shape = (*leading, draw(st.one_of(SIZES, st.integers(1, 20))), draw(LENGTHS))
    while len(shape) > 1 and torch.Size(shape).numel() > MAX_ELEMENTS:
        shape = shape[1:]
    dtype = draw(st.sampled_from(DTYPES))

    def term_shape() -> tuple[int, ...]:
        kept = shape[draw(st.integers(0, len(shape))) :]
        return tuple(1 if draw(st.booleans()) else size for size in kept)

    mask_kind = draw(st.sampled_from(["none", "bool", "bool", "normal", "holes"]))
    mask_dtype = torch.bool if mask_kind == "bool" else draw(st.sampled_from(DTYPES))
    bias_kind = draw(st.sampled_from(["none", "none", "normal", "holes"]))
    call = {
        "scores": draw(operands(shape, dtype, draw(st.sampled_from(["normal", "wide", "holes"])))),
        "mask": None,
        "scale": draw(st.sampled_from([1.0, 0.125, 1 / 3, -0.5, 0.0, 1.7])),
        "is_causal": len(shape) > 1 and draw(st.booleans()),
        "bias": None,
    }
    if call["scale"] == 0.0 and call["scores"].kind == "holes":
        call["scale"] = 1.0  # 0 * -inf is NaN, which other tests are about
    if mask_kind != "none":
        call["mask"] = draw(operands(term_shape(), mask_dtype, mask_kind))
    if bias_kind != "none":
        call["bias"] = draw(operands(term_shape(), draw(st.sampled_from(DTYPES)), bias_kind))
    call["grad_probs"] = draw(operands(shape, dtype, "normal"))
    return call


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(call=calls())
def test_any_call(device: str, call: dict[str, Any]) -> None:
    made = {n: v.make(device) if isinstance(v, Operand) else v for n, v in call.items()}
    check(sms_plugin.scaled_mask_softmax, **made)


@settings(
    max_examples=max(20, EXAMPLES // 5),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(call=calls())
def test_definition_agrees(device: str, call: dict[str, Any]) -> None:
    """The definition in plain PyTorch, held to the independent yardstick on the same calls."""
    made = {n: v.make(device) if isinstance(v, Operand) else v for n, v in call.items()}
    check(sms_plugin.reference.scaled_mask_softmax, **made, saves_probs=False)

"""The order in which rows that share a row of a mask are worked on: each row once, with its own
operands. Compiled for the host; no GPU needed."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
import torch
from cases import make_scores, random_mask
from checkouts import needs_compiler

import sms_plugin
from sms_plugin.recipe import source_folder
from sms_plugin.toolchain import find_compiler

PROGRAM = r"""
#include <cstdio>
#include <vector>

#include "cuda/row_order.h"

using namespace sms_plugin;

// Reads: value size, cols, dimensions, then size and both strides of each, outermost first.
// Prints "moved" or "kept", and how many rows are wrong.
int main() {
  long long value_bytes, cols, dims;
  while (std::scanf("%lld %lld %lld", &value_bytes, &cols, &dims) == 3) {
    std::vector<int64_t> shape;
    StridedShape scores, mask;
    for (long long d = 0; d < dims; ++d) {
      long long size, stride, mask_stride;
      if (std::scanf("%lld %lld %lld", &size, &stride, &mask_stride) != 3) return 1;
      shape.push_back(size);
      scores.sizes.push_back(size);
      scores.strides.push_back(stride);
      mask.sizes.push_back(mask_stride == 0 ? 1 : size);
      mask.strides.push_back(mask_stride);
    }
    for (StridedShape* operand : {&scores, &mask}) {
      operand->sizes.push_back(cols);
      operand->strides.push_back(1);
    }
    shape.push_back(cols);
    const RowLayout natural = make_row_layout(shape, {scores, mask, {}}, true);
    RowLayout ordered = natural;
    share_rows(ordered, 1, value_bytes);
    std::vector<char> seen(natural.rows, 0);
    long long wrong = 0;
    bool is_moved = false;
    for (int64_t turn = 0; turn < natural.rows; ++turn) {
      int64_t rest = turn, row = 0, query = 0;
      for (int d = 0; d < ordered.dims; ++d) {
        const int64_t index = rest % ordered.sizes[d];
        rest /= ordered.sizes[d];
        row += index * ordered.row_strides[d];
        query += index * ordered.query_strides[d];
      }
      is_moved = is_moved || row != turn;
      if (row < 0 || row >= natural.rows || seen[row]++ ||
          ordered.offset(0, turn) != natural.offset(0, row) ||
          ordered.offset(1, turn) != natural.offset(1, row) ||
          query != row % natural.sizes[0]) {
        ++wrong;
      }
    }
    std::printf("%s %lld\n", is_moved ? "moved" : "kept", wrong);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_compiler()
    folder = tmp_path_factory.mktemp("row_order")
    (folder / "main.cpp").write_text(PROGRAM)
    command = [*compiler.command, "-std=c++17", "-O1", "-I", str(source_folder()), "main.cpp"]
    subprocess.run([*command, "-o", "program"], cwd=folder, check=True, timeout=120)
    return folder / "program"


def orders(program: Path, problems: list[str]) -> list[list[str]]:
    run = subprocess.run(
        [str(program)], input="\n".join(problems), capture_output=True, text=True, timeout=120
    )
    return [line.split() for line in run.stdout.splitlines()]


def problem(sizes: list[int], shared: list[bool], cols: int, value_bytes: int) -> str:
    """One line for the program: contiguous scores; a mask that is broadcast where `shared`."""
    numbers, stride, mask_stride = [], cols, cols
    for size, is_shared in zip(reversed(sizes), reversed(shared), strict=True):
        numbers.append(f"{size} {stride} {0 if is_shared else mask_stride}")
        stride *= size
        mask_stride *= 1 if is_shared else size
    return f"{value_bytes} {cols} {len(sizes)} " + " ".join(reversed(numbers))


@needs_compiler
def test_rows_that_share_a_mask_are_moved(program: Path) -> None:
    big = problem([2, 4, 2048], [False, True, False], 2048, 2)  # [2, 1, 2048, 2048] for 4 heads
    small = problem([2, 4, 64], [False, True, False], 64, 2)
    padding = problem([8, 4, 2048], [False, True, True], 2048, 2)  # [8, 1, 1, 2048]
    assert orders(program, [big, small, padding]) == [["moved", "0"], ["kept", "0"], ["kept", "0"]]


@needs_compiler
def test_each_row_comes_once_with_its_operands(program: Path) -> None:
    choice = random.Random(3)
    problems = []
    for _ in range(200):
        sizes = [choice.choice([1, 2, 3, 5, 7, 12, 48]) for _ in range(choice.randint(1, 4))]
        shared = [choice.random() < 0.5 for _ in sizes]
        cols = choice.choice([64, 1000, 4096, 100_003, 1 << 20])
        problems.append(problem(sizes, shared, cols, choice.choice([2, 4])))
    results = orders(program, problems)
    assert len(results) == len(problems)
    assert {wrong for _, wrong in results} == {"0"}
    assert {moved for moved, _ in results} == {"moved", "kept"}


@pytest.mark.cuda
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
def test_order_changes_no_bit(cuda: str, kind: str, is_causal: bool) -> None:
    """A mask shared by the heads, large enough to be worked on head by head, and its copies."""
    scores = make_scores((2, 4, 2048, 2048), torch.bfloat16, cuda)
    shape = (1, 4, 2048, 2048) if kind == "bias" else (2, 1, 2048, 2048)
    if kind == "bool":
        term = random_mask(shape, cuda)
    else:
        term = make_scores(shape, torch.bfloat16, cuda, seed=2, size=0.1)
    copies = term.expand(scores.shape).contiguous()
    name = "bias" if kind == "bias" else "mask"
    softmax = sms_plugin.scaled_mask_softmax
    shared = softmax(scores, scale=0.5, is_causal=is_causal, **{name: term})
    own = softmax(scores, scale=0.5, is_causal=is_causal, **{name: copies})
    assert torch.equal(shared, own)

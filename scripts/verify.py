"""The correctness table: is the fused operator right on this machine?

    python scripts/verify.py [--device cpu|cuda] [--out FILE.csv] [--full]

Each case, dtype and length, forward and backward, is compared with an independent float64
computation (longdouble for float64; tests/compare.py). Shown are the largest error, the native
chain's own error, and the largest difference between the two; ok is what keeps the bounds of the
contract. Exits with status 1 if anything doesn't.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT)]

from cases import CASES, make_case  # type: ignore[import-not-found]  # noqa: E402
from compare import (  # type: ignore[import-not-found]  # noqa: E402
    DTYPES,
    compare_grads,
    compare_probs,
    exact_dz,
    exact_probs,
    upstream,
    widen,
)

import sms_plugin  # noqa: E402

# (B, H, Tq, Tk): the article's shape, the usual lengths, odd ones; few queries where rows are long,
# so that the float64 computation takes a minute or two on two cores.
SHAPES = (
    (2, 4, 128, 128),
    (1, 2, 512, 512),
    (1, 1, 512, 1024),
    (1, 1, 256, 2048),
    (3, 5, 1, 1),
    (2, 3, 7, 7),
    (2, 3, 65, 65),
    (1, 2, 129, 385),
    (1, 2, 50, 1000),
    (1, 2, 33, 1023),
    (1, 2, 33, 1025),
)


@dataclass
class Row:
    """One line of the table; errors are absolute."""

    case: str
    dtype: str
    shape: str
    direction: str
    error: float  # of the fused operator against float64
    native_error: float  # of the native chain against float64
    difference: float  # between the two
    of_allowed: float  # the error in units of what the contract allows there; more than 1 fails

    @property
    def passed(self) -> bool:
        return self.of_allowed <= 1


def largest(values: Tensor, right: np.ndarray) -> float:
    """The largest |values - right| where values are numbers: native rows without a key are NaN."""
    error = np.abs(values.detach().cpu().double().numpy() - right)
    error = error[np.isfinite(error)]
    return float(error.max()) if error.size else 0.0


def gradients(softmax: Any, arguments: dict[str, Any], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(probs, gradients of the scores and of each float term)"""
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    probs = softmax(**(arguments | leaves))
    return probs.detach(), list(torch.autograd.grad(probs, list(leaves.values()), grad))


def verify(case: str, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Iterator[Row]:
    """The forward and the backward row of one case."""
    arguments = make_case(case, *shape, dtype, device)
    grad = upstream(arguments["scores"])
    probs, grads = gradients(sms_plugin.scaled_mask_softmax, arguments, grad)
    native, native_grads = gradients(sms_plugin.ScaledMaskSoftmax("native"), arguments, grad)
    exact = exact_probs(**arguments)
    name = str(dtype).removeprefix("torch.")
    size = "x".join(str(n) for n in shape)

    comparison = compare_probs(probs, exact)
    right = exact.probs.astype(float)
    yield Row(
        case, name, size, "forward", largest(probs, right), largest(native, right),
        largest(probs, native.cpu().double().numpy()), comparison.ratio,
    )  # fmt: skip

    terms = [
        (name, arguments[name])
        for name in ("mask", "bias")
        if arguments.get(name) is not None and arguments[name].is_floating_point()
    ]
    # In the order of the leaves: scores first, then as make_case put them.
    order = [n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()]
    by_name = dict(zip(order, grads, strict=True))
    comparisons = compare_grads(
        grad,
        exact,
        arguments["scale"],
        saved=probs,
        grad_scores=by_name["scores"],
        additive=[(n, term, by_name[n]) for n, term in terms],
    )
    dz, _ = exact_dz(widen(grad, dtype), exact.probs)
    right = (arguments["scale"] * dz).astype(float)
    native_by_name = dict(zip(order, native_grads, strict=True))
    native_scores = native_by_name["scores"]
    yield Row(
        case, name, size, "backward", largest(by_name["scores"], right),
        largest(native_scores, right),
        largest(by_name["scores"], native_scores.cpu().double().numpy()),
        max(c.ratio for c in comparisons),
    )  # fmt: skip


def summarised(rows: list[Row]) -> list[Row]:
    """The worst of all shapes for each case, dtype and direction."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.dtype, row.direction), []).append(row)
    return [
        Row(
            case, dtype, f"{len(group)} shapes", direction,
            max(r.error for r in group), max(r.native_error for r in group),
            max(r.difference for r in group), max(r.of_allowed for r in group),
        )
        for (case, dtype, direction), group in groups.items()
    ]  # fmt: skip


COLUMNS = ("case", "dtype", "shape", "direction", "error", "native", "difference", "of allowed", "")


def cells(row: Row) -> list[str]:
    numbers = (row.error, row.native_error, row.difference)
    verdict = "ok" if row.passed else "FAILED"
    words = [row.case, row.dtype, row.shape, row.direction]
    return [*words, *(f"{n:.1e}" for n in numbers), f"{row.of_allowed:.2f}", verdict]


def show(rows: list[Row]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        for line in (COLUMNS, *(cells(row) for row in rows)):
            print("".join(f"{cell:<17}" for cell in line).rstrip())
        return
    table = Table(*COLUMNS, title="largest absolute errors", title_justify="left")
    for row in rows:
        table.add_row(*cells(row), style=None if row.passed else "bold red")
    # A terminal's width where there is one; a log gets whole lines.
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def write(rows: list[Row], path: Path, machine: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        names = ["machine", "torch", *(field.name for field in fields(Row)), "passed"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        about = {"machine": machine, "torch": torch.__version__}
        for row in rows:
            writer.writerow({**about, **asdict(row), "passed": row.passed})


def main() -> int:
    parser = argparse.ArgumentParser(description="The correctness table of scaled_mask_softmax.")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="write every row there")
    parser.add_argument("--full", action="store_true", help="show every shape, not the worst")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: torch.cuda.is_available() is False; use --device cpu")
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"sms_plugin of {Path(sms_plugin.__file__).parent}, torch {torch.__version__}, {machine}")

    start = time.monotonic()
    rows = [
        row
        for dtype in DTYPES
        for case in CASES
        for shape in SHAPES
        for row in verify(case, dtype, shape, options.device)
    ]
    show(rows if options.full else summarised(rows))
    if options.out:
        write(rows, options.out, machine)
    failed = [row for row in rows if not row.passed]
    for row in failed:
        print("FAILED: " + ", ".join(cells(row)[:-1]))
    took = f"{time.monotonic() - start:.0f} s on {options.device}"
    print(
        f"{len(rows) - len(failed)} of {len(rows)} comparisons within the contract's bounds, {took}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

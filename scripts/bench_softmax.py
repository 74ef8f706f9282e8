"""The speed of the softmax: every case and length, as a fraction of what the memory can do.

    python scripts/bench_softmax.py --device cuda --out FILE.csv [--quick] [--part K/N]
                                    [--only PATTERN] [--systems fused,native,...]
    python scripts/bench_softmax.py --merge PART.csv PART.csv ... --out FILE.csv

GPU: CUDA events around each call, ten calls to warm up, a hundred timed, their 20th, 50th and 80th
percentile; cold operands of 256 MB or more, or in rotation. The roof of a cell is the fastest of
several streams that read and write as many bytes, in the same run. CPU: forward + backward, the
systems and the bound in turn. Other systems (scripts/benchmarks/systems.py) run in the same cells
where they can; what can't be imported is skipped with a line that says so.

The CSV is written after each cell: a run that is cut off leaves what it has measured. Exits with
status 1 if gradients of a learned bias weren't repeatable, or if the operator failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

from scripts.benchmarks import cuda_library, softmax_summary, systems  # noqa: E402
from scripts.benchmarks.cells import Cell, cpu_cells, cuda_cells  # noqa: E402
from scripts.benchmarks.command import (  # noqa: E402
    join,
    parse_out,
    parse_part,
    select,
    stopped,
)
from scripts.benchmarks.record import COLUMNS, Recorder  # noqa: E402
from scripts.benchmarks.roofs import Roofs  # noqa: E402
from scripts.benchmarks.softmax_run import SoftmaxRun, measure_on_cpu  # noqa: E402
from scripts.benchmarks.timing import wake_up  # noqa: E402

ROUNDS, QUICK_ROUNDS = 100, 30
CPU_ROUNDS, QUICK_CPU_ROUNDS = 25, 5
QUICK_PEER_LENGTH = 1024
QUICK_SYSTEMS = ("fused", "native")


def parse_systems(text: str) -> tuple[str, ...]:
    """ "native,fused" as ("fused", "native"): fused first, which the others are compared with."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in systems.NAMES]:
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(unknown)}: choose from {', '.join(systems.NAMES)}"
        )
    return tuple(name for name in systems.NAMES if name in names)


def quick_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Every target but float16's; small problems in one dtype, the other system at one length."""
    return [
        replace(
            cell, peers=cell.peers and (cell.length == QUICK_PEER_LENGTH or cell.kind == "host")
        )
        for cell in cells
        if cell.dtype != "float16" and (cell.kind, cell.dtype) != ("latency", "float32")
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The speed of scaled_mask_softmax.")
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if has_gpu else "cpu",
        help="what is measured; a GPU where there is one",
    )
    parser.add_argument(
        "--out", type=parse_out, metavar="FILE.csv", help="in place of what is there"
    )
    parser.add_argument(
        "--quick", action="store_true", help="in a minute: fewer rounds, native at one length only"
    )
    parser.add_argument(
        "--part", type=parse_part, default=(1, 1), metavar="K/N", help="the K-th of N parts"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="cells whose name has it: 'float32 causal'"
    )
    parser.add_argument(
        "--systems", type=parse_systems, metavar="A,B", help=f"of {', '.join(systems.NAMES)}"
    )
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="PART.csv", help="join parts")
    options = parser.parse_args(arguments)
    if options.merge and not options.out:
        parser.error("--merge needs --out FILE.csv, where the parts are joined")
    if options.device == "cuda" and not has_gpu and not (options.list or options.merge):
        parser.error("--device cuda: torch.cuda.is_available() is False; use --device cpu")
    alien = [name for name in options.systems or () if name not in systems.ON_CPU]
    if options.device == "cpu" and alien and not options.list:
        parser.error(
            f"--systems {','.join(alien)}: on a CPU there are {', '.join(systems.ON_CPU)}; the "
            "others need --device cuda"
        )
    return options


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    cells = cuda_cells() if options.device == "cuda" else cpu_cells()
    if options.quick:
        cells = quick_cells(cells)
    return select(cells, [cell.name for cell in cells], options.part, options.only)


def main() -> int:
    options = parse_arguments()
    if options.merge:
        return join(options.merge, options.out, COLUMNS)
    cells = chosen_cells(options)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if not cells:
        print(f"no cell has {options.only!r} in its name; --list names them", file=sys.stderr)
        return 2

    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text, file=sys.stderr, flush=True)

    started = time.monotonic()
    failures: list[str] = []
    with Recorder(options.out, device=options.device) as recorder:
        if options.device == "cuda":
            names = options.systems or (QUICK_SYSTEMS if options.quick else systems.NAMES)
            rounds = QUICK_ROUNDS if options.quick else ROUNDS
            cuda_library.load()  # an error of its compiler ends the run before it has begun
            wake_up()
            run = SoftmaxRun(systems.make_systems(names, say), Roofs(rounds), rounds, say)
            failures = run.failures
            for cell in recorder.track(cells, name=lambda cell: cell.name):
                recorder.add(*run.measure(cell))
        else:
            names = options.systems or QUICK_SYSTEMS
            rounds = QUICK_CPU_ROUNDS if options.quick else CPU_ROUNDS
            chosen = systems.make_systems(names, say)
            for cell in recorder.track(cells, name=lambda cell: cell.name):
                recorder.add(*measure_on_cpu(cell, chosen, rounds))
    verdict = softmax_summary.show(recorder.records, recorder.title)
    print("\n".join(said))  # again, where they aren't between a thousand others
    for failure in failures:
        print(f"FAILED: {failure}")
    seconds = time.monotonic() - started
    print(f"{len(recorder.records)} timings of {len(cells)} cells in {seconds:.0f} s, {verdict}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(stopped(main))

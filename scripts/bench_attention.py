"""Times whole attentions: with a learned bias, beside SDPA and FlexAttention, and in a GPT.

    python scripts/bench_attention.py [--device cuda|cpu] [--out FILE.csv] [--quick]
                                      [--part K/N] [--only PATTERN] [--systems NAME,NAME]
    python scripts/bench_attention.py --merge PART.csv PART.csv ... --out FILE.csv

Forward + backward with random gradients. The attentions ("bias ...") are timed as the softmax is:
CUDA events, the GPU kept busy, cold operands, medians of 100. Their floor is measured beside them:
the six matrix products as torch runs them, plus one pass of the softmax at the speed of a stream.
The GPT ("GPT ...") runs steps one after another, as a training does; lengths that change are those
of `gpt_run.different_lengths`, and compiled models see them without a hint. Seconds to the first
step begin with empty compiler caches; those of changing lengths are until each was seen once.

`--only` takes a pattern of the names that `--list` shows; `--only 'bias*'` and `--only 'GPT*'` are
the two tables. On a CPU everything is small: it shows that this works, not how fast anything is.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from scripts.benchmarks import attention_record, cuda_library, gpt_run  # noqa: E402
from scripts.benchmarks.attention_record import AttentionRecord  # noqa: E402
from scripts.benchmarks.attention_rows import CPU_ROWS, GPU_ROWS, AttentionRow  # noqa: E402
from scripts.benchmarks.attention_run import FLOOR, make_roofs, measure_row  # noqa: E402
from scripts.benchmarks.attention_systems import UNCOMPILED, systems_of  # noqa: E402
from scripts.benchmarks.command import (  # noqa: E402
    join,
    parse_out,
    parse_part,
    select,
    stopped,
)
from scripts.benchmarks.gpt import Size  # noqa: E402
from scripts.benchmarks.record import Recorder  # noqa: E402
from sms_plugin.extension import LibraryUnavailable  # noqa: E402
from sms_plugin.toolchain import BuildError  # noqa: E402

QUICK = ("bias T5 8x12x1024x64 bfloat16", "bias triangle 256x4x256x32 bfloat16", "GPT 1024")


@dataclass(frozen=True)
class Cell:
    """What is measured at once, and begins with the floor or with native."""

    name: str
    run: Callable[[], Iterator[AttentionRecord]]

    def __str__(self) -> str:
        return self.name


def bias_cells(device: str, quick: bool, systems: Sequence[str]) -> list[Cell]:
    rounds = {"cuda": 30 if quick else 100, "cpu": 2}[device]
    roofs = make_roofs(device, rounds)
    cells = []
    for dtype in (torch.bfloat16, torch.float32):
        for row in GPU_ROWS if device == "cuda" else CPU_ROWS:
            chosen = wanted(systems_of(row), systems, quick)
            run = functools.partial(measure_row, row, dtype, device, chosen, rounds, roofs)
            cells.append(Cell(f"bias {row.model} {row.shape} {str(dtype)[6:]}", run))
    return cells


def gpt_cells(device: str, quick: bool, systems: Sequence[str]) -> list[Cell]:
    if device == "cuda":
        size, lengths, changing = Size(), list(gpt_run.LENGTHS), gpt_run.CHANGING_LENGTH
    else:
        size, lengths, changing = gpt_run.CPU_SIZE, [256], 256
    rounds = {"cuda": 8 if quick else 20, "cpu": 2}[device]
    chosen = wanted(tuple(gpt_run.SYSTEMS), systems, quick)

    def run(T: int) -> Iterator[AttentionRecord]:
        tokens = gpt_run.tokens_per_step(T) if device == "cuda" else 2 * T
        for system in chosen:
            yield from gpt_run.measure_gpt(
                T,
                system,
                device,
                size=size,
                tokens=tokens,
                rounds=rounds,
                changing=changing == T and not quick,
            )

    return [Cell(f"GPT {T}", functools.partial(run, T)) for T in lengths]


def wanted(all_of_them: Sequence[str], chosen: Sequence[str], quick: bool) -> list[str]:
    """The systems to time; --quick takes those that need no compiler."""
    names = chosen or (UNCOMPILED if quick else all_of_them)
    return [system for system in all_of_them if system in names]


def known_systems() -> list[str]:
    rows: tuple[AttentionRow, ...] = (*GPU_ROWS, *CPU_ROWS)
    names = [name for row in rows for name in systems_of(row)]
    return list(dict.fromkeys([*names, *gpt_run.SYSTEMS]))


def parse_systems(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = known_systems()
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"must be names out of {', '.join(known)}; got {', '.join(unknown)}"
        )
    return names


def warm_up(device: str, compiles: bool) -> None:
    """Load the library and the compiler, which would count as the first system's time."""
    size = Size(layers=1, heads=2, width=32, max_len=16)
    batch = gpt_run.make_batch(2, 16, size, device)
    for attention in ("native", "fused", "SDPA"):
        gpt_run.Step(attention, compiles and attention == "native", size, device)(batch)
    torch.compiler.reset()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times attentions with a learned bias, and a GPT.")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument(
        "--out", type=parse_out, metavar="FILE.csv", help="in place of what is there"
    )
    parser.add_argument(
        "--quick", action="store_true", help="nothing compiled; on a GPU three cells"
    )
    parser.add_argument(
        "--part", type=parse_part, default=(1, 1), metavar="K/N", help="the K-th part"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cells by name")
    parser.add_argument("--systems", type=parse_systems, default=[], metavar="NAME,NAME")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="PART.csv", help="into --out")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    options = parser.parse_args(arguments)
    if options.merge:
        if options.out is None:
            parser.error("--merge needs --out FILE.csv")
        return join(options.merge, options.out, attention_record.COLUMNS)
    device = options.device
    if device == "cuda" and not has_gpu and not options.list:
        parser.error("--device cuda: torch.cuda.is_available() is False; use --device cpu")

    cells = [
        *bias_cells(device, options.quick, options.systems),
        *gpt_cells(device, options.quick, options.systems),
    ]
    if options.quick and device == "cuda":
        cells = [cell for cell in cells if cell.name in QUICK]
    cells = select(cells, [cell.name for cell in cells], options.part, options.only)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if not cells:
        parser.error(f"--only {options.only!r} and --part fit no cell; --list shows the names")

    try:
        systems = wanted(known_systems(), options.systems, options.quick)
        warm_up(device, compiles=any(s not in UNCOMPILED for s in systems))
        if device == "cuda" and any(cell.name.startswith("bias") for cell in cells):
            cuda_library.load()  # of the streams
    except (LibraryUnavailable, BuildError) as error:
        print(f"{error}\n`python -m sms_plugin.doctor` says more", file=sys.stderr)
        return 1
    records: list[AttentionRecord] = []
    with Recorder(options.out, device=device, columns=attention_record.COLUMNS) as recorder:
        for cell in recorder.track(cells):
            for record in cell.run():
                records.append(record)
                recorder.add(record)
                recorder.write()  # a run that is cut off leaves what it has
        title = recorder.title
    attention_record.show(records, title, has_goals=device == "cuda")
    failed = [r for r in records if r.system.startswith("fused") and r.failed]
    return 1 if failed or not any(r.system != FLOOR for r in records) else 0


if __name__ == "__main__":
    sys.exit(stopped(main))

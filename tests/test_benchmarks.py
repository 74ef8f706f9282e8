"""What the softmax benchmark measures: bytes, cells, roofs, goals. No speed is asserted."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkouts import needs_compiler, real_nvcc
from fake_gpu import FakeGpu

from scripts.benchmarks import cuda_library, softmax_run
from scripts.benchmarks.cells import Cell, Term, cold_matrices, cpu_cells, cuda_cells, padding
from scripts.benchmarks.command import parse_part, select
from scripts.benchmarks.ideal import Traffic, traffic, visible, visible_bytes
from scripts.benchmarks.problems import make_problem
from scripts.benchmarks.roofs import (
    ALIGNMENT,
    Roofs,
    Stream,
    _torch_call,
    stream_of,
    torch_operation,
)
from scripts.benchmarks.softmax_run import SoftmaxRun, measure_on_cpu
from scripts.benchmarks.systems import ModuleSystem, make_systems
from scripts.benchmarks.timing import (
    COLD_BYTES,
    Call,
    Percentiles,
    buffers_needed,
    time_cuda,
)

ROOT = Path(__file__).resolve().parents[1]
SMALL = (2, 3, 8, 16)


# ------------------------------------------------------------------------------------------- bytes


def test_causal_elements_by_hand() -> None:
    assert visible(4, 4) == 1 + 2 + 3 + 4
    assert visible(2, 4) == 3 + 4  # aligned to the bottom right
    assert visible(4, 2) == 0 + 0 + 1 + 2


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 9), (9, 3)])
def test_causal_elements_are_those_of_the_triangle(queries: int, keys: int) -> None:
    kept = torch.ones(queries, keys).tril(keys - queries)
    assert visible(queries, keys) == int(kept.sum())


def test_short_causal_rows_count_whole_sectors() -> None:
    # 64 bfloat16: rows of 128 bytes, sectors of 16 elements; 16 rows each need 1, 2, 3 and 4.
    assert visible_bytes(64, 64, 2) == 16 * (1 + 2 + 3 + 4) * 32
    assert visible_bytes(64, 64, 2) / (64 * 64 * 2) == 0.625
    assert visible_bytes(512, 512, 2) == visible(512, 512) * 2
    assert visible_bytes(63, 63, 2) <= 63 * 63 * 2


def test_traffic_by_hand() -> None:
    elements = 2 * 3 * 8 * 16
    dense = Cell("x", "bfloat16", SMALL)
    assert traffic(dense, "forward") == Traffic(2 * elements, 2 * elements)
    assert traffic(dense, "backward") == Traffic(4 * elements, 2 * elements)
    assert traffic(dense, "forward + backward") == Traffic(6 * elements, 4 * elements)

    masked = replace(dense, mask=padding(SMALL))  # [2, 1, 1, 16] of one byte
    assert traffic(masked, "forward").reads == 2 * elements + 2 * 16
    assert traffic(masked, "backward") == traffic(dense, "backward")

    biased = replace(dense, bias=Term((1, 3, 8, 16), "float32", learned=True))
    assert traffic(biased, "forward").reads == 2 * elements + 4 * 3 * 8 * 16
    assert traffic(biased, "backward").writes == 2 * elements + 4 * 3 * 8 * 16
    fixed = replace(biased, bias=Term((1, 3, 8, 16), "float32"))
    assert traffic(fixed, "backward").writes == 2 * elements


def test_long_causal_cells_read_half_and_write_all() -> None:
    cell = Cell("causal", "float32", (1, 1, 1024, 1024), is_causal=True)
    forward, backward = traffic(cell, "forward"), traffic(cell, "backward")
    assert forward.total / cell.scores_bytes == pytest.approx(1.5, rel=1e-3)
    assert backward.total / cell.scores_bytes == pytest.approx(2.0, rel=1e-3)


# ------------------------------------------------------------------------------------------- cells


def test_every_cell_is_cold_and_has_a_name_of_its_own() -> None:
    cells = cuda_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if cell.kind == "cold":
            few = cell.case == "few long rows"
            assert few or cell.scores_bytes >= COLD_BYTES, cell.name
            assert buffers_needed(cell.scores_bytes) * cell.scores_bytes >= COLD_BYTES
            assert cell.goals or cell.neighbour, cell.name
            for term in cell.terms:
                assert torch.broadcast_shapes(term.shape, cell.shape) == cell.shape
    assert cold_matrices("float32", 1024, 1024) == 64


def test_the_targets_are_all_there() -> None:
    cells = cuda_cells()

    def lengths(case: str, dtype: str = "bfloat16") -> set[int]:
        return {cell.length for cell in cells if cell.case == case and cell.dtype == dtype}

    powers = {2**k for k in range(6, 18)}
    assert lengths("dense") == lengths("dense", "float32") == powers
    assert lengths("causal") == {n for n in powers if n <= 16384}
    for kind in ("1xHxTxT", "BxHxTxT", "Bx1xHxTxT"):
        for name in ("", " + padding"):
            found = lengths(f"learned bias {kind}{name}")
            assert found == {49, 64, 128, 256, 343, 384, 512, 768, 1024}
    assert lengths("odd") == {63, 127, 1000, 1023, 1025, 4097}
    for kind in ("1xHxTxT", "1x1xTxT", "Bx1x1xT", "BxHxTxT"):
        assert lengths(f"additive {kind} float32") == lengths(f"additive {kind} bfloat16")


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_cover_every_cell_once(parts: int) -> None:
    cells = cuda_cells()
    names = [cell.name for cell in cells]
    taken = [
        cell.name for k in range(1, parts + 1) for cell in select(cells, names, part=(k, parts))
    ]
    assert sorted(taken) == sorted(names)


def test_only_takes_a_word_or_a_pattern() -> None:
    names = ["float32 causal 1x2", "bfloat16 causal 1x2", "float32 dense 4"]
    assert select(names, names, only="causal") == names[:2]
    assert select(names, names, only="float32*") == [names[0], names[2]]
    assert select(names, names, only="nothing") == []
    assert parse_part("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "1", "a/b", "1/0"):
        with pytest.raises(argparse.ArgumentTypeError, match="K/N"):
            parse_part(wrong)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "offset"])
def test_operands_lie_as_the_cell_says(layout: str) -> None:
    problem = make_problem(Cell("x", "float32", SMALL, layout=layout), "cpu")
    for values in (problem.scores, problem.grad):
        assert values.shape == SMALL
        assert values.is_contiguous() == (layout != "strided")
        assert values.storage_offset() == (1 if layout == "offset" else 0)


# ------------------------------------------------------------------------------------------- roofs


def test_streams_have_the_mix_of_the_cell() -> None:
    size = 2**28
    assert stream_of(Traffic(size, size)) == Stream(size, 0, size)
    assert stream_of(Traffic(size // 2, size)) == Stream(size // 2, 0, size)
    assert stream_of(Traffic(2 * size, size)) == Stream(size, size, size)
    assert stream_of(Traffic(100, 100)).out % 16 == 0
    assert torch_operation(Stream(size, 0, size)) == "copy"
    assert torch_operation(Stream(size, size, size)) == "add"
    assert torch_operation(Stream(size // 2, 0, size)) == "widen"
    assert torch_operation(Stream(size // 3, 0, size)) is None


@pytest.mark.parametrize("operation", ["copy", "add", "widen"])
def test_operations_of_torch_move_as_many_bytes(operation: str) -> None:
    part = torch.full((12 * ALIGNMENT,), 1, dtype=torch.uint8)
    result = _torch_call(operation, part)()
    assert isinstance(result, torch.Tensor)
    written = {"copy": 6, "add": 4, "widen": 8}[operation] * ALIGNMENT
    assert result.nbytes == written
    assert result.storage_offset() * result.itemsize == part.nbytes - written


def test_a_roof_is_measured_once_for_nearly_equal_traffic() -> None:
    measured: list[Stream] = []

    def measure(stream: Stream) -> float:
        measured.append(stream)
        return 4.0

    roofs = Roofs(measure=measure)
    assert roofs.tb_per_s(Traffic(10**9, 10**9)) == 4.0
    roofs.tb_per_s(Traffic(10**9 + 10**6, 10**9))
    assert len(measured) == 1
    roofs.tb_per_s(Traffic(10**9, 2 * 10**9))
    roofs.tb_per_s(Traffic(2 * 10**9, 2 * 10**9))  # the same mix, but other bytes
    assert len(measured) == 3


# ------------------------------------------------------------------------------------------ a run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> SoftmaxRun:
    """A run whose GPU is the CPU, with the systems that run there."""
    monkeypatch.setattr(softmax_run, "make_problem", lambda cell, _: make_problem(cell, "cpu"))

    def timed(calls: list[Call], rounds: int) -> Percentiles:
        gpu = FakeGpu()
        both = [lambda call=call: (gpu.call(0), call()) for call in calls]
        return time_cuda(both, warm_up=1, rounds=3, clock=gpu)

    monkeypatch.setattr(softmax_run, "time_cuda", timed)
    monkeypatch.setattr(softmax_run, "buffers_needed", lambda _: 2)
    systems = make_systems(("fused", "native"), print)
    return SoftmaxRun(systems, Roofs(measure=lambda _: 4.0), say=print)


@needs_compiler
def test_a_cell_with_a_learned_bias_is_checked_for_repeatability(run: SoftmaxRun) -> None:
    bias = Term((1, *SMALL[1:]), "float32", learned=True)
    cell = Cell(
        "learned", "float32", SMALL, (0.95, 0.9), mask=padding(SMALL), bias=bias, peers=True
    )
    records = run.measure(cell)
    assert [(r.system, r.direction, r.goal) for r in records] == [
        ("fused", "forward", 0.95), ("fused", "backward", 0.9),
        ("native", "forward", None), ("native", "backward", None),
    ]  # fmt: skip
    assert records[1].note == "gradients bitwise equal in 10 runs"
    assert not run.failures
    assert len(run.measure(replace(cell, peers=False))) == 2


def test_gradients_that_differ_are_a_failure(
    run: SoftmaxRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(Cell("x", "float32", SMALL), "cpu")
    system = ModuleSystem("native")
    monkeypatch.setattr(system, "backward", lambda _: lambda: (torch.randn(3),))
    assert "DIFFER" in run._repeatable(system, problem)
    assert len(run.failures) == 1


@needs_compiler
def test_an_odd_length_is_held_to_its_neighbour(run: SoftmaxRun) -> None:
    aligned = Cell("aligned", "float32", (2, 3, 8, 16), (0.97, 0.98))
    odd = replace(aligned, case="odd", shape=(2, 3, 8, 15), goals=None, neighbour=aligned)
    records = run.measure(odd)
    assert [r.case for r in records] == ["aligned"] * 2 + ["odd"] * 2
    for neighbour, of_odd in zip(records[:2], records[2:], strict=True):
        assert of_odd.goal == pytest.approx(0.9 * neighbour.fraction_of_roof)
    assert len(run.measure(replace(odd, shape=(2, 3, 8, 14)))) == 2  # the neighbour is known


def test_one_that_fails_is_named_and_the_run_goes_on(
    run: SoftmaxRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run.say = said.append

    def fails(_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    for system in run.systems:
        monkeypatch.setattr(system, "forward", fails)
    assert run.measure(Cell("x", "float32", SMALL, (1.0, 1.0), peers=True)) == []
    assert said[1] == "failed native, float32 x 2x3x8x16: RuntimeError: no such kernel"
    assert run.failures == [said[0]]


@needs_compiler
def test_cpu_cells_with_the_bound() -> None:
    systems = make_systems(("fused", "native"), print)
    for cell in cpu_cells(SMALL):
        records = measure_on_cpu(cell, systems, rounds=2)
        fused = records[0]
        assert fused.goal == (2.6 if cell.is_causal or cell.terms else 0.85)
        assert (fused.fraction_of_roof is None) == bool(cell.is_causal or cell.terms)


# ---------------------------------------------------------------------------------- CUDA, commands


@needs_compiler
def test_the_benchmarks_own_kernels_compile(tmp_path: Path) -> None:
    arch = max(a for a in real_nvcc().archs if a <= 90)
    library = cuda_library.build(arch, tmp_path)
    assert library.stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == [library.name]
    assert cuda_library.build(arch, tmp_path) == library


def test_help_names_every_option() -> None:
    script = ROOT / "scripts" / "bench_softmax.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for option in ("--device", "--out", "--quick", "--part", "--only", "--systems", "--merge"):
        assert option in done.stdout

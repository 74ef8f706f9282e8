"""Measures the cells of the softmax benchmark, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from scripts.benchmarks.cells import OF_NEIGHBOUR, Cell
from scripts.benchmarks.ideal import traffic
from scripts.benchmarks.problems import Problem, make_problem
from scripts.benchmarks.record import Record
from scripts.benchmarks.roofs import Roofs
from scripts.benchmarks.systems import System
from scripts.benchmarks.timing import (
    Call,
    Percentiles,
    buffers_needed,
    side_stream,
    time_cpu,
    time_cuda,
    time_latency,
)

DIRECTIONS = ("forward", "backward")
REPEATS = 10  # gradients of a learned bias that must be bitwise equal
LAUNCH_BOUND = 2.0  # a small call that takes less than so many empty kernels
RESERVED_BYTES = 60 * 2**30  # what torch's allocator may keep from one cell to the next


class SoftmaxRun:
    """Times cells on a GPU; goals, roofs and what was found wrong belong to the run.

    Args:
        systems: fused first, since the others are compared with it.
        roofs: measured as they are asked for.
        rounds: timed calls of each.
        say: gets a line for each cell that a system leaves out.
    """

    def __init__(
        self,
        systems: Sequence[System],
        roofs: Roofs,
        rounds: int = 100,
        say: Callable[[str], None] = print,
    ) -> None:
        self.systems = systems
        self.roofs = roofs
        self.rounds = rounds
        self.say = say
        self.failures: list[str] = []
        self._empty_kernel: Percentiles | None = None
        self._said: set[str] = set()
        self._speeds: dict[tuple[str, str], float] = {}  # of fused: cell's name, direction

    def measure(self, cell: Cell) -> list[Record]:
        """The records of one cell, fused first."""
        if torch.cuda.memory_reserved() > RESERVED_BYTES:
            torch.cuda.empty_cache()
        if cell.kind == "host":
            return self._host(cell)
        if cell.kind == "latency":
            return self._latency(cell)
        records = []
        if cell.neighbour is not None and (cell.neighbour.name, "forward") not in self._speeds:
            records += self._cold(cell.neighbour)
        return records + self._cold(cell)

    def _runs(self, system: System, cell: Cell, direction: str) -> bool:
        if system.name != "fused" and not cell.peers:
            return False
        reason = system.refuses(cell, direction)
        text = f"{system.name}, {direction}: {reason}"
        if reason is not None and text not in self._said:
            self._said.add(text)
            self.say(f"skipped {text} (first at {cell.name})")
        return reason is None

    def _cold(self, cell: Cell) -> list[Record]:
        sets = buffers_needed(cell.scores_bytes)
        problems = [make_problem(cell, "cuda") for _ in range(sets)]
        records = []
        for system in self.systems:
            directions = [d for d in DIRECTIONS if self._runs(system, cell, d)]
            with self._answered(system, cell), system.prepared():
                for direction in directions:
                    make = getattr(system, direction)
                    ms = time_cuda([make(p) for p in problems], rounds=self.rounds)
                    records.append(self._record(cell, direction, system, ms))
                if system.name == "fused" and any(term.learned for term in cell.terms):
                    records[-1].note = self._repeatable(system, problems[0])
        return records

    def _record(self, cell: Cell, direction: str, system: System, ms: Percentiles) -> Record:
        moved = traffic(cell, direction)
        record = Record(
            dtype=cell.dtype,
            case=cell.case,
            shape=cell.size,
            direction=direction,
            system=system.name,
            ms=ms,
            ideal_bytes=moved.total,
            roof_tb_per_s=self.roofs.tb_per_s(moved),
            note=system.note,
        )
        if system.name == "fused":
            assert record.tb_per_s is not None
            self._speeds[cell.name, direction] = record.tb_per_s
            record.goal = self._goal(cell, direction, record)
            if cell.neighbour is not None:
                record.note = f"goal: {OF_NEIGHBOUR} of the speed of {cell.neighbour.name}"
        return record

    def _goal(self, cell: Cell, direction: str, record: Record) -> float | None:
        """A fraction of the roof; for an odd length it comes from the aligned one's speed."""
        if cell.goals is not None:
            return cell.goals[DIRECTIONS.index(direction)]
        if cell.neighbour is None or not record.roof_tb_per_s:
            return None
        speed = self._speeds.get((cell.neighbour.name, direction))
        return None if speed is None else OF_NEIGHBOUR * speed / record.roof_tb_per_s

    def _repeatable(self, system: System, problem: Problem) -> str:
        """Whether the gradients are the same to the bit, run for run; a failure if they aren't."""
        call = system.backward(problem)
        first = _gradients(call)
        for _ in range(REPEATS - 1):
            if not all(map(torch.equal, first, _gradients(call))):
                self.failures.append(f"{problem.cell.name}: gradients differ between two runs")
                return f"gradients DIFFER between {REPEATS} runs"
        return f"gradients bitwise equal in {REPEATS} runs"

    @contextlib.contextmanager
    def _answered(self, system: System, cell: Cell) -> Iterator[None]:
        """A system may fail at a cell in ways of its own, compilers included: a line says so, and
        the run goes on. An error of the fused operator makes it fail in the end."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
            text = f"failed {system.name}, {cell.name}: {reason}"
            if system.name == "fused":
                self.failures.append(text)
            self.say(text)

    def _latency(self, cell: Cell) -> list[Record]:
        """Forward, and forward + backward; warm."""
        records = []
        with torch.cuda.stream(side_stream(torch.cuda.current_device())):
            problem = make_problem(cell, "cuda")
            empty = self._empty()
            for system in self.systems:
                for direction in ("forward", "forward + backward"):
                    if not self._runs(system, cell, direction):
                        continue
                    with self._answered(system, cell), system.prepared():
                        make = system.forward if direction == "forward" else system.both
                        ms = time_latency(make(problem), rounds=max(10, self.rounds // 5))
                        bound = LAUNCH_BOUND * empty.ms_p50 * (1 if direction == "forward" else 2)
                        note = (
                            f"launch-bound: an empty kernel takes {empty.ms_p50 * 1e3:.2f} us"
                            if ms.ms_p50 < bound
                            else ""
                        )
                        moved = traffic(cell, direction).total
                        records.append(
                            Record(
                                cell.dtype, cell.case, cell.size, direction, system.name, ms, moved,
                                note="; ".join(n for n in (note, system.note) if n),
                            )
                        )  # fmt: skip
        return records

    def _empty(self) -> Percentiles:
        if self._empty_kernel is None:
            one = torch.ones(1, device="cuda")
            self._empty_kernel = time_latency(lambda: one.neg_())
        return self._empty_kernel

    def _host(self, cell: Cell) -> list[Record]:
        """Host time of a call: a forward that nothing is recorded for, and a training step's."""
        problem = make_problem(cell, "cuda")
        systems = [s for s in self.systems if s.name in ("fused", "native")]
        records: list[Record] = []
        for index, direction in enumerate(("forward", "forward + backward")):
            calls = {s.name: s.both(problem) if index else s.forward(problem) for s in systems}
            rounds = max(5, self.rounds // 4)
            with torch.set_grad_enabled(index == 1):
                times = time_cpu(calls, rounds, repeats=200, wait=torch.cuda.synchronize)
            for name, ms in times.items():
                record = Record(cell.dtype, cell.case, cell.size, direction, name, ms)
                if cell.goals and name == "fused":
                    record.goal = cell.goals[index]
                    record.note = "goal: times as fast as native"
                records.append(record)
        return records


def _gradients(call: Call) -> list[torch.Tensor]:
    result = call()
    assert isinstance(result, tuple)
    return list(result)


def measure_on_cpu(cell: Cell, systems: Sequence[System], rounds: int) -> list[Record]:
    """Forward + backward of each system and of the bound, in turn."""
    problem = make_problem(cell, "cpu")
    calls: dict[str, Call] = {system.name: system.both(problem) for system in systems}
    masked = cell.is_causal or bool(cell.terms)
    if not masked:
        calls["bound"] = bound(problem)
    times = time_cpu(calls, rounds)
    moved = traffic(cell, "forward + backward").total
    records = []
    for name, ms in times.items():
        record = Record(cell.dtype, cell.case, cell.size, "forward + backward", name, ms, moved)
        if "bound" in times:
            record.roof_tb_per_s = moved / times["bound"].ms_p50 / 1e9
        if name == "fused" and cell.goals is not None:
            record.goal = cell.goals[0]
            record.note = "goal: times as fast as native" if masked else "goal: of the bound"
        records.append(record)
    return records


def bound(problem: Problem) -> Call:
    """As few bytes as forward and backward can do with, results in fresh memory: a negation reads
    and writes one tensor, a product reads two and writes one."""
    scores = problem.scores.detach()
    probs, grad = torch.softmax(scores, dim=-1), problem.grad
    return lambda: (torch.neg(scores), torch.mul(probs, grad))

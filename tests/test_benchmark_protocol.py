"""The protocol of the benchmarks and what they write: turns, holds, CSV, tables."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGpu

from scripts.benchmarks import softmax_summary
from scripts.benchmarks.command import join, parse_out, stopped
from scripts.benchmarks.record import COLUMNS, Record, Recorder, merged, read_rows
from scripts.benchmarks.timing import (
    CHUNK,
    HostTooSlow,
    Percentiles,
    time_cpu,
    time_cuda,
)


def test_the_device_is_held_back_while_calls_are_queued() -> None:
    gpu = FakeGpu()
    ms = time_cuda([partial(gpu.call, i) for i in range(3)], rounds=50, clock=gpu)
    assert (ms.ms_p20, ms.ms_p50, ms.ms_p80) == pytest.approx((2.0, 2.0, 2.0))
    assert min(gpu.holds) >= CHUNK * gpu.host_seconds_per_call
    assert len(gpu.holds) == 3  # chunks of 20, 20 and 10
    timed = gpu.calls[-50:]
    assert timed == [i % 3 for i in range(50)]  # in rotation
    assert gpu.waits <= 2 + len(gpu.holds)  # none between two calls


def test_a_starved_chunk_is_repeated_with_a_longer_hold() -> None:
    gpu = FakeGpu()

    def slows_down(index: int) -> object:
        gpu.host_seconds_per_call = 1e-3 if len(gpu.calls) < 13 else 5e-3
        return gpu.call(index)

    ms = time_cuda([partial(slows_down, i) for i in range(2)], rounds=20, clock=gpu)
    assert ms.ms_p50 == pytest.approx(2.0)
    assert gpu.holds == sorted(gpu.holds)
    assert len(gpu.holds) > 1

    with pytest.raises(HostTooSlow, match="could not be queued"):
        time_cuda([partial(gpu.call, 0)], clock=FakeGpu(never_ahead=True))


def test_results_stay_until_the_other_calls_have_run() -> None:
    alive: list[int] = []

    class Result:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    most = 0

    def call() -> object:
        nonlocal most
        most = max(most, len(alive))
        return Result()

    time_cuda([call, call, call], rounds=10, clock=FakeGpu())
    assert most == 2  # the third is being made
    assert not alive


def test_cpu_calls_take_turns() -> None:
    order: list[str] = []
    times = time_cpu({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 4
    assert times["a"].ms_p20 <= times["a"].ms_p50 <= times["a"].ms_p80
    order.clear()
    calls = {name: partial(order.append, name) for name in "ab"}
    time_cpu(calls, rounds=2, repeats=2, wait=lambda: order.append("wait"))
    assert order == ["a", "a", "wait", "b", "b", "wait"] * 3


def record(system: str = "fused", ms: float = 0.5, **values: object) -> Record:
    fields: dict[str, object] = {
        "dtype": "bfloat16", "case": "causal Tq=Tk/4", "shape": "1x2", "direction": "forward",
        "system": system, "ms": Percentiles(ms, ms, ms), "ideal_bytes": 2 * 10**9,
        "roof_tb_per_s": 4.25, "goal": 0.95,
    }  # fmt: skip
    return Record(**(fields | values))  # type: ignore[arg-type]


def test_csv_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMS_PLUGIN_COMMIT", "abc")
    path = tmp_path / "folder" / "x.csv"
    with pytest.raises(KeyboardInterrupt), Recorder(path, device="cpu", progress=False) as recorder:
        for cell in recorder.track(["one", "two"]):
            recorder.add(record(shape=cell, note="with, comma"))
            if cell == "two":
                raise KeyboardInterrupt
            assert not path.exists() or read_rows(path)
    rows = read_rows(path)
    assert [row["shape"] for row in rows] == ["one", "two"]
    assert tuple(rows[0]) == COLUMNS
    assert rows[0]["commit"] == "abc"
    assert rows[0]["torch"] == torch.__version__
    assert float(rows[0]["tb_per_s"]) == 4.0
    assert float(rows[0]["fraction_of_roof"]) == pytest.approx(4 / 4.25, rel=1e-3)
    assert rows[0]["note"] == "with, comma"
    assert [file.name for file in path.parent.iterdir()] == ["x.csv"]  # no temporary file

    with Recorder(tmp_path / "again.csv", device="cpu", progress=False) as recorder:
        recorder.add(record(shape="two", ms=1.0), record(shape="three"))
    both = merged([path, tmp_path / "again.csv"])
    assert [(row["shape"], row["ms_p50"]) for row in both] == [
        ("one", "0.5"), ("two", "1"), ("three", "0.5"),
    ]  # fmt: skip


def test_what_is_not_known_stays_empty() -> None:
    cells = record(ideal_bytes=None, roof_tb_per_s=None, goal=None).cells()
    assert [cells[n] for n in ("tb_per_s", "fraction_of_roof", "goal")] == ["", "", ""]


def test_summary_names_misses_and_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        record(),
        record("native", ms=1.0, goal=None),
        record("liger", ms=0.4, goal=None),
        record(shape="host", ideal_bytes=None, roof_tb_per_s=None, goal=1.0),
        record("native", ms=1.0, shape="host", ideal_bytes=None, goal=None),
    ]
    verdict = softmax_summary.show(records, "title")
    text = capsys.readouterr().out
    assert "missed: bfloat16 causal Tq=Tk/4 1x2 forward: 0.941 of 0.950" in text
    assert "2.00 to 2.00 times as fast as native in 2 timings" in text
    assert "0.80 to 0.80 times as fast as liger" in text
    assert "slower at bfloat16 causal Tq=Tk/4 1x2 forward (0.80)" in text
    assert verdict == "1 of 2 goals reached"


def test_an_older_file_outlives_a_run_without_a_timing(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text("old\n")
    with pytest.raises(AssertionError), Recorder(path, device="cpu", progress=False):
        raise AssertionError("no timing yet")
    assert path.read_text() == "old\n"


def test_out_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    assert parse_out(str(tmp_path / "new" / "a.csv")) == tmp_path / "new" / "a.csv"
    (tmp_path / "file").touch()
    for text, said in ((str(tmp_path), "is a folder"), (str(tmp_path / "file" / "a.csv"), "got ")):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            parse_out(text)


def test_only_files_of_the_benchmark_are_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    for text in ("a,b\n1,2\n", "no table", ",".join([*COLUMNS, "floor_ms"]) + "\n1\n"):
        part = tmp_path / "part.csv"
        part.write_text(text)
        assert (
            join([part], out, COLUMNS) == 2 and "must have the columns" in capsys.readouterr().err
        )
    assert join([tmp_path / "none.csv"], out, COLUMNS) == 2
    assert not out.exists()


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert stopped(interrupted) == 130 and stopped(lambda: 3) == 3
    assert "stopped" in capsys.readouterr().err

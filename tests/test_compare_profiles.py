"""The comparison of speed: what its verdicts are made of. No test here is about time itself."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import SMALL, small_config

from scripts import compare_profiles
from scripts.comparison import speed_worker
from scripts.comparison.processes import Job
from scripts.comparison.ratios import (
    Ratio,
    Speed,
    least_seen,
    most_possible,
    noise_of,
    ratio_of,
    verdict,
)
from scripts.comparison.speed_config import SpeedArm, SpeedRunConfig
from scripts.comparison.speed_results import compare_runs, read_finished
from train import run
from train.config import Softmax, compose_config

# Ratios


def test_ratio_and_its_interval() -> None:
    ratio = ratio_of([200.0, 202.0, 198.0], [100.0, 101.0, 99.0])
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    ratio = ratio_of([200.0, 220.0, 240.0], [100.0, 100.0, 100.0])
    # By hand: logarithms 0.6931, 0.7885, 0.8755; mean 0.7857, s 0.0912, t 4.3027 for 2 degrees.
    assert ratio.ratio == pytest.approx(2.2)
    half = 4.302653 * 0.0912169 / math.sqrt(3)
    assert ratio.low == pytest.approx(math.exp(0.7856914 - half), rel=1e-4)
    assert ratio.high == pytest.approx(math.exp(0.7856914 + half), rel=1e-4)


@pytest.mark.parametrize("times", [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_one_repeat_has_no_interval(times: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="at least two repeats"):
        ratio_of(*times)


def test_what_would_have_been_seen() -> None:
    wide = Ratio(1.0, 0.5, 2.0)
    assert least_seen(wide, 1.05) == 2.0
    shifted = Ratio(2.1, 1.05, 4.2)  # an interval as wide, around a little more
    assert verdict(shifted, 1.05) is Speed.faster
    assert verdict(Ratio(1.9, 0.95, 3.8), 1.05) is Speed.same
    assert least_seen(Ratio(1.0, 0.99, 1.01), 1.05) == 1.05  # the noise is wider


@pytest.mark.parametrize(
    ("ratio", "noise", "right"),
    [
        (Ratio(1.2, 1.1, 1.3), 1.05, Speed.faster),
        (Ratio(0.8, 0.7, 0.9), 1.05, Speed.slower),
        (Ratio(1.2, 0.9, 1.5), 1.05, Speed.same),  # the interval holds 1
        (Ratio(1.04, 1.03, 1.05), 1.05, Speed.same),  # below the noise
        (Ratio(0.97, 0.96, 0.98), 1.05, Speed.same),
    ],
)
def test_verdicts(ratio: Ratio, noise: float, right: Speed) -> None:
    assert verdict(ratio, noise) is right


def test_noise_counts_either_way() -> None:
    assert noise_of([100.0, 90.0], [98.0, 99.0]) == pytest.approx(1.1)
    assert most_possible(0.5) == 2.0


# The whole, with its processes in this one


def settings(folder: Path, *overrides: str) -> SpeedRunConfig:
    small = [*SMALL, "trainer.timer_warmup_steps=3", "speed.steps=5", f"run_dir={folder}"]
    return compose_config("compare_profiles", SpeedRunConfig, [*small, *overrides])


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Processes run here; the names of them, in order."""
    names: list[str] = []

    def run_here(jobs: Sequence[Job]) -> None:
        for job in jobs:
            names.append(job.name)
            assert speed_worker.main(job.arguments[2:]) == 0

    monkeypatch.setattr(compare_profiles, "run_all", run_here)
    return names


def test_measured_from_end_to_end(tmp_path: Path, in_this_process: list[str]) -> None:
    lines = compare_profiles.measure(
        settings(tmp_path, "speed.arms=[fused,sdpa]", "speed.seq_lens=[24,12]")
    )
    assert len(lines) == 2 * 2 + 1
    at_24 = [name for name in in_this_process if name.endswith(" at 24") and "profile" not in name]
    there = ["native at 24", "native-again at 24", "fused at 24", "sdpa at 24"]
    assert at_24 == [*there, *reversed(there), *there]
    assert "profile" in in_this_process[-1] and "profile" not in in_this_process[23]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row[:2] for row in report["step_rows"][:4]] == [
        [12, "native"],
        [12, "native-again"],
        [12, "fused"],
        [12, "sdpa"],
    ]
    verdicts = {speed.value for speed in Speed}
    assert {row[7] for row in report["step_rows"]} <= verdicts | {""}
    assert (SpeedArm.fused_compiled.label, SpeedArm.sdpa.label) == ("fused + compiled", "sdpa")
    for name in ("steps.png", "phases.png", "lengths.png", "report.md", "report.html"):
        assert (tmp_path / name).stat().st_size > 0
    speed = json.loads((tmp_path / "12" / "fused" / "0" / "speed.json").read_text())
    assert (speed["softmax"], speed["seq_len"], speed["batch_size"]) == ("fused", 12, 8)
    assert speed["call_counts"]["scaled_mask_softmax"]["cpu"] == 2 * 8  # layers, steps
    with (tmp_path / "12" / "fused" / "0" / "timing.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert labels == ["warmup"] * 3 + ["steady"] * 4 + ["last_of_epoch"]
    native = json.loads((tmp_path / "12" / "native" / "2" / "speed.json").read_text())
    assert native["call_counts"]["scaled_mask_softmax"]["cpu"] == 0
    groups = {row[0]: row[1] for row in report["group_rows"]}
    assert float(groups["native"].rstrip("%")) > 0


def test_native_alone_is_compared_with_itself(tmp_path: Path, in_this_process: list[str]) -> None:
    lines = compare_profiles.measure(settings(tmp_path, "speed.arms=[]", "speed.profile=false"))
    assert "no measurable difference" in lines[0]


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("speed.repeats=2", "speed.repeats must be at least 3, got 2"),
        ("speed.seq_lens=[0]", "speed.seq_lens must be at least 1, got 0"),
        ("speed.steps=0", "speed.steps must be at least 5, got 0"),
        ("softmax=fused", r"choose speed.arms=\[fused"),
        ("compile=true", r"choose speed.arms=\[fused"),
        ("trainer.devices=2", "one device"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, override: str, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        compare_profiles.measure(settings(tmp_path, override))


@pytest.mark.parametrize(
    ("arm", "softmax", "is_compiled"),
    [
        ("compiled", Softmax.native, True),
        ("fused_compiled", Softmax.fused, True),
        ("sdpa", Softmax.sdpa, False),
    ],
)
def test_arms(arm: str, softmax: Softmax, is_compiled: bool) -> None:
    assert (SpeedArm[arm].softmax, SpeedArm[arm].is_compiled) == (softmax, is_compiled)


# Two finished runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    run.train(small_config(folder, "trainer.max_steps=40", "trainer.val_every=40"))
    return folder


def slower_copy(folder: Path, target: Path, factor: float) -> Path:
    """The same run with every time multiplied."""
    target.mkdir()
    for name in ("summary.json", "config.yaml"):
        (target / name).write_text((folder / name).read_text())
    with (folder / "timing.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (target / "timing.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for at, row in enumerate(rows):
            steady = 10.0 * factor * (1 + 0.001 * (at % 3))
            writer.writerow(row | {n: steady for n in row if n.endswith("_ms")})
    return target


def test_finished_runs(finished: Path, tmp_path: Path) -> None:
    a = slower_copy(finished, tmp_path / "a", 1.0)
    b = slower_copy(finished, tmp_path / "b", 0.5)
    c = slower_copy(finished, tmp_path / "c", 1.01)
    assert compare_runs(read_finished(a), read_finished(b))[1].verdict is Speed.faster
    assert compare_runs(read_finished(b), read_finished(a))[1].verdict is Speed.slower
    assert compare_runs(read_finished(a), read_finished(c))[1].verdict is Speed.same
    lines = compare_profiles.compare_finished(a, b)
    assert "b at 24: faster; 2.000 times as fast as a" in lines[0]
    assert (b / "compared-with-a" / "report.html").is_file()


def test_runs_that_are_no_measurement(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="must be the folder of a finished run; it isn't the folder of a run"
    ):
        read_finished(tmp_path)
    profiled = slower_copy(finished, tmp_path / "profiled", 1.0)
    summary = json.loads((profiled / "summary.json").read_text())
    (profiled / "summary.json").write_text(json.dumps(summary | {"profiler": "torch"}))
    with pytest.raises(ValueError, match="was profiled"):
        read_finished(profiled)
    short = tmp_path / "short"
    run.train(small_config(short, "trainer.max_steps=8", "trainer.val_every=8"))
    with pytest.raises(ValueError, match="train for longer"):
        read_finished(short)


def test_folders_are_told_from_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_profiles.run_folders(["runs/a", "runs/b"]) == [Path("runs/a"), Path("runs/b")]
    for arguments in (["a=1", "b=2"], ["--help"], ["--cfg", "job"], []):
        assert compare_profiles.run_folders(arguments) == []
    for arguments in (["runs/a"], ["runs/a", "b=2"], ["a", "b", "c"]):
        with pytest.raises(SystemExit) as end:
            compare_profiles.run_folders(arguments)
        assert end.value.code == 2 and "takes two run folders" in capsys.readouterr().err

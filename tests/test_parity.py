"""The A/B run: what passes has to, what is wrong fails, and what can't be judged is an error."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import UndefinedError
from small_runs import ROOT, small_config
from torch import Tensor

from scripts import ab_parity
from scripts.comparison import arms, curves, judge, worker
from scripts.comparison.arms import PERTURBATION, arm, perturb
from scripts.comparison.config import ParityRunConfig
from scripts.comparison.gradients import compare_states
from scripts.comparison.processes import Job, ProcessError, run_all
from scripts.comparison.report import markdown_table, to_html, write_report
from sms_plugin.modules import native_softmax
from train.config import compose_config
from train.data import Corpus, TokenData, load_corpus
from train.module import LanguageModel
from train.overrides import OverrideError, check_overrides

ARMS = ["reference", "native", "chain", "fused", "wrong_scale"]


# Gradients from the same state


def results_of(
    tmp_path: Path, *overrides: str, names: list[str] = ARMS
) -> dict[str, list[judge.StateResult]]:
    cfg = small_config(tmp_path, *overrides)
    corpus: Corpus = load_corpus(cfg.data, cfg.seed)
    is_masked = cfg.model.kind.name == "encoder"
    data = TokenData(corpus, cfg.data, seed=cfg.seed, train_batches=4, is_masked=is_masked)
    torch.manual_seed(3)
    module = LanguageModel(cfg, corpus.vocab_size)
    if cfg.trainer.precision == "bf16-true":
        module = module.to(torch.bfloat16)
    torch.save(module.model.state_dict(), tmp_path / "state.pt")
    states = [(0, tmp_path / "state.pt")]
    return compare_states(cfg, [arm(name) for name in names], states, corpus, data, [0, 1, 2])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", ["gpt_small", "encoder_small", "t5_encoder_small"])
def test_fused_passes_and_the_wrong_scale_fails(tmp_path: Path, model: str, precision: str) -> None:
    overrides = [f"model={model}", "model.n_layer=2", "model.n_head=2", "model.n_embd=32"]
    results = results_of(tmp_path, *overrides, f"trainer.precision={precision}")
    assert judge.passed(judge.checks_of("fused", results, precision))
    assert judge.passed(judge.checks_of("native", results, precision))
    wrong = judge.checks_of("wrong_scale", results, precision)
    assert not judge.passed(wrong)
    slope = wrong[-1]
    assert slope.value == pytest.approx(0.01, rel=0.3)  # the scale is off by 1 %
    assert results["reference"][0].sums[judge.ALL].distance == 0
    calls = {name: states[0].calls for name, states in results.items()}
    assert calls["native"] == calls["chain"] == calls["reference"] == (0, 0)
    assert calls["fused"] == calls["wrong_scale"] == (6, 6)  # two layers, three batches


def test_dropout_is_the_same_in_all_arms(tmp_path: Path) -> None:
    results = results_of(tmp_path, "model.dropout=0.3")
    assert judge.passed(judge.checks_of("fused", results, "32-true"))


def test_a_softmax_that_ignores_its_mask_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed keys that count a little: -10 in place of -inf."""

    def leaking(scores: Tensor, mask: None, scale: float, *args: Any, **kwargs: Any) -> Tensor:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return native_softmax(scores.masked_fill(above, -10 / scale), None, scale)

    monkeypatch.setitem(arms.OWN, "wrong_scale", leaking)
    results = results_of(tmp_path)
    checks = judge.checks_of("wrong_scale", results, "32-true")
    assert not judge.passed(checks)


def some_result(distance: float, slope: float = 1.0) -> judge.StateResult:
    sums = judge.Sums(difference=distance**2, reference=1.0, product=slope)
    both = {judge.ALL: sums, judge.QK: copy.copy(sums)}
    return judge.StateResult(0, (1.0,), (1.0,), both, (0, 0))


@pytest.mark.parametrize(
    ("distance", "slope", "passes"),
    [
        (2.9e-6, 1.0, True),
        (3.1e-6, 1.0, False),
        (1e-6, 1.00009, True),
        (1e-6, 0.9998, False),
        (math.nan, 1.0, False),
        (1e-6, math.nan, False),
    ],
)
def test_the_rule(distance: float, slope: float, passes: bool) -> None:
    chain = some_result(1e-6)  # twice that and 1e-6 is the limit
    results = {"fused": [some_result(distance, slope)], "native": [chain], "chain": [chain]}
    checks = judge.checks_of("fused", results, "32-true")
    assert judge.passed(checks) is passes


def test_nothing_judged_is_no_pass() -> None:
    assert not judge.passed([])


def test_precisions_without_a_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="one of 32-true, bf16-true, bf16-mixed"):
        judge.check_precision("16-mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturbed_weights_differ_by_the_last_bit(dtype: torch.dtype) -> None:
    module = torch.nn.Linear(200, 200).to(dtype)
    before = module.weight.detach().double()
    perturb(module, seed=1)
    change = (module.weight.detach().double() - before).abs()
    assert bool((change > 0).any())
    limit = 8 * PERTURBATION if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert bool((change <= limit * before.abs()).all())


# Curves


def test_spread_holds_what_is_like_it() -> None:
    spread = curves.spread_of([2.00, 2.01, 2.02, 1.99])
    assert spread.holds(2.03) and spread.holds(1.95)
    assert not spread.holds(2.2)
    assert curves.spread_of([2.0, 2.0, 2.0]).holds(2.00009)  # less than that is nothing
    assert not curves.spread_of([2.0, 2.0, 2.0]).holds(2.001)
    assert not spread.holds(math.nan)


def test_the_end_of_a_curve() -> None:
    curve = curves.Curve({}, {step: float(step) for step in range(10, 101, 10)})
    assert curve.final == 95.0  # of steps 90 and 100


# The command

QUICK = [
    "experiment=quick",
    *("trainer.max_steps=12", "trainer.val_every=2", "trainer=cpu", "data.val_batches=2"),
    *("data.seq_len=24", "data.batch_size=4", "model.n_embd=32", "model.n_head=2"),
    *("parity.states=2", "parity.batches=2"),
]


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/ab_parity.py", *QUICK, f"hydra.run.dir={folder}", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_parity_from_end_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    ended = command(folder)
    assert ended.returncode == ab_parity.PARITY, ended.stdout + ended.stderr
    assert "fused against native: parity" in ended.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "parity"
    assert len(report["checks"]) == 2 * 3 + 1
    assert report["control_failed"] is True
    assert report["differences"] == [["softmax.name", "native", "fused"]]
    calls = {row[0]: row[3] for row in report["arms"]}
    assert calls["fused"] > 0
    assert {calls[name] for name in ("native", "reference", "native-1", "native-3")} == {0}
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "no parity" not in page
    assert "fused against native: parity" in (folder / "report.md").read_text()


def test_a_lost_run_is_an_error(tmp_path: Path) -> None:
    """NaN in all arms is no parity of NaN."""
    ended = command(tmp_path, "model.learning_rate=1e30")
    assert ended.returncode == ab_parity.ERROR, ended.stdout + ended.stderr
    assert "the weights are lost from there on" in ended.stderr
    assert not (tmp_path / "report.json").exists()


def settings(folder: Path, *overrides: str) -> ParityRunConfig:
    return compose_config("ab_parity", ParityRunConfig, [*QUICK, f"run_dir={folder}", *overrides])


def test_wrong_scale_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(jobs: Sequence[Job]) -> None:
        for job in jobs:
            assert worker.main(job.arguments[2:]) == 0

    monkeypatch.setattr(ab_parity, "run_all", run_here)
    assert ab_parity.compare(settings(tmp_path, "candidate=wrong_scale")) is False
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "no parity"
    assert not any(check[-1] for check in report["checks"] if "q and k" in check[0])


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("trainer.max_steps=0", "trainer.max_steps must be at least 10, got 0"),
        ("trainer.precision=16-mixed", "one of 32-true, bf16-true, bf16-mixed"),
        ("softmax=fused", "choose candidate=fused"),
        ("parity.native_runs=1", "parity.native_runs must be at least 3, got 1"),
        ("trainer.devices=2", "arms train from the start on one device"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, override: str, answer: str) -> None:
    with pytest.raises((ab_parity.ComparisonError, ValueError), match=answer):
        ab_parity.compare(settings(tmp_path, override))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("candidate=fuesd", "candidate must be one of: fused, native, wrong_scale; did you mean"),
        ("experiment=quik", "experiment must be one of: default, quick; did you mean quick?"),
        ("parity.state=3", "did you mean states?"),
    ],
)
def test_mistakes_are_answered(override: str, answer: str) -> None:
    with pytest.raises(OverrideError, match=re.escape(answer)):
        check_overrides([override], ParityRunConfig)
    with pytest.raises(OverrideError):  # a training run has no such key
        check_overrides(["experiment=quick"])


def test_a_process_that_fails_says_what(tmp_path: Path) -> None:
    job = Job("arm", ["-c", "print('the reason'); raise SystemExit(5)"], tmp_path / "x" / "log")
    with pytest.raises(ProcessError, match=r"(?s)arm ended with status 5.*the reason"):
        run_all([job])


def test_arms_that_start_differently_are_no_comparison() -> None:
    run = {"data_order_sha256": "a", "summary": {"initial_weights_sha256": "b"}}
    ab_parity.check_equal_start({"native": run, "fused": copy.deepcopy(run)})
    other = {"data_order_sha256": "c", "summary": {"initial_weights_sha256": "b"}}
    with pytest.raises(ab_parity.ComparisonError, match="order of the data"):
        ab_parity.check_equal_start({"native": run, "fused": other})


# Reports


def test_tables_of_a_report() -> None:
    text = markdown_table(["arm", "ms", "share"], [["a|b", 1.23456, "5.0%"], ["c", 2, ""]])
    assert text.splitlines() == [
        "| arm | ms | share |",
        "| --- | ---: | ---: |",
        "| a\\|b | 1.235 | 5.0% |",
        "| c | 2 |  |",
    ]


def test_a_report_says_nothing_that_it_was_not_given(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError):
        write_report(tmp_path, "parity.md.j2", {"candidate": "fused"})
    assert not list(tmp_path.iterdir())


def test_text_is_no_markup(tmp_path: Path) -> None:
    assert "<script>" not in to_html("a <script>alert(1)</script> b", tmp_path)

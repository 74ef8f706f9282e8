"""Whether a softmax trains as the native chain does: `python scripts/ab_parity.py [overrides]`.

Arms run as fresh processes from the same weights and on the same batches. The verdict comes from
gradients of the same states against a float64 softmax, and from where the curves end.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import hydra
from omegaconf import DictConfig

from scripts.comparison import judge
from scripts.comparison.config import Candidate, ParityRunConfig
from scripts.comparison.parity_report import Evidence, write_parity_report
from scripts.comparison.processes import Job, ProcessError, run_all
from scripts.comparison.settings import write_arm_config
from train.checks import check_at_least
from train.config import CONF_DIR, Softmax, register_schema, to_config
from train.overrides import exit_on_mistakes
from train.status import run_status

PARITY, ERROR, NO_PARITY = 0, 1, 3  # exit statuses
WORKER = ("-m", "scripts.comparison.worker")
CONTROL = Candidate.wrong_scale.name


class ComparisonError(RuntimeError):
    """Settings or runs that can't be compared."""


def compare(cfg: ParityRunConfig) -> bool:
    """Run the arms, judge, and write the report into the run folder.

    Returns:
        Whether there is parity.

    Raises:
        ComparisonError, ValueError: for settings or runs that can't be compared.
        ProcessError: when an arm fails.
    """
    started = time.perf_counter()
    check_settings(cfg)
    folder = Path(cfg.run_dir).absolute()
    candidate = cfg.candidate.name
    natives = [f"native-{i + 1}" for i in range(cfg.parity.native_runs)]
    # The candidate's own run may be one that there is anyway.
    names = list(dict.fromkeys(["reference", "native", candidate, "sdpa", *natives]))
    steps = cfg.trainer.max_steps
    states = sorted({round(steps * i / cfg.parity.states) for i in range(cfg.parity.states + 1)})
    jobs = [train_job(cfg, folder, name, states if name == "reference" else []) for name in names]
    judged = list(dict.fromkeys(["reference", "native", "chain", candidate, "sdpa", CONTROL]))
    run_all([*jobs, judge_job(cfg, folder, judged)])

    runs = {name: json.loads((folder / "arms" / name / "arm.json").read_text()) for name in names}
    check_equal_start(runs)
    evidence = Evidence(
        candidate=candidate,
        natives=["native", *natives],
        runs=runs,
        results=read_results(folder / "gradients.json"),
        settings=cfg,
        folder=folder,
    )
    control = judge.checks_of(CONTROL, evidence.results, cfg.trainer.precision)
    if judge.passed(control):
        raise ComparisonError(
            "the negative control, a scale that is off by 1 %, passed: with these settings the "
            "comparison can't tell a wrong softmax from a right one; train for more steps, or in a "
            "higher trainer.precision"
        )
    return write_parity_report(evidence, control, time.perf_counter() - started)


def check_settings(cfg: ParityRunConfig) -> None:
    judge.check_precision(cfg.trainer.precision)
    validations = cfg.trainer.max_steps // cfg.trainer.val_every
    bounds = (
        ("trainer.max_steps", cfg.trainer.max_steps, 10),
        ("parity.states", cfg.parity.states, 1),
        ("parity.batches", cfg.parity.batches, 1),
        ("parity.native_runs", cfg.parity.native_runs, 3),
        ("trainer.max_steps / trainer.val_every", validations, 5),
    )
    check_at_least(bounds)
    if cfg.trainer.devices != 1 or cfg.ckpt_path is not None:
        raise ComparisonError(
            "arms train from the start on one device; leave trainer.devices and ckpt_path as "
            f"they are, got devices={cfg.trainer.devices}, ckpt_path={cfg.ckpt_path}"
        )
    if cfg.softmax.name is not Softmax.native:
        raise ComparisonError("the softmax is the arms'; choose candidate=fused, not softmax=fused")


def train_job(cfg: ParityRunConfig, folder: Path, name: str, states: list[int]) -> Job:
    own = folder / "arms" / name
    path = write_arm_config(replace(cfg, run_dir=str(own)), own / "arm.yaml")
    more = ("--states", ",".join(map(str, states))) if states else ()

    def line() -> str:
        summary = json.loads((own / "summary.json").read_text())
        return (
            f"{name}: loss {summary['first_train_loss']:.4f} to {summary['val_loss']:.4f}, "
            f"{summary['total_seconds']:.0f} s"
        )

    return Job(name, [*WORKER, "train", str(path), name, *more], own / "output.log", line)


def judge_job(cfg: ParityRunConfig, folder: Path, names: list[str]) -> Job:
    path = write_arm_config(replace(cfg, run_dir=str(folder)), folder / "judge.yaml")
    first = cfg.trainer.max_steps * cfg.trainer.accumulate_grad_batches  # batches of no training
    batches = ",".join(str(first + i) for i in range(cfg.parity.batches))
    arguments = [
        *(*WORKER, "judge", str(path), ",".join(names), "--batches", batches),
        *("--states", str(folder / "arms" / "reference" / "states")),
        *("--out", str(folder / "gradients.json")),
    ]
    return Job("gradients of all arms", arguments, folder / "judge.log")


def check_equal_start(runs: dict[str, Any]) -> None:
    """The same data in the same order in all arms, and the same weights."""
    for what, value in (
        ("order of the data", lambda run: run["data_order_sha256"]),
        ("initial weights", lambda run: run["summary"]["initial_weights_sha256"]),
    ):
        found = {name: value(run) for name, run in runs.items()}
        if len(set(found.values())) != 1:
            raise ComparisonError(f"the arms differ in the {what}: {found}")


def read_results(path: Path) -> dict[str, list[judge.StateResult]]:
    def state(values: dict[str, Any]) -> judge.StateResult:
        sums = {group: judge.Sums(**own) for group, own in values.pop("sums").items()}
        return judge.StateResult(**values, sums=sums)

    found = json.loads(path.read_text())
    return {name: [state(values) for values in states] for name, states in found.items()}


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="ab_parity")
def main(node: DictConfig) -> None:
    cfg = to_config(node, ParityRunConfig)
    try:
        with run_status(Path(cfg.run_dir), can_go_on=False):
            has_parity = compare(cfg)
    except (ComparisonError, ProcessError, ValueError) as error:
        print(f"ab_parity: not compared: {error}\nrun folder: {cfg.run_dir}", file=sys.stderr)
        sys.exit(ERROR)
    sys.exit(PARITY if has_parity else NO_PARITY)


if __name__ == "__main__":
    exit_on_mistakes(sys.argv[1:], ParityRunConfig)
    register_schema(ParityRunConfig)
    main()

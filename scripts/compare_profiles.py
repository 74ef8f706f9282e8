"""Speed of softmax paths in training steps: `python scripts/compare_profiles.py [overrides]`.

Noise first, arms in turn as fresh processes, a ratio with its interval. With two run folders it
compares those: `python scripts/compare_profiles.py RUN_A RUN_B`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import hydra
from omegaconf import DictConfig, OmegaConf

from scripts.comparison.processes import Job, ProcessError, run_all
from scripts.comparison.settings import write_arm_config
from scripts.comparison.speed_config import SpeedArm, SpeedRunConfig
from scripts.comparison.speed_report import write_speed_report
from scripts.comparison.speed_results import (
    AGAIN,
    BLOCKS,
    NATIVE,
    compare_runs,
    compare_to_native,
    read_finished,
    read_measured,
)
from train.checks import check_at_least
from train.config import CONF_DIR, Softmax, register_schema, to_config
from train.overrides import exit_on_mistakes
from train.status import run_status

WORKER = ("-m", "scripts.comparison.speed_worker")
ERROR = 1  # exit status


def measure(cfg: SpeedRunConfig) -> list[str]:
    """Measure all arms at all lengths and write the report into the run folder.

    Returns:
        A line for each verdict.

    Raises:
        ValueError: for settings that can't be measured.
        ProcessError: when a process fails.
    """
    check_settings(cfg)
    folder = Path(cfg.run_dir).absolute()
    arms = {NATIVE: SpeedArm.native, AGAIN: SpeedArm.native}
    arms |= {arm.name: arm for arm in cfg.speed.arms if arm is not SpeedArm.native}
    jobs = []
    for seq_len in cfg.speed.seq_lens:
        for repeat in range(cfg.speed.repeats):
            names = list(arms) if repeat % 2 == 0 else list(reversed(arms))
            for name in names:
                own = folder / f"{seq_len}" / name / f"{repeat}"
                jobs.append(job(cfg, arms[name], seq_len, own, "time", f"{name} at {seq_len}"))
    if cfg.speed.profile:  # never beside what is timed
        for seq_len in cfg.speed.seq_lens:
            for name in arms:
                if name != AGAIN:
                    own = folder / f"{seq_len}" / name / "profile"
                    what = f"profile of {name} at {seq_len}"
                    jobs.append(job(cfg, arms[name], seq_len, own, "profile", what))
    run_all(jobs)
    groups = []
    for seq_len in sorted(cfg.speed.seq_lens):
        measured = [
            read_measured(
                folder / f"{seq_len}" / name,
                AGAIN if name == AGAIN else arm.label,
                seq_len,
                cfg.speed.repeats,
            )
            for name, arm in arms.items()
        ]
        noise, compared = compare_to_native(measured)
        if not compared:  # native alone: beside itself
            once_more = replace(measured[1], arm="native, once more")
            noise, compared = compare_to_native([*measured, once_more])
        groups.append((measured, noise, compared))
    settings = {
        "is_finished": False,
        "repeats": cfg.speed.repeats,
        "steps": cfg.speed.steps,
        "warmup": cfg.trainer.timer_warmup_steps,
    }
    lines = write_speed_report(folder, groups, cfg.trainer.precision, settings)
    return [*lines, f"report: {folder / 'report.html'}"]


def check_settings(cfg: SpeedRunConfig) -> None:
    bounds = (
        ("speed.repeats", cfg.speed.repeats, 3),
        ("speed.steps", cfg.speed.steps, 5),
        ("trainer.timer_warmup_steps", cfg.trainer.timer_warmup_steps, 3),
        ("the number of speed.seq_lens", len(cfg.speed.seq_lens), 1),
        ("speed.seq_lens", min(cfg.speed.seq_lens, default=1), 1),
    )
    check_at_least(bounds)
    if cfg.softmax.name is not Softmax.native or cfg.compile:
        raise ValueError("softmax and compile are the arms'; choose speed.arms=[fused,compiled]")
    if cfg.trainer.devices != 1:
        raise ValueError(f"arms run on one device, got trainer.devices={cfg.trainer.devices}")


def job(cfg: SpeedRunConfig, arm: SpeedArm, seq_len: int, own: Path, task: str, what: str) -> Job:
    tokens = cfg.data.batch_size * cfg.data.seq_len
    settings = replace(
        cfg,
        run_dir=str(own),
        compile=arm.is_compiled,
        softmax=replace(cfg.softmax, name=arm.softmax),
        data=replace(
            cfg.data,
            seq_len=seq_len,
            min_len=min(cfg.data.min_len, seq_len),
            batch_size=max(1, tokens // seq_len),
        ),
        trainer=replace(cfg.trainer, max_steps=cfg.trainer.timer_warmup_steps + cfg.speed.steps),
    )
    path = write_arm_config(settings, own / "config.yaml")
    return Job(what, [*WORKER, task, str(path)], own / "output.log")


def compare_finished(first: Path, second: Path) -> list[str]:
    """Two run folders of train/run.py, by their timing.csv; the report goes into the second."""
    folder = second / f"compared-with-{first.resolve().name}"
    a, b = read_finished(first), read_finished(second)
    noise, compared = compare_runs(a, b)
    precision = str(OmegaConf.load(first / "config.yaml").trainer.precision)
    settings = {"is_finished": True, "repeats": BLOCKS, "steps": 0, "warmup": 0}
    folder.mkdir(parents=True, exist_ok=True)
    lines = write_speed_report(folder, [([a, b], noise, [compared])], precision, settings)
    return [*lines, f"report: {folder / 'report.html'}"]


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="compare_profiles")
def main(node: DictConfig) -> None:
    cfg = to_config(node, SpeedRunConfig)
    finish(partial(measure_with_status, cfg))


def measure_with_status(cfg: SpeedRunConfig) -> list[str]:
    with run_status(Path(cfg.run_dir), can_go_on=False):
        return measure(cfg)


def finish(run: Callable[[], list[str]]) -> None:
    """Print the lines of `run`; end with status 1 and the reason if it can't."""
    try:
        print("\n".join(run()))
    except (ProcessError, ValueError) as error:
        print(f"compare_profiles: {error}", file=sys.stderr)
        sys.exit(ERROR)


def run_folders(arguments: list[str]) -> list[Path]:
    """What isn't an override, of which there are two or none; a line with options is Hydra's."""
    if any(argument.startswith("-") for argument in arguments):
        return []
    folders = [Path(a) for a in arguments if "=" not in a and not a.startswith("~")]
    if folders and (len(folders) != 2 or len(arguments) != 2):
        print(
            "compare_profiles: takes two run folders and nothing else, or overrides as key=value; "
            f"got {' '.join(arguments)}",
            file=sys.stderr,
        )
        sys.exit(2)
    return folders


if __name__ == "__main__":
    folders = run_folders(sys.argv[1:])
    if folders:
        finish(partial(compare_finished, *folders))
    else:
        exit_on_mistakes(sys.argv[1:], SpeedRunConfig)
        register_schema(SpeedRunConfig)
        main()

"""Going on from a checkpoint: which one, and whether it is one of this run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from train.checks import SettingError
from train.config import Config
from train.module import plain
from train.run_folder import LAST, STATUS, read_status

# What may differ between a run and the one that it goes on from.
_FREE = {"run_dir", "ckpt_path", "softmax.name", "trainer.max_steps", "data.num_workers"}


def find_checkpoint(cfg: Config) -> Path | None:
    """The checkpoint to go on from; None for a run from the start.

    `last` is that of the run folder, or else the newest of all below the folder of the runs.

    Raises:
        FileNotFoundError: when there is none.
    """
    if cfg.ckpt_path is None:
        return None
    if cfg.ckpt_path != "last":
        path = Path(cfg.ckpt_path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"ckpt_path must be a checkpoint or last, got {cfg.ckpt_path}")
        return path
    run_dir = Path(cfg.run_dir).absolute()
    if (run_dir / LAST).is_file():
        return run_dir / LAST
    runs = _folder_of_runs(run_dir) or run_dir
    found = _in_runs(runs, LAST)
    found.sort(key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(
            f"ckpt_path=last, but there is no {LAST} below {runs}; name a file, or by run_dir=... "
            "the run to go on with"
        )
    return found[-1]


def runs_left_out(checkpoint: Path) -> list[str]:
    """A line for each run beside that of `checkpoint` which is newer and has none itself."""
    run_dir = checkpoint.parents[1]
    runs = _folder_of_runs(run_dir)
    if runs is None or not (run_dir / STATUS).is_file():
        return []
    since = (run_dir / STATUS).stat().st_mtime
    newer = [
        path.parent
        for path in sorted(_in_runs(runs, Path(STATUS)))
        if path.stat().st_mtime > since and (path.parent / "config.yaml").is_file()
    ]
    return [
        f"left out: {folder}, which is newer ({read_status(folder)}) but has no checkpoint"
        for folder in newer
        if not (folder / LAST).is_file()
    ]


def _folder_of_runs(run_dir: Path) -> Path | None:
    return next((folder for folder in run_dir.parents if folder.name == "runs"), None)


def _in_runs(runs: Path, name: Path) -> list[Path]:
    """Files of that name in all runs. The arms of a comparison are no runs of the user's."""
    return [path for path in runs.glob(f"**/{name}") if "arms" not in path.parts]


def check_same_run(cfg: Config, checkpoint: Path) -> list[str]:
    """Compare the configuration with the one that the checkpoint was trained by.

    Returns:
        A line for each difference that is allowed and changes the training.

    Raises:
        SettingError: where going on would be another training, or none.
    """
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    before = flat(saved["hyper_parameters"]["config"])
    now = flat(plain(asdict(cfg)))
    differing = [
        f"{key}: {before.get(key)!r} there, {now.get(key)!r} here"
        for key in sorted(before.keys() | now.keys())
        if key not in _FREE and before.get(key) != now.get(key)
    ]
    if differing:
        raise SettingError(
            f"ckpt_path: {checkpoint} was trained by other settings; give the same ones, or start "
            "anew without ckpt_path. " + "; ".join(differing)
        )
    done = saved["global_step"]
    if done >= cfg.trainer.max_steps:
        raise SettingError(
            f"ckpt_path: {checkpoint} has {done} steps, trainer.max_steps is "
            f"{cfg.trainer.max_steps}: nothing is left to train; a larger one trains on"
        )
    notes = {"softmax.name": "", "trainer.max_steps": ", where the learning rate's decay ends"}
    return [
        f"{key} was {before[key]} and is {now[key]} from here on{note}"
        for key, note in notes.items()
        if before[key] != now[key]
    ]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found

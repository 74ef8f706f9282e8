"""What became of a run: status.json in its folder, from the first moment on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch
from pytorch_lightning.utilities import rank_zero_only

from sms_plugin.callbacks.whole_file import whole_file
from train.checks import SettingError
from train.metrics import LossError
from train.record import write_json
from train.run_folder import LAST, RUNNING, STATUS, TRACEBACK


@contextmanager
def run_status(run_dir: Path, *, can_go_on: bool = True) -> Iterator[None]:
    """Keep `run_dir`/status.json: running, then finished, interrupted or failed with the reason.

    The exception goes on; traceback.txt has it whole. A run that is killed can't write:
    `read_status` tells it from one that runs. Of several processes the first one writes.

    Args:
        run_dir: made if it isn't there.
        can_go_on: whether checkpoints are made.
    """
    mine = {"started": _now(), "host": platform.node(), "process": os.getpid()}

    @rank_zero_only
    def write(status: str, **more: str) -> None:
        values = {"status": status, **mine, "written": _now(), **more}
        write_json(run_dir / STATUS, values)

    @rank_zero_only
    def restore(text: str) -> None:
        with whole_file(run_dir / STATUS) as unfinished:
            unfinished.write_text(text)

    @rank_zero_only
    def say(way: str) -> None:
        print(f"interrupted; {way}", file=sys.stderr)

    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / STATUS
    before = path.read_text() if path.is_file() else None
    write(RUNNING)
    if not _rank():  # of a run that this one goes on from
        (run_dir / TRACEBACK).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        # Lightning ends the process itself after Ctrl-C.
        is_interrupt = isinstance(error, (KeyboardInterrupt, SystemExit))
        advice = _way_out(error, run_dir)
        if isinstance(error, SettingError) and before is not None:
            # Nothing was done: what became of the run that was to be gone on with still holds.
            restore(before)
        elif is_interrupt:
            write("interrupted", **advice)
            none = "there is no checkpoint yet" if can_go_on else f"what there is: {run_dir}"
            say(f"to go on: {advice['go_on']}" if "go_on" in advice else none)
        else:
            _write_traceback(run_dir)
            write("failed", error=f"{type(error).__name__}: {error}", **advice)
        raise
    write("finished")


@contextmanager
def one_line_errors(run_dir: Path) -> Iterator[None]:
    """End with status 1 and what status.json says of the error; HYDRA_FULL_ERROR=1 shows all."""
    try:
        yield
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        is_plain = isinstance(error, (ValueError, RuntimeError, OSError))
        reason = str(error) if is_plain else f"{type(error).__name__}: {error}"
        lines = [f"{Path(sys.argv[0]).name}: {reason}"]
        for name, way in _way_out(error, run_dir).items():
            lines.append(f"{'to go on' if name == 'go_on' else name}: {way}")
        lines.append(f"run folder: {run_dir}, with {STATUS} and {TRACEBACK}")
        print("\n".join(lines), file=sys.stderr)
        sys.exit(1)


def _write_traceback(run_dir: Path) -> None:
    name = f"traceback-{_rank()}.txt" if _rank() else TRACEBACK
    with whole_file(run_dir / name) as unfinished:
        unfinished.write_text(traceback.format_exc())


def _rank() -> int:
    return int(rank_zero_only.rank)  # type: ignore[attr-defined]


def _way_out(error: BaseException, run_dir: Path) -> dict[str, str]:
    advice = {}
    if isinstance(error, torch.OutOfMemoryError):
        advice["advice"] = (
            "a smaller data.batch_size with a larger trainer.accumulate_grad_batches, or a shorter "
            "data.seq_len"
        )
    # The same settings would be refused, or lose the weights, again.
    if (run_dir / LAST).is_file() and not isinstance(error, (SettingError, LossError)):
        advice["go_on"] = command_to_go_on(sys.argv, run_dir / LAST)
    return advice


def command_to_go_on(arguments: Sequence[str], checkpoint: Path) -> str:
    """The command line of this process with the checkpoint to go on from, ready to be pasted."""
    # In quotes of Hydra's: a folder's name may hold what it reads otherwise.
    chosen = f"ckpt_path={json.dumps(str(checkpoint), ensure_ascii=False)}"
    if Path(arguments[0]).name != "run.py":
        return f"the same settings with {chosen}"
    kept = [argument for argument in arguments if not argument.startswith("ckpt_path=")]
    return shlex.join(["python", *kept, chosen])


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

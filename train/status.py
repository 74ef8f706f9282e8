"""What became of a run: status.json in its folder, from the first moment on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch
from pytorch_lightning.utilities import rank_zero_only

from train.metrics import LossError
from train.record import write_json
from train.resume import LAST


@contextmanager
def run_status(run_dir: Path) -> Iterator[None]:
    """Keep `run_dir`/status.json: running, then finished, interrupted or failed with the reason.

    A run that was killed is left as running. The exception goes on. Of several processes the first
    one writes.
    """
    started = _now()

    @rank_zero_only
    def write(status: str, **more: str) -> None:
        values = {"status": status, "started": started, "written": _now(), **more}
        write_json(run_dir / "status.json", values)

    @rank_zero_only
    def say(way: str) -> None:
        print(f"interrupted; to go on: {way}", file=sys.stderr)

    write("running")
    try:
        yield
    except BaseException as error:
        # Lightning ends the process itself after Ctrl-C.
        is_interrupt = isinstance(error, (KeyboardInterrupt, SystemExit))
        reason = {"error": f"{type(error).__name__}: {error}"} if not is_interrupt else {}
        advice = _way_out(error, run_dir)
        write("interrupted" if is_interrupt else "failed", **reason, **advice)
        if is_interrupt:
            say(advice.get("go_on", "there is no checkpoint yet (trainer.val_every)"))
        raise
    write("finished")


def _way_out(error: BaseException, run_dir: Path) -> dict[str, str]:
    advice = {}
    if isinstance(error, torch.OutOfMemoryError):
        advice["advice"] = (
            "a smaller data.batch_size with a larger trainer.accumulate_grad_batches, or a shorter "
            "data.seq_len"
        )
    # From there, the same settings would lose the weights again.
    if (run_dir / LAST).is_file() and not isinstance(error, LossError):
        advice["go_on"] = f"the same command with ckpt_path={run_dir / LAST}"
    return advice


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

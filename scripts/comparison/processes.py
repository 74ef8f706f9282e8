"""Fresh processes, one after the other, with a bar."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

CHECKOUT = Path(__file__).resolve().parents[2]
SHOWN = 60  # letters of a line beside the bar


class ProcessError(RuntimeError):
    """A process ended with an error."""


@dataclass(frozen=True)
class Job:
    """Arguments for Python, what it is called, and where its output goes."""

    name: str
    arguments: Sequence[str]
    log: Path
    done: Callable[[], str] | None = None  # a line to print when it has ended


def run_all(jobs: Sequence[Job]) -> None:
    """Run them in turn.

    Raises:
        ProcessError: for the first that fails, with the end of its output.
    """
    console = Console(soft_wrap=True, highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.name)
            _run(job, lambda line: progress.update(task, description=line))
            progress.advance(task)
            if job.done is not None:
                console.print(job.done(), markup=False)


def _run(job: Job, say: Callable[[str], None]) -> None:
    """Run it, and `say` the last line of its output again and again."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *job.arguments],
            cwd=CHECKOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            while (status := _ended(process)) is None:
                line = next(reversed(job.log.read_text(errors="replace").splitlines()), "")
                say(f"{job.name}: {line[:SHOWN]}" if line else job.name)
        except BaseException:  # Ctrl-C: none is left behind
            process.terminate()
            process.wait()
            raise
    if status != 0:
        last = "\n".join(job.log.read_text().splitlines()[-12:])
        raise ProcessError(
            f"{job.name} ended with status {status}; all it said is in {job.log}:\n{last}"
        )


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status; None if it hasn't ended after a moment."""
    try:
        return process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return None

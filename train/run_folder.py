"""What lies where in the folder of a run, and what became of the run."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

LAST = Path("checkpoints", "last.ckpt")
STATUS, TRACEBACK = "status.json", "traceback.txt"
RUNNING, KILLED = "running", "killed"


def read_status(run_dir: Path) -> str | None:
    """What status.json says; `killed` if it says running and no such process is there any more.

    None: there is no status.json. Of another machine's runs nothing more is known than it says.
    """
    try:
        said: dict[str, Any] = json.loads((run_dir / STATUS).read_text())
    except (OSError, ValueError):
        return None
    if said["status"] == RUNNING and said.get("host") == platform.node():
        try:
            os.kill(said["process"], 0)
        except ProcessLookupError:
            return KILLED
        except PermissionError:
            pass  # it is another user's, and there
    return str(said["status"])

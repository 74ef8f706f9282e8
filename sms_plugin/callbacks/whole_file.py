"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; at the end it becomes `path`, on an exception it goes.

        with whole_file(folder / "summary.json") as unfinished:
            unfinished.write_text(text)

    Args:
        path: the file to make or replace; its folder is made where it is missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within one file system only.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-", suffix=path.suffix)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        os.chmod(unfinished, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)  # it can only be read by setting it
    os.umask(current)
    return current

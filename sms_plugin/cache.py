"""Built libraries on disk: their stamps, and the cache that many processes may fill at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sms_plugin.archs import Arch, parse_archs
from sms_plugin.recipe import LIBRARY_NAME, Recipe, compile_library
from sms_plugin.toolchain import BuildError

STAMP_NAME = "libsms_plugin.json"

_POLL_SECONDS = 0.2
_REMIND_SECONDS = 15


@dataclass(frozen=True)
class Stamp:
    """What a library was made of; it lies beside the library."""

    sources: str  # digest of the sources and flags
    machine: str  # x86_64, aarch64
    cuda: str | None  # version of nvcc; None: CPU only
    archs: str  # "80;90+PTX"
    compiler: str
    sha256: str  # of the library's bytes

    def parsed_archs(self) -> tuple[Arch, ...]:
        return parse_archs(self.archs, source=STAMP_NAME) if self.archs else ()


def notice(text: str) -> None:
    """Tell the user what takes so long; on stderr, as the output belongs to their program."""
    print(f"sms_plugin: {text}", file=sys.stderr, flush=True)


def make_stamp(recipe: Recipe, library: Path) -> Stamp:
    return Stamp(
        sources=recipe.digest,
        machine=platform.machine(),
        cuda=recipe.nvcc.build if recipe.nvcc else None,
        archs=";".join(map(str, recipe.archs)),
        compiler=recipe.compiler.version,
        sha256=hashlib.sha256(library.read_bytes()).hexdigest(),
    )


def read_stamp(folder: Path) -> Stamp | None:
    """The stamp of the library in `folder`; None if there is no library, or if it is damaged."""
    try:
        stamp = Stamp(**json.loads((folder / STAMP_NAME).read_text(encoding="utf-8")))
        content = (folder / LIBRARY_NAME).read_bytes()
    except (OSError, ValueError, TypeError):
        return None
    return stamp if hashlib.sha256(content).hexdigest() == stamp.sha256 else None


def publish(library: Path, stamp: Stamp, folder: Path) -> None:
    """Put a finished library into `folder`; a reader sees all of it or, for a moment, none.

    Each file is replaced in one step. A reader between the two steps finds a stamp that doesn't
    fit the library, takes it for damaged and waits for the lock.
    """
    for name, write in (
        (LIBRARY_NAME, lambda path: shutil.copyfile(library, path)),
        (STAMP_NAME, lambda path: path.write_text(json.dumps(asdict(stamp), indent=1) + "\n")),
    ):
        handle, text = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        os.close(handle)
        temporary = Path(text)
        try:
            write(temporary)
            temporary.chmod(0o755 if name == LIBRARY_NAME else 0o644)
            temporary.replace(folder / name)
        finally:
            temporary.unlink(missing_ok=True)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$SMS_PLUGIN_CACHE, otherwise sms_plugin below $XDG_CACHE_HOME or ~/.cache."""
    chosen = environ.get("SMS_PLUGIN_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has relative paths ignored
        return Path(base) / "sms_plugin"
    try:
        return Path.home() / ".cache" / "sms_plugin"
    except RuntimeError as error:
        raise BuildError(
            f"there is no home folder to keep the library in ({error}): set SMS_PLUGIN_CACHE to one"
        ) from error


def cached_library(
    recipe: Recipe,
    cache: Path,
    *,
    verbose: bool = False,
    say: Callable[[str], None] = notice,
) -> Path:
    """The library of this recipe: the cached one if it is whole, otherwise it is built now.

    Any number of processes may ask at once: one builds, the others wait. A killed build leaves
    neither a lock (the kernel drops it with its holder) nor half a library (it is moved into place
    when it is complete).

    Raises:
        BuildError: it can't be built, or the cache can't be written.
    """
    folder = cache / recipe.key
    library = folder / LIBRARY_NAME
    if read_stamp(folder) is not None:
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder / "lock", say) as alone:
            if read_stamp(folder) is not None:
                return library
            if alone:
                for leftover in (*folder.glob("build-*"), *folder.glob(".lib*")):
                    _remove(leftover)
            say(f"building the library once ({recipe}) into {folder}")
            with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as build:
                built = compile_library(recipe, Path(build), verbose=verbose)
                publish(built, make_stamp(recipe, built), folder)
    except OSError as error:
        raise BuildError(
            f"the library can't be kept in {folder} ({error}): set SMS_PLUGIN_CACHE to a folder "
            "that this user can write, on a disk with some space"
        ) from error
    return library


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_builder(lock: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock; yields False where the file system has no locks, and others may build too."""
    # Not truncated at opening: until the lock is ours, its text names the process that holds it.
    with open(lock, "a+", encoding="utf-8") as file:
        try:
            _acquire(file.fileno(), lock, say)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            say(f"{lock} can't be locked ({error.strerror}): building without waiting for others")
            yield False
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield True


def _acquire(descriptor: int, lock: Path, say: Callable[[str], None]) -> None:
    reminded = -float(_REMIND_SECONDS)
    started = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - started
            if waited - reminded >= _REMIND_SECONDS:
                reminded = waited
                holder = lock.read_text(encoding="utf-8", errors="replace") or "another process"
                say(f"waiting for {holder} to build the library ({waited:.0f} s; lock {lock})")
            time.sleep(_POLL_SECONDS)

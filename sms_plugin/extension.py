"""Finds or builds the library with the operator's kernels, and loads it into this process."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sms_plugin.archs import ArchListError, Capability, cards_without_code
from sms_plugin.cache import Stamp, cache_folder, cached_library, notice, read_stamp
from sms_plugin.cards import (
    Version,
    dotted,
    driver_cuda_version,
    listed,
    plan_cuda,
    visible_cards,
    why_no_cards,
)
from sms_plugin.recipe import LIBRARY_NAME, Recipe, source_folder, sources_digest
from sms_plugin.toolchain import BuildError, ToolMissing, find_compiler

_OLDEST_TORCH = (2, 10)


class LibraryUnavailable(RuntimeError):
    """The library can't be had, or lacks what a call needs: why, and what to do."""


def require_torch(version: str) -> None:
    """Raise ImportError if this version of torch is too old for the library."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_TORCH:
        raise ImportError(
            f"sms_plugin needs torch 2.10 or newer, and torch {version} is installed: "
            "run `pip install --upgrade torch`"
        )


require_torch(torch.__version__)


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL
    path: Path
    cuda_unavailable: str | None


_lock = threading.Lock()
_refusals = torch.library.Library("sms_plugin", "IMPL")
_outcome: _Loaded | str | None = None  # a str is the reason why there is no library


def load() -> ctypes.CDLL:
    """Load the library at the first call; every later call returns the same one.

    Taken is the library that the package carries, if it fits this machine and its cards; otherwise
    the cached one for these sources, compiler and cards, which is built if it isn't there.

    Raises:
        LibraryUnavailable: why there is none and what to do; remembered for later calls.
    """
    return _load().library


def loaded_library() -> ctypes.CDLL | None:
    """The library if it is loaded already, else None; builds and loads nothing."""
    return _outcome.library if isinstance(_outcome, _Loaded) else None


def library_path() -> Path:
    """The file that was loaded (it is loaded now if need be)."""
    return _load().path


def cuda_unavailable_reason() -> str | None:
    """Why there is no code for CUDA tensors and what to do, or None; loads the library."""
    return _load().cuda_unavailable


def _load() -> _Loaded:
    global _outcome
    if _outcome is None:
        with _lock:
            if _outcome is None:
                try:
                    _outcome = _find_and_load(os.environ)
                except (BuildError, ArchListError) as error:
                    _outcome = f"sms_plugin's compiled library can't be had: {error}"
    if isinstance(_outcome, str):
        raise LibraryUnavailable(_outcome)
    return _outcome


def _find_and_load(environ: Mapping[str, str]) -> _Loaded:
    verbose = environ.get("SMS_PLUGIN_VERBOSE", "0") not in ("", "0")
    sources = source_folder()
    cards = visible_cards()
    driver = driver_cuda_version() if cards else None

    carried = carried_library(carried_folder(), sources, cards, driver)
    if carried.usable and carried.cuda_problem is None:
        try:
            return open_library(carried.path, None if cards else why_no_cards(), verbose)
        except BuildError as error:  # such as a C library that is older than the build machine's
            carried = Carried(carried.path, str(error))

    cuda = plan_cuda(cards, driver, environ)
    if carried.usable and not carried.has_cuda and cuda.missing:
        return open_library(carried.path, cuda.missing, verbose)  # a build wouldn't give more
    try:
        recipe = Recipe(sources, find_compiler(environ), cuda.nvcc, cuda.archs)
        library = cached_library(recipe, cache_folder(environ), verbose=verbose)
    except ToolMissing as error:
        if not carried.usable:
            why = f". (The package carries one, but {carried.problem})" if carried.problem else ""
            raise BuildError(f"{error}{why}") from error
        # Good for the CPU, whatever is missing for the cards.
        reason = f"the library in the package is of no use on it: {carried.cuda_problem}; {error}"
        loaded = open_library(carried.path, reason, verbose)
        if carried.has_cuda:
            _refuse_cuda(reason)
        return loaded
    return open_library(library, cuda.missing, verbose)


def open_library(path: Path, cuda_unavailable: str | None, verbose: bool) -> _Loaded:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{path} can't be loaded ({error}). If it was built on another system, delete its "
            "folder, and it is built again"
        ) from error
    library.sms_plugin_call_count.argtypes = (ctypes.c_int, ctypes.c_int)
    library.sms_plugin_call_count.restype = ctypes.c_int64
    if verbose:
        notice(f"loaded {path}" + (f"; {cuda_unavailable}" if cuda_unavailable else ""))
    return _Loaded(library, path, cuda_unavailable)


def carried_folder() -> Path:
    """Where the package keeps a library that was built ahead of time."""
    return Path(__file__).resolve().parent / "lib"


@dataclass(frozen=True)
class Carried:
    """What the library that lies in the package is good for here."""

    path: Path
    problem: str | None = None  # why it can't be used at all
    cuda_problem: str | None = None  # why it can't be used on the visible cards
    has_cuda: bool = False
    usable: bool = False


def carried_library(
    folder: Path, sources: Path, cards: Sequence[Capability], driver: Version | None
) -> Carried:
    """Look at the library in `folder`: whole, of these sources, for this machine and its cards?"""
    path = folder / LIBRARY_NAME
    if not path.is_file():
        return Carried(path)
    stamp = read_stamp(folder)
    if stamp is None:
        return Carried(path, "it is damaged")
    if stamp.machine != platform.machine():
        return Carried(path, f"it is for {stamp.machine}, and this is {platform.machine()}")
    if stamp.sources != sources_digest(sources):
        return Carried(path, "it was built from other sources than the ones beside it")
    return Carried(
        path,
        cuda_problem=_cuda_problem(stamp, cards, driver) if cards else None,
        has_cuda=stamp.cuda is not None,
        usable=True,
    )


def _cuda_problem(stamp: Stamp, cards: Sequence[Capability], driver: Version | None) -> str | None:
    if stamp.cuda is None:
        return "it has no CUDA code"
    uncovered = cards_without_code(stamp.parsed_archs(), cards)
    if uncovered:
        return f"it has code for {stamp.archs} and none for {listed(uncovered)}"
    if driver is not None and int(stamp.cuda.split(".")[0]) > driver[0]:
        return f"it needs a driver for CUDA {stamp.cuda}, and this one is for {dotted(driver)}"
    return None


def _refuse_cuda(reason: str) -> None:
    """Put an error that says why in place of the loaded CUDA kernels, which can't run here."""

    def refuse(*arguments: object) -> None:
        raise LibraryUnavailable(f"sms_plugin has no CUDA kernel for this card: {reason}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that a kernel is replaced
        for name in ("scaled_mask_softmax", "scaled_mask_softmax_backward"):
            _refusals.impl(name, refuse, "CUDA")

"""What the doctor says about the tools of a build: no torch is needed to look at them."""

from __future__ import annotations

import inspect
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sms_plugin import toolchain
from sms_plugin.archs import (
    Arch,
    ArchListError,
    Capability,
    cards_without_code,
    parse_archs,
    require_supported,
)
from sms_plugin.cache import cache_folder
from sms_plugin.toolchain import BuildError, Nvcc, ToolMissing, find_compiler, find_ninja, find_nvcc

Status = Literal["ok", "warning", "problem"]

_SPACE_FOR_A_BUILD = 200 * 2**20  # bytes; the library and its object files take a tenth of it
_ARCH_LIST = "TORCH_CUDA_ARCH_LIST"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    A problem keeps the operator from working on a visible device; a warning doesn't.
    """

    about: str
    status: Status
    seen: str
    fix: str = ""


def from_error(about: str, status: Status, error: Exception | str) -> Finding:
    """The finding of an error that says what is wrong and, in its next sentences, what to do."""
    seen, _, fix = str(error).partition(". ")
    return Finding(about, status, seen, fix)


def examine_tools(
    environ: Mapping[str, str],
    torch_cuda: str | None,
    cards: Sequence[Capability],
    driver: tuple[int, int] | None,
    severity: Status,
) -> Iterator[Finding]:
    """Look at nvcc, the list of architectures, the compiler, ninja and the cache.

    Args:
        torch_cuda: torch.version.cuda.
        cards: the compute capabilities of the visible GPUs.
        driver: the newest CUDA version that the driver runs.
        severity: how bad it is if something isn't there.
    """
    for_cuda: Status = severity if cards else "warning"
    nvcc = None
    try:
        nvcc = find_nvcc(torch_cuda, environ)
    except ToolMissing as error:
        if cards:
            fix = f"install a CUDA {torch_cuda} toolkit and set CUDA_HOME to it"
            yield Finding("nvcc", for_cuda, str(error), fix)
        else:
            yield Finding("nvcc", "ok", "none works, and none is needed without a GPU")
    yield from _examine_nvccs(environ, nvcc, torch_cuda, driver, for_cuda)
    yield from _examine_arch_list(environ, nvcc, cards, for_cuda)
    try:
        compiler = find_compiler(environ)
        yield Finding("C++ compiler", "ok", f"{compiler.version} ({' '.join(compiler.command)})")
    except ToolMissing as error:
        yield from_error("C++ compiler", severity, error)
    try:
        yield Finding("ninja", "ok", str(find_ninja(environ)))
    except ToolMissing as error:
        yield from_error("ninja", severity, error)
    cache = examine_cache(environ)
    yield cache if cache.status == "ok" else replace(cache, status=severity)


def _examine_nvccs(
    environ: Mapping[str, str],
    chosen: Nvcc | None,
    torch_cuda: str | None,
    driver: tuple[int, int] | None,
    severity: Status,
) -> Iterator[Finding]:
    usual_folders = inspect.signature(find_nvcc).parameters["usual_folders"].default
    for found_by, program in toolchain.nvcc_candidates(environ, usual_folders):
        if program is None:
            continue
        about = f"nvcc ({found_by})"
        nvcc = toolchain.inspect_nvcc(program, found_by)
        if isinstance(nvcc, str):
            fix = "take it off the PATH, or install that toolkit again"
            if found_by.startswith("$"):
                fix = f"set {found_by[1:]} to the folder that holds bin/nvcc, or unset it"
            yield Finding(about, "warning", f"{program} {nvcc}", fix)
            continue
        seen = f"{nvcc.build} in {nvcc.root}, for {' '.join(map(str, sorted(nvcc.archs)))}"
        if nvcc != chosen:
            yield Finding(about, "ok", f"{seen}; not used")
        elif driver is not None and nvcc.version[0] > driver[0]:
            fix = f"update the driver, or set CUDA_HOME to a CUDA {driver[0]} toolkit"
            yield Finding(about, severity, f"{seen}; used, but too new for the driver", fix)
        elif not nvcc.library_folders:
            fix = "install the runtime of that toolkit (from PyPI: nvidia-cuda-runtime)"
            yield Finding(about, "warning", f"{seen}; used, but it lacks libcudart_static.a", fix)
        elif torch_cuda and nvcc.version[0] != int(torch_cuda.split(".")[0]):
            seen += f"; used. Torch's CUDA is {torch_cuda}, another major version, which is fine:"
            yield Finding(about, "ok", f"{seen} the library brings its own runtime")
        else:
            yield Finding(about, "ok", f"{seen}; used")


def _examine_arch_list(
    environ: Mapping[str, str], nvcc: Nvcc | None, cards: Sequence[Capability], severity: Status
) -> Iterator[Finding]:
    wish = environ.get(_ARCH_LIST, "").strip()
    if not wish:
        yield Finding(_ARCH_LIST, "ok", "unset: a build is for the visible GPUs")
        return
    good: list[Arch] = []
    for entry in re.split(r"[;\s]+", wish):
        about = f"{_ARCH_LIST} {entry!r}"
        try:
            archs = parse_archs(entry, source=_ARCH_LIST)
            if nvcc:
                require_supported(archs, nvcc.archs, source=_ARCH_LIST, compiler=str(nvcc))
        except ArchListError as error:
            yield from_error(about, severity, error)
            continue
        good += archs
        covered = [card for card in cards if not cards_without_code(archs, [card])]
        on = " ".join(f"sm_{major}{minor}" for major, minor in covered) or "no visible GPU"
        yield Finding(about, "ok", f"{' '.join(map(str, archs))}: runs on {on}")
    for major, minor in cards_without_code(good, cards):
        seen = f"no code for the visible sm_{major}{minor}, and no PTX that would run there"
        yield Finding(_ARCH_LIST, severity, seen, f"add {major}.{minor} to it, or unset it")


def examine_cache(environ: Mapping[str, str]) -> Finding:
    """Whether the cache folder can be written; it isn't made."""
    fix = "set SMS_PLUGIN_CACHE to a folder that this user can write, on a disk with some space"
    try:
        folder = cache_folder(environ)
    except BuildError as error:
        return Finding("cache", "problem", str(error), fix)
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("cache", "problem", f"{folder} can't be written ({error})", fix)
    seen = f"{folder}, {free / 2**30:.1f} GB free"
    if free < _SPACE_FOR_A_BUILD:
        return Finding("cache", "problem", f"{seen}: a build may not fit", fix)
    return Finding("cache", "ok", seen)

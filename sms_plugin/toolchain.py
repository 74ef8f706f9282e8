"""The programs that a build needs: a C++ compiler, ninja, and nvcc with the toolkit around it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PROBE_TIMEOUT = 60  # seconds; a probe takes milliseconds unless the program sits on a dead mount


class BuildError(RuntimeError):
    """Why the library can't be built, and what to do about it."""


class ToolMissing(BuildError):
    """A program that the build needs isn't there."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]  # the program and the arguments that $CXX gives it
    version: str  # first line of --version


@dataclass(frozen=True)
class Nvcc:
    root: Path  # the toolkit: bin/nvcc and, usually, include and lib
    version: tuple[int, int]
    build: str  # "13.0.88", or the release where nvcc names no build
    archs: frozenset[int]  # what it can compile for: 90 for sm_90
    found_by: str
    library_folders: tuple[Path, ...] = field(default=())  # where libcudart_static.a lies

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} ({self.root})"


def output_of(*command: str | Path) -> str | None:
    """What a command prints, or None if it can't be run or fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """The C++ compiler: $CXX if set, otherwise c++, g++ or clang++ on the PATH."""
    wish = environ.get("CXX", "").strip()
    path = environ.get("PATH", os.defpath)
    if wish:
        wishes = [[wish] if Path(wish).is_file() else shlex.split(wish)]
    else:
        wishes = [["c++"], ["g++"], ["clang++"]]
    for program, *arguments in wishes:
        found = shutil.which(program, path=path)
        # Asked for its version, since a stub or a broken wrapper is found as well.
        text = output_of(found, *arguments, "--version") if found else None
        if found and text is not None:
            return Compiler((found, *arguments), text.splitlines()[0] if text else found)
    looked_at = f"CXX={wish!r}" if wish else f"c++, g++, clang++ on PATH={path!r}"
    raise ToolMissing(
        f"no working C++ compiler was found (looked at {looked_at}). Install one (apt-get install "
        "g++, dnf install gcc-c++ or conda install cxx-compiler), or set CXX to one, or install a "
        "wheel that carries the library: `python -m sms_plugin.build --wheel DIR` makes it on a "
        "machine with a compiler"
    )


def find_ninja(environ: Mapping[str, str] = os.environ) -> Path:
    """The ninja of this Python environment, even when that isn't on the PATH, or another one."""
    path = environ.get("PATH", os.defpath)
    candidates = [_packaged_ninja(), Path(sysconfig.get_path("scripts")) / "ninja"]
    on_path = shutil.which("ninja", path=path)
    candidates.append(Path(on_path) if on_path else None)
    for candidate in candidates:
        if candidate and candidate.is_file() and output_of(candidate, "--version") is not None:
            return candidate
    raise ToolMissing(
        f"no working ninja was found, neither in the environment of {sys.executable} nor on "
        f"PATH={path!r}. Run `{sys.executable} -m pip install ninja`"
    )


def _packaged_ninja() -> Path | None:
    if importlib.util.find_spec("ninja") is None:
        return None
    import ninja

    folder = getattr(ninja, "BIN_DIR", None)
    return Path(folder) / "ninja" if folder else None


def find_nvcc(
    torch_cuda: str | None = None,
    environ: Mapping[str, str] = os.environ,
    usual_folders: tuple[str, ...] = ("/usr/local/cuda", "/opt/cuda"),
) -> Nvcc:
    """The CUDA compiler, with the toolkit that really stands behind it.

    Looked at, in this order: $CUDA_HOME and $CUDA_PATH, the PATH, NVIDIA's packages from PyPI, and
    the usual folders. Without $CUDA_HOME, one of torch's own major version goes first; `torch_cuda`
    is torch.version.cuda.

    Raises:
        ToolMissing: with every place that was looked at, and what was wrong there.
    """
    wished_major = int(torch_cuda.split(".")[0]) if torch_cuda else None
    rejected = []
    fallback = None
    for found_by, program in nvcc_candidates(environ, usual_folders):
        if program is None:
            rejected.append(f"{found_by}: none")
            continue
        nvcc = inspect_nvcc(program, found_by)
        if isinstance(nvcc, str):
            rejected.append(f"{found_by}: {program} {nvcc}")
        elif found_by.startswith("$") or wished_major in (None, nvcc.version[0]):
            return nvcc
        else:
            fallback = fallback or nvcc
    if fallback:
        return fallback
    raise ToolMissing(f"no working nvcc was found ({'; '.join(rejected)})")


def nvcc_candidates(
    environ: Mapping[str, str], usual_folders: tuple[str, ...]
) -> Iterator[tuple[str, Path | None]]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = environ.get(variable)
        yield f"${variable}", Path(home) / "bin" / "nvcc" if home else None
    on_path = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    yield "PATH", Path(on_path) if on_path else None
    packaged = list(_packaged_nvccs())
    yield from (("the nvidia-cuda-nvcc package", program) for program in packaged)
    if not packaged:
        yield "the nvidia-cuda-nvcc package", None
    for folder in usual_folders:
        program = Path(folder) / "bin" / "nvcc"
        yield folder, program if program.is_file() else None


def _packaged_nvccs() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)
        yield from Path(folder).glob("cuda_nvcc/bin/nvcc")


def inspect_nvcc(program: Path, found_by: str) -> Nvcc | str:
    """What stands behind `program`, or why it is of no use."""
    if not program.is_file():
        return "does not exist"
    text = output_of(program, "--version")
    if text is None:
        return "can't be run"
    version = re.search(r"release (\d+)\.(\d+)", text)
    if version is None:
        return f"names no release: {text.strip()[:80]!r}"
    build = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    listed = output_of(program, "--list-gpu-arch") or ""
    archs = frozenset(int(number) for number in re.findall(r"compute_(\d+)\b", listed))
    if not archs:
        return "lists no architectures (--list-gpu-arch); CUDA 11.2 or newer is needed"
    root, folders = _toolkit_behind(program)
    if not (root / "bin" / "nvcc").exists():
        return f"belongs to {root}, which has no bin/nvcc"
    return Nvcc(
        root=root,
        version=(int(version[1]), int(version[2])),
        build=build[1] if build else f"{version[1]}.{version[2]}",
        archs=archs,
        found_by=found_by,
        library_folders=folders,
    )


def _toolkit_behind(program: Path) -> tuple[Path, tuple[Path, ...]]:
    """The toolkit's folder, and the folders of its static runtime library.

    nvcc on the PATH is often a wrapper script far away from the toolkit; a dry run says where the
    real one is. The runtime lies in lib64, lib or targets/*/lib, or where the system keeps its own.
    """
    dry_run = output_of(program, "--dryrun", "-E", "-x", "cu", os.devnull) or ""
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    root = Path(top[1].strip()) if top else program.resolve().parent.parent
    root = root.resolve()
    folders = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
    folders += [Path(match) for match in re.findall(r'"-L([^"]+)"', dry_run)]
    found = (folder.resolve() for folder in folders if (folder / "libcudart_static.a").is_file())
    return root, tuple(dict.fromkeys(found))

"""What the library is made of, as one build.ninja: for first use, wheels and CI alike."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sms_plugin.archs import Arch
from sms_plugin.toolchain import BuildError, Compiler, Nvcc, find_ninja

LIBRARY_NAME = "libsms_plugin.so"

# The oldest PyTorch that the library runs under. Without it the library would ask for the stable
# ABI of the PyTorch that it was built with, and fail to load under an older one.
TORCH_TARGET_VERSION = "0x020a000000000000"

_DEFINES = (f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-Icsrc", "-isystem", "torch/include")
# No -ffast-math: NaN and infinity have a meaning here.
_CPU_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *_DEFINES),
)
_CUDA_FLAGS = (
    *("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", "-DUSE_CUDA", *_DEFINES),
    "-Xfatbin=-compress-all",  # a seventh of the size
)
# libtorch_cuda is not linked: it would tie the library to CUDA builds of PyTorch.
_LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Ltorch/lib", "-ltorch_cpu")
_CUDA_RUNTIME = ("-lcudart_static", "-ldl", "-lpthread", "-lrt")

_TEMPORARY = "temporary"  # folder for the compilers' own files

_MESSAGE_LENGTH = 6000  # characters of the compilers' output that an error shows, the last ones

_SOURCE_SUFFIXES = (".cpp", ".cu", ".h", ".cuh")

# What a compiler prints -> what a user can do about it.
_ADVICE = {
    "unsupported GNU version": "nvcc refuses this host compiler: set CXX to an older one (g++-12)",
    "Killed": "a compiler was killed, most likely for want of memory: set MAX_JOBS=1",
    "No space left on device": "the disk is full: free some, or set SMS_PLUGIN_CACHE to another",
    "cuda_runtime.h: No such file": "the toolkit lacks its headers: install nvidia-cuda-runtime",
    "find -lcudart_static": "the toolkit lacks its static runtime: install nvidia-cuda-runtime",
}


def source_folder() -> Path:
    """csrc of the checkout that this package lies in, otherwise the copy that the wheel brought."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    # Without pyproject.toml, a csrc beside the package is some other project's in site-packages.
    if (checkout / "pyproject.toml").is_file() and (checkout / "csrc").is_dir():
        return checkout / "csrc"
    return package / "csrc"


def source_files(sources: Path) -> list[Path]:
    """Every source and header below `sources`, relative to it, in a fixed order."""
    if not sources.is_dir():
        raise BuildError(f"the sources aren't there: {sources} is no folder; reinstall sms_plugin")
    return sorted(
        path.relative_to(sources) for path in sources.rglob("*") if path.suffix in _SOURCE_SUFFIXES
    )


def sources_digest(sources: Path) -> str:
    """A digest of every source and of the flags: equal digests mean the same code."""
    digest = hashlib.sha256(repr((_CPU_FLAGS, _CUDA_FLAGS, _LINK_FLAGS, _CUDA_RUNTIME)).encode())
    for path in source_files(sources):
        content = (sources / path).read_bytes()
        digest.update(f"\0{path.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def torch_folder() -> Path:
    """The folder of the installed torch: headers in include, libraries in lib."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"torch isn't installed for {sys.executable}: run `pip install torch`")
    folder = Path(spec.origin).parent
    if not (folder / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"{folder} has no stable C++ headers: torch 2.10 or newer is needed")
    return folder


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the library is."""

    sources: Path
    compiler: Compiler
    nvcc: Nvcc | None = None  # None: CPU only
    archs: tuple[Arch, ...] = ()
    strict: bool = False  # warnings are errors, and nvcc reports what each kernel uses

    @cached_property
    def digest(self) -> str:
        return sources_digest(self.sources)

    @cached_property
    def key(self) -> str:
        """Names the library: two recipes with one key give the same library."""
        parts = (
            self.digest,
            self.compiler.version,
            self.compiler.command[1:],
            self.nvcc.build if self.nvcc else "",
            [str(arch) for arch in self.archs],
            platform.machine(),
            platform.libc_ver(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def __str__(self) -> str:
        if self.nvcc is None:
            return "CPU only"
        return f"CPU, and CUDA for {', '.join(map(str, self.archs))} with {self.nvcc}"


def job_count(environ: Mapping[str, str] = os.environ) -> int:
    """How many compilers run at once: $MAX_JOBS, or the processors that this process may use."""
    text = environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text!r}: it must be a whole number from 1 on, or be unset")
    return int(text)


def write_build_file(recipe: Recipe, folder: Path) -> tuple[str, ...]:
    """Lay out `folder` for a build and write its build.ninja; returns the paths of the objects.

    The sources are copied, so that an edit during the build can't put one version's code under
    another's key; torch and the toolkit come in as links. Every path in a command is then relative
    and plain: nvcc breaks on commas, and others on spaces, parentheses or '=' in folder names.
    """
    files = source_files(recipe.sources)
    for path in files:
        (folder / "csrc" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(recipe.sources / path, folder / "csrc" / path)
    (folder / _TEMPORARY).mkdir()
    (folder / "torch").symlink_to(torch_folder(), target_is_directory=True)

    cxx = [*recipe.compiler.command]
    warnings = ["-Werror"] if recipe.strict else []
    rules = {"cpu": [*cxx, *_CPU_FLAGS, *warnings, "-c"]}
    link = [*_LINK_FLAGS]
    edges = {path: "cpu" for path in files if path.suffix == ".cpp"}
    if recipe.nvcc is not None:
        edges |= {path: "cuda" for path in files if path.suffix == ".cu"}
        rules["cuda"] = _nvcc_command(recipe, recipe.nvcc, folder, len(edges))
        link += [f"-Lcudart{index}" for index in range(len(recipe.nvcc.library_folders))]
        link += _CUDA_RUNTIME

    lines = ["ninja_required_version = 1.5"]
    for name, command in rules.items():
        lines += [f"rule {name}", f"  command = {_ninja_command(command)} $in -o $out"]
    lines += ["rule link", f"  command = {_ninja_command(cxx)} -o $out $in {_ninja_command(link)}"]
    headers = " ".join(
        _ninja_path(f"csrc/{path.as_posix()}") for path in files if path.suffix in (".h", ".cuh")
    )
    objects = []
    for path, rule in edges.items():
        objects.append(f"objects/{path.as_posix()}.o")
        source = _ninja_path(f"csrc/{path.as_posix()}")
        lines.append(f"build {_ninja_path(objects[-1])}: {rule} {source} | {headers}")
    lines.append(f"build {LIBRARY_NAME}: link {' '.join(map(_ninja_path, objects))}")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tuple(objects)


def _nvcc_command(recipe: Recipe, nvcc: Nvcc, folder: Path, files: int) -> list[str]:
    (folder / "cuda").symlink_to(nvcc.root, target_is_directory=True)
    for index, library_folder in enumerate(nvcc.library_folders):
        (folder / f"cudart{index}").symlink_to(library_folder, target_is_directory=True)
    # The compiler itself, not the ccache before it nor the options behind it.
    host = [word for word in recipe.compiler.command if not word.startswith("-")][-1]
    host = os.environ.get("NVCC_CCBIN") or host
    command = ["cuda/bin/nvcc", "-ccbin", host, *_CUDA_FLAGS]
    for arch in recipe.archs:
        command += arch.nvcc_flags()
    # One file for several cards is compiled in parallel where there are fewer files than jobs.
    threads = max(1, job_count() // files)
    if recipe.strict:
        threads = 1  # the reports of several cards would be mixed
        command += ["-Werror", "all-warnings", "-res-usage"]
    command += ["--threads", str(threads)]
    return [*command, "-c"]


def _ninja_path(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja_command(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def run_ninja(folder: Path, targets: tuple[str, ...], *, verbose: bool = False) -> str:
    """Build the targets in `folder`; returns everything that the compilers printed.

    Raises:
        BuildError: a command failed; with its output and, for known causes, what to do.
    """
    command = [str(find_ninja()), "-j", str(job_count()), *(["-v"] if verbose else []), *targets]
    lines = []
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Relative like every path here; English, which the advice below reads.
        env={**os.environ, "TMPDIR": _TEMPORARY, "LC_ALL": "C"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if verbose:
                print(line, end="", file=sys.stderr)
    output = "".join(lines)
    if process.returncode != 0:
        advice = [text for sign, text in _ADVICE.items() if sign in output]
        # Ninja reports each finished command as "[1/9] ..."; only the failed ones matter.
        reports = re.split(r"^(?=\[\d+/\d+\] )", output, flags=re.MULTILINE)
        failed = "".join(report for report in reports if "FAILED: " in report) or output
        raise BuildError(
            "compiling failed"
            + (f": {'; '.join(advice)}" if advice else "")
            + f". The compilers said:\n{failed.rstrip()[-_MESSAGE_LENGTH:]}"
        )
    return output


def compile_library(recipe: Recipe, folder: Path, *, verbose: bool = False) -> Path:
    """Build the library in the empty folder `folder`."""
    write_build_file(recipe, folder)
    run_ninja(folder, (LIBRARY_NAME,), verbose=verbose)
    return folder / LIBRARY_NAME

"""Small checkouts to build from, with sources of one line, and programs that imitate tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sms_plugin
from sms_plugin.toolchain import BuildError, Nvcc, find_compiler, find_nvcc

ROOT = Path(__file__).resolve().parent.parent

# What call_count(0, 0) of the stub returns: shows which sources a loaded library was built from.
STUB_NUMBER = 41

STUB_SOURCE = """\
#include <cstdint>
extern "C" __attribute__((visibility("default"))) int64_t sms_plugin_call_count(int op, int dev) {
  return NUMBER + op + dev;
}
"""

STUB_KERNEL = """\
__global__ void zero(float* values) { values[threadIdx.x] = 0.0f; }
void launch(float* values) { zero<<<1, 32>>>(values); }
"""


def _has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


def real_nvcc() -> Nvcc:
    """The machine's nvcc; skips the test where there is none."""
    try:
        return find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler on this machine")


def write_stub_sources(folder: Path, *, number: int = STUB_NUMBER, cuda: bool = False) -> Path:
    """Fill `folder` with the least that can be built and loaded; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call_count.cpp").write_text(STUB_SOURCE.replace("NUMBER", str(number)))
    if cuda:
        (folder / "cuda").mkdir(exist_ok=True)
        (folder / "cuda" / "zero.cu").write_text(STUB_KERNEL)
    return folder


def make_checkout(folder: Path, *, stub: bool = True, cuda: bool = False) -> Path:
    """A checkout in `folder` without a carried library; `stub`: csrc holds the stub's sources."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "README.md").write_text("A checkout for a test.\n")
    package = ROOT / "sms_plugin" if not stub else Path(sms_plugin.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "lib", "csrc")
    shutil.copytree(package, folder / "sms_plugin", ignore=ignored)
    if stub:
        write_stub_sources(folder / "csrc", cuda=cuda)
    else:
        shutil.copytree(ROOT / "csrc", folder / "csrc")
    return folder


def environment(checkout: Path | None, **changes: str | None) -> dict[str, str]:
    """This process's environment with `checkout` importable; a None takes a variable away."""
    values = {key: value for key, value in os.environ.items() if not key.startswith("SMS_PLUGIN_")}
    values["PYTHONPATH"] = str(checkout) if checkout else ""
    values["PYTHONIOENCODING"] = "utf-8"
    for key, value in changes.items():
        values.pop(key, None)
        if value is not None:
            values[key] = value
    return values


def run_python(
    code: str,
    env: dict[str, str],
    *,
    cwd: Path = Path("/"),
    python: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def write_program(path: Path, script: str) -> Path:
    """An executable shell script at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


def write_fake_nvcc(
    root: Path, *, release: str = "13.0", archs: str = "75 80 90 100 120", banner: str | None = None
) -> Path:
    """A toolkit in `root` whose nvcc answers questions and compiles nothing; returns the nvcc."""
    version = (
        banner if banner is not None else f"Cuda compilation tools, release {release}, V{release}.7"
    )
    listed = " ".join(f"compute_{arch}" for arch in archs.split())
    return write_program(
        root / "bin" / "nvcc",
        f"""case "$1" in
--version) echo '{version}' ;;
--list-gpu-arch) printf '%s\\n' {listed} ;;
--dryrun) echo '#$ TOP={root}/bin/..' ;;
*) exit 1 ;;
esac
""",
    )


def wrapped_compiler(folder: Path, log: Path, before: str = "") -> Path:
    """The real compiler; it logs each run that compiles or links, and runs `before` ahead of it."""
    real = " ".join(find_compiler().command)
    return write_program(
        folder / "wrapped" / "c++",
        f'case "$*" in *--version*) exec {real} "$@" ;; esac\n'
        f"echo run >>'{log}'\n{before}\nexec {real} \"$@\"\n",
    )


def count_runs(log: Path) -> int:
    """How often the wrapped compiler ran."""
    return len(log.read_text().splitlines())

"""The CUDA code of the benchmarks alone: compiled once into the cache, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from sms_plugin.cache import cache_folder
from sms_plugin.toolchain import BuildError, find_compiler, find_nvcc

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("stream_kernel.cu", "article_kernel.cu")
)
# As the article has it; the streams compute nothing that it could change.
FLAGS = ("-shared", "-O3", "-std=c++17", "--use_fast_math", "-cudart", "static")
COMPILE_SECONDS = 300


def build(arch: int, folder: Path) -> Path:
    """The library for one card (90 for sm_90) in `folder`; compiled if it isn't there.

    Raises:
        BuildError: no nvcc, or it fails; with what it printed.
    """
    nvcc = find_nvcc(torch.version.cuda)
    digest = hashlib.sha256(repr((FLAGS, arch, nvcc.build)).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    library = folder / f"benchmarks-{digest.hexdigest()[:20]}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=folder) as build_folder:
        built = Path(build_folder) / library.name
        command = [
            str(nvcc.root / "bin" / "nvcc"),
            *FLAGS,
            "-Xcompiler=-fPIC",
            f"-ccbin={find_compiler().command[0]}",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            *(f"-L{path}" for path in nvcc.library_folders),
            f"-o={built}",
            *map(str, SOURCES),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode != 0:
            raise BuildError(
                f"the benchmarks' own CUDA code can't be compiled by {nvcc}; it said:\n"
                f"{(done.stdout + done.stderr).strip()[-2000:]}"
            )
        os.replace(built, library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The library for the current card."""
    major, minor = torch.cuda.get_device_capability()
    library = ctypes.CDLL(str(build(10 * major + minor, cache_folder())))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    real = ctypes.c_float
    library.sms_benchmark_stream.argtypes = [
        pointer, size, pointer, size, pointer, size, integer, pointer
    ]  # fmt: skip
    library.sms_article_forward.argtypes = [
        integer, pointer, pointer, pointer, integer, integer, real, integer, integer, pointer
    ]  # fmt: skip
    library.sms_article_backward.argtypes = [
        integer, pointer, pointer, pointer, integer, integer, real, pointer
    ]  # fmt: skip
    library.sms_benchmark_error.restype = ctypes.c_char_p
    return library


def check(error: int, what: str) -> None:
    """Raise if a launch failed."""
    if error != 0:
        raise RuntimeError(f"{what}: {load().sms_benchmark_error(error).decode()}")


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream

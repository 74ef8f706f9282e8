"""Builds the library ahead of its first use, into the package or into a wheel.

    python -m sms_plugin.build --archs "80;90;100;120" --wheel dist

A wheel made so carries the library and runs on machines without a compiler, on the CPU and on GPUs
of the named architectures. `--compile-only` is the check for CI.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sms_plugin.archs import (
    Arch,
    ArchListError,
    parse_archs,
    require_supported,
    with_newest_ptx,
)
from sms_plugin.cache import cache_folder, cached_library, make_stamp, publish
from sms_plugin.extension import carried_folder
from sms_plugin.recipe import (
    LIBRARY_NAME,
    Recipe,
    run_ninja,
    source_folder,
    write_build_file,
)
from sms_plugin.toolchain import BuildError, Nvcc, ToolMissing, find_compiler, find_nvcc

# Data-centre and workstation cards from A100 to RTX 50; sm_80 code runs on 8.6 and 8.9 as well.
DEFAULT_ARCHS = "80;90;100;120"


def choose_archs(wish: str | None, nvcc: Nvcc) -> tuple[Arch, ...]:
    """The architectures for a build ahead of time, with PTX of the newest for cards still to come.

    Args:
        wish: the list of --archs; None takes TORCH_CUDA_ARCH_LIST as it is written or, if that is
            unset, those of the default list that nvcc knows.
    """
    from_environment = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if wish is not None:
        source, archs = "--archs", with_newest_ptx(parse_archs(wish, source="--archs"))
    elif from_environment:
        source = "TORCH_CUDA_ARCH_LIST"
        archs = parse_archs(from_environment, source=source)
    else:
        source = "the default list"
        archs = parse_archs(DEFAULT_ARCHS, source=source)
        archs = with_newest_ptx([arch for arch in archs if arch.number in nvcc.archs])
    require_supported(archs, nvcc.archs, source=source, compiler=str(nvcc))
    return archs


@dataclass(frozen=True)
class KernelUsage:
    """What ptxas says about one kernel for one architecture."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def parse_usage(output: str) -> list[KernelUsage]:
    """Read the reports of `nvcc -res-usage`."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'"
        r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        KernelUsage(
            match["name"],
            match["arch"],
            registers=int(match["registers"]),
            stack_bytes=int(match["stack"]),
            spill_bytes=int(match["stores"]) + int(match["loads"]),
        )
        for match in pattern.finditer(output)
    ]


def check_sources(recipe: Recipe, *, verbose: bool = False) -> str:
    """Compile every source with warnings as errors; returns a line about the kernels.

    Needs neither a GPU nor a CUDA build of torch.

    Raises:
        BuildError: a source doesn't compile without warnings, or a kernel spills registers.
    """
    with tempfile.TemporaryDirectory(prefix="sms_plugin-check-") as folder:
        objects = write_build_file(recipe, Path(folder))
        output = run_ninja(Path(folder), objects, verbose=verbose)
    if recipe.nvcc is None:
        return f"{len(objects)} files, CPU only: no warnings"
    kernels = parse_usage(output)
    if not kernels:
        raise BuildError(f"{recipe.sources} has no CUDA kernel, so nothing was checked for spills")
    spilling = [kernel for kernel in kernels if kernel.spill_bytes]
    if spilling:
        raise BuildError(
            f"{len(spilling)} of {len(kernels)} kernels spill registers:\n"
            + "\n".join(
                f"  {kernel.arch} {kernel.spill_bytes} bytes {kernel.name}" for kernel in spilling
            )
        )
    archs = sorted({kernel.arch for kernel in kernels}, key=lambda name: (len(name), name))
    return (
        f"{len(objects)} files, {len(kernels)} kernels for {', '.join(archs)}: no warnings, "
        f"no spills, at most {max(kernel.registers for kernel in kernels)} registers and "
        f"{max(kernel.stack_bytes for kernel in kernels)} bytes of stack"
    )


def build_into(folder: Path, recipe: Recipe, *, verbose: bool = False) -> Path:
    """Put the library of this recipe into `folder`, by way of the cache."""
    library = cached_library(recipe, cache_folder(), verbose=verbose)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        publish(library, make_stamp(recipe, library), folder)
    except OSError as error:
        raise BuildError(f"the library can't be written to {folder}: {error}") from error
    return folder / LIBRARY_NAME


def make_wheel(destination: Path) -> None:
    """Make a wheel of the checkout, with the library that was built into it."""
    root = source_folder().parent
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(destination)]
    if has_setuptools():
        command.append("--no-build-isolation")  # nothing to download then
    if subprocess.run([*command, str(root)]).returncode != 0:
        raise BuildError("pip made no wheel; its own message is above")


def has_setuptools() -> bool:
    """Whether this environment's setuptools can make wheels by itself (70.1 and newer)."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= (70, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sms_plugin.build",
        description="Build sms_plugin's library ahead of its first use, into the package.",
    )
    cuda = parser.add_mutually_exclusive_group()
    cuda.add_argument(
        "--archs",
        metavar="LIST",
        help='GPU architectures, such as "80;90" or "9.0 12.0"; PTX of the newest is added. '
        f'Default: TORCH_CUDA_ARCH_LIST, or "{DEFAULT_ARCHS}"',
    )
    cuda.add_argument("--cpu-only", action="store_true", help="no CUDA code: needs no nvcc")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--wheel", metavar="DIR", type=Path, help="make a wheel in DIR as well")
    goal.add_argument(
        "--compile-only",
        action="store_true",
        help="a check: warnings are errors, kernels that spill are refused, nothing is kept",
    )
    parser.add_argument("--verbose", action="store_true", help="print the commands")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    verbose = options.verbose or os.environ.get("SMS_PLUGIN_VERBOSE", "0") not in ("", "0")
    try:
        nvcc: Nvcc | None = None
        archs: tuple[Arch, ...] = ()
        if options.wheel is not None and not (source_folder().parent / "pyproject.toml").is_file():
            raise BuildError(
                "--wheel needs a checkout, and this sms_plugin was installed without one: run it "
                "in a clone of the repository"
            )
        if not options.cpu_only:
            try:
                nvcc = find_nvcc()
            except ToolMissing as error:
                raise BuildError(
                    f"{error}. Install a CUDA toolkit and set CUDA_HOME to it, or run "
                    "`pip install '.[nvcc]'` in the checkout, or pass --cpu-only"
                ) from error
            archs = choose_archs(options.archs, nvcc)
        recipe = Recipe(source_folder(), find_compiler(), nvcc, archs, strict=options.compile_only)
        if options.compile_only:
            print(check_sources(recipe, verbose=verbose))
            return 0
        library = build_into(carried_folder(), recipe, verbose=verbose)
        print(f"{library}: {recipe}, {library.stat().st_size / 2**20:.2f} MB")
        if options.wheel is not None:
            make_wheel(options.wheel)
    except (BuildError, ArchListError) as error:
        print(f"python -m sms_plugin.build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The GPUs that this process can use, and the CUDA part of a build for them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sms_plugin.archs import (
    Arch,
    ArchListError,
    Capability,
    archs_for_cards,
    cards_without_code,
    parse_archs,
    require_supported,
)
from sms_plugin.toolchain import Nvcc, ToolMissing, find_nvcc

Version = tuple[int, int]


def visible_cards() -> tuple[Capability, ...]:
    """The compute capabilities of the GPUs that torch can use in this process."""
    if torch.cuda._is_in_bad_fork():
        return ()  # a forked child of a process that uses CUDA: torch lets it use no card at all
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    return tuple(
        sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    )


def driver_cuda_version() -> Version | None:
    """The newest CUDA version that the installed driver runs, or None if it can't be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


@dataclass(frozen=True)
class CudaPart:
    """The CUDA part of a build for the visible cards."""

    nvcc: Nvcc | None = None  # None: CPU only
    archs: tuple[Arch, ...] = ()
    missing: str | None = None  # why there is no CUDA part, and what to do


def plan_cuda(
    cards: tuple[Capability, ...], driver: Version | None, environ: Mapping[str, str]
) -> CudaPart:
    """Choose nvcc and the architectures for the visible cards, or say why there is no CUDA code.

    TORCH_CUDA_ARCH_LIST is taken as it is written; otherwise the cards' own, and PTX of the newest.
    """
    if not cards:
        return CudaPart(missing=why_no_cards())
    cpu_only = "the library was built for the CPU only"
    try:
        nvcc = find_nvcc(torch.version.cuda, environ)
    except ToolMissing as error:
        return CudaPart(missing=f"{error}, so {cpu_only}. {_nvcc_advice(driver)}")
    if driver is not None and nvcc.version[0] > driver[0]:
        return CudaPart(
            missing=f"{nvcc} needs a newer driver than the installed one, which is for CUDA "
            f"{dotted(driver)}, so {cpu_only}. Update the driver, or install a CUDA {driver[0]} "
            "toolkit and set CUDA_HOME to it",
        )
    wish = environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    source = f"TORCH_CUDA_ARCH_LIST={wish!r}"
    try:
        if wish:
            archs = parse_archs(wish, source="TORCH_CUDA_ARCH_LIST")
            require_supported(archs, nvcc.archs, source=source, compiler=str(nvcc))
        else:
            archs = archs_for_cards(cards, nvcc.archs, compiler=str(nvcc))
    except ArchListError as error:
        return CudaPart(missing=f"{error}. So {cpu_only}")
    uncovered = cards_without_code(archs, cards)
    if uncovered:
        return CudaPart(
            missing=f"{source} has no code for {listed(uncovered)}, and no PTX that would run "
            f"there, so {cpu_only}. Add {dotted(uncovered[-1])} to it, or unset it",
        )
    return CudaPart(nvcc, archs)


def why_no_cards() -> str:
    """Why torch can use no GPU in this process."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    return "torch saw no usable GPU when the library was loaded: see torch.cuda.is_available()"


def _nvcc_advice(driver: Version | None) -> str:
    major = (torch.version.cuda or "13").split(".")[0]
    advice = f"Install a CUDA {major} toolkit and set CUDA_HOME to it"
    if driver is None or driver[0] >= 13:
        advice += (
            ", or run `pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-runtime==13.0.*' "
            "'nvidia-cuda-cccl==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*'` (300 MB)"
        )
    return f"{advice}, then start Python again; or install a wheel that carries the CUDA code"


def listed(cards: Sequence[Capability]) -> str:
    return "the visible " + ", ".join(f"sm_{major}{minor}" for major, minor in cards)


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"

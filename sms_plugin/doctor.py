"""Says why the fused operator does, or does not, work on this machine, and what to do about it.

    python -m sms_plugin.doctor [--json] [--build]

Nothing is built unless --build is given. It runs without torch, too: torch and the modules that
need it are imported by the functions that use them, and sms_plugin/__init__.py lets a failed import
of torch pass for this command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import sms_plugin
from sms_plugin import toolchain
from sms_plugin.archs import Capability, cards_without_code, parse_archs
from sms_plugin.cache import cache_folder, read_stamp
from sms_plugin.diagnosis import Finding, Status, examine_cache, examine_tools, from_error
from sms_plugin.recipe import Recipe, source_folder
from sms_plugin.toolchain import BuildError, ToolMissing, find_compiler, find_ninja

if TYPE_CHECKING:
    from sms_plugin.cards import CudaPart, Version


@dataclass(frozen=True)
class Gpu:
    device: str  # "cuda:0"
    name: str
    capability: Capability


def examine(*, build: bool = False) -> list[Finding]:
    """Look at everything that the operator needs here, in the order in which it needs it.

    Args:
        build: build the library if there is none yet.
    """
    findings = [_examine_python(), _examine_torch()]
    if sms_plugin._import_error is not None:
        findings.append(_examine_gpus_without_torch())
        findings += examine_tools(os.environ, None, (), None, "problem")
        fix = "put torch right first"
        return [*findings, Finding("library", "problem", "torch is needed to look at it", fix)]

    import torch

    from sms_plugin.cards import driver_cuda_version, plan_cuda

    gpus = visible_gpus()
    cards = tuple(sorted({gpu.capability for gpu in gpus}))
    driver = driver_cuda_version()
    driver_of_cards = driver if cards else None
    cuda = plan_cuda(cards, driver_of_cards, os.environ)
    library = list(_examine_library(cards, driver_of_cards, cuda, gpus, build))
    # A missing tool does no harm to a library that is there and has code for every device.
    is_complete = library[0].status == "ok" and works(library)
    severity: Status = "warning" if is_complete else "problem"
    return [
        *findings,
        _examine_driver(driver, torch.version.cuda),
        *_examine_gpus(gpus),
        *examine_tools(os.environ, torch.version.cuda, cards, driver, severity),
        *library,
    ]


def works(findings: Sequence[Finding]) -> bool:
    """Whether nothing keeps the operator from working on every visible device."""
    return all(finding.status != "problem" for finding in findings)


def _examine_python() -> Finding:
    seen = f"{platform.python_version()} ({sys.executable}), {sys.platform} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", "warning", seen, "use Linux, or WSL2: nothing else was tried")
    return Finding("Python", "ok", seen)


def _examine_torch() -> Finding:
    error = sms_plugin._import_error
    pip = f"{sys.executable} -m pip install"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return Finding("torch", "problem", "isn't installed", f"run `{pip} torch`")
    if error is not None:
        seen = f"can't be used: {type(error).__name__}: {error}"
        fix = f"run `{pip} --upgrade torch` or, if it is damaged, `{pip} --force-reinstall torch`"
        return Finding("torch", "problem", seen, fix)

    import torch

    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Finding("torch", "ok", f"{torch.__version__}, {cuda} ({Path(torch.__file__).parent})")


def _examine_driver(driver: Version | None, torch_cuda: str | None) -> Finding:
    if driver is None:
        return Finding("driver", "ok", "none (libcuda.so.1 isn't found): the CPU is used")
    seen = f"runs CUDA up to {driver[0]}.{driver[1]} (nvidia-smi's number; a toolkit has its own)"
    if torch_cuda and int(torch_cuda.split(".")[0]) > driver[0]:
        fix = f"update the driver, or install a torch that is built for CUDA {driver[0]}"
        return Finding("driver", "warning", f"{seen}, and torch needs CUDA {torch_cuda}", fix)
    return Finding("driver", "ok", seen)


def visible_gpus() -> list[Gpu]:
    """Every GPU that torch can use in this process."""
    import torch

    from sms_plugin.cards import visible_cards

    count = torch.cuda.device_count() if visible_cards() else 0
    return [
        Gpu(f"cuda:{i}", torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(count)
    ]


def _examine_gpus(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if not gpus:
        yield _examine_absent_gpu()
        return
    import torch

    listed = [re.sub(r"^compute_(\w+)", r"\1+PTX", name) for name in torch.cuda.get_arch_list()]
    torch_archs = parse_archs(" ".join(listed), source="torch's list") if listed else ()
    for gpu in gpus:
        seen = "{}, compute capability {}.{}".format(gpu.name, *gpu.capability)
        if torch_archs and cards_without_code(torch_archs, [gpu.capability]):
            seen += f"; torch has no code for it, but for {' '.join(map(str, torch_archs))}"
            yield Finding(gpu.device, "problem", seen, "install a build of torch that has")
        else:
            yield Finding(gpu.device, "ok", seen)


def _gpus_of_nvidia_smi() -> str | None:
    query = ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    shown = toolchain.output_of("nvidia-smi", *query)
    return "; ".join(shown.splitlines()) if shown else None


def _examine_gpus_without_torch() -> Finding:
    shown = _gpus_of_nvidia_smi() or "none"
    return Finding("GPU", "ok", f"nvidia-smi shows {shown} (name, compute capability, driver)")


def _examine_absent_gpu() -> Finding:
    import torch

    from sms_plugin.cards import why_no_cards

    hidden = _gpus_of_nvidia_smi()
    if hidden is None:
        return Finding("GPU", "ok", "none: the CPU is used")
    seen = f"torch sees none, and nvidia-smi shows {hidden}"
    choice = os.environ.get("CUDA_VISIBLE_DEVICES")
    fix = '`python -c "import torch; torch.cuda.init()"` says why'
    if torch.version.cuda is None:
        fix = why_no_cards()
    elif choice is not None:
        seen += f" (CUDA_VISIBLE_DEVICES={choice!r})"
        fix = "set CUDA_VISIBLE_DEVICES to the numbers of the GPUs to use, or unset it"
    return Finding("GPU", "warning", seen, fix)


def _examine_library(
    cards: tuple[Capability, ...],
    driver: Version | None,
    cuda: CudaPart,
    gpus: Sequence[Gpu],
    build: bool,
) -> Iterator[Finding]:
    """The library first, then each device."""
    from sms_plugin import extension

    devices = ["cpu", *(gpu.device for gpu in gpus)]
    try:
        recipe = _recipe_to_build(cards, driver, cuda)
        if recipe is None or build:
            extension.load()
    except (BuildError, extension.LibraryUnavailable) as error:
        if isinstance(error, ToolMissing):
            yield from_error("library", "problem", error)
        else:  # perhaps with the output of a compiler
            yield Finding("library", "problem", str(error), "do what the message says")
        for device in devices:
            yield Finding(f"fused on {device}", "problem", "there is no library", "see above")
        return

    if recipe is not None and not build:
        seen = f"not built yet: it is at its first use, in one to three minutes ({recipe})"
        yield Finding(
            "library", "warning", seen, "`python -m sms_plugin.doctor --build` builds it now"
        )
        cache = examine_cache(os.environ)
        for device in devices:
            about = f"fused on {device}"
            if cache.status != "ok":
                yield Finding(about, "problem", "there is no place for the library", cache.fix)
            elif device != "cpu" and cuda.missing:
                yield from_error(about, "problem", cuda.missing)
            else:
                yield Finding(about, "ok", "works once the library is built")
        return

    path = extension.library_path()
    origin = "the package" if path.parent == extension.carried_folder() else "the cache"
    stamp = read_stamp(path.parent)
    if stamp is not None:
        code = f"the CPU and CUDA {stamp.cuda} for {stamp.archs}" if stamp.cuda else "the CPU only"
        origin += f", for {code}, compiled by {stamp.compiler}"
    yield Finding("library", "ok", f"loaded from {origin} ({path})")
    for device in devices:
        yield _examine_device(device)


def _recipe_to_build(
    cards: tuple[Capability, ...], driver: Version | None, cuda: CudaPart
) -> Recipe | None:
    """What `extension.load` would have to build; None if it takes a library that is there.

    Raises:
        BuildError: it would have to build one, and can't.
    """
    from sms_plugin import extension

    sources = source_folder()
    carried = extension.carried_library(extension.carried_folder(), sources, cards, driver)
    usable = carried.usable
    if usable and carried.cuda_problem is None:
        try:
            extension.open_library(carried.path, None, verbose=False)
            return None
        except BuildError:
            usable = False
    if usable and not carried.has_cuda and cuda.missing:
        return None
    try:
        recipe = Recipe(sources, find_compiler(), cuda.nvcc, cuda.archs)
        if read_stamp(cache_folder() / recipe.key) is not None:
            return None
        find_ninja()
    except ToolMissing:
        if usable:
            return None
        raise
    return recipe


def _examine_device(device: str) -> Finding:
    """Run the operator there, forward and backward, against the usual chain."""
    import torch

    from sms_plugin.functional import scaled_mask_softmax

    about = f"fused on {device}"
    try:
        scores = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
        grad_probs = torch.tensor([[1.0, 0.0, 3.0], [-1.0, 2.0, 0.0]], device=device)
        right = torch.softmax(scores * 0.5, dim=-1)
        probs = scaled_mask_softmax(scores, scale=0.5)
        torch.testing.assert_close(probs, right)
        grads = [torch.autograd.grad(p, scores, grad_probs)[0] for p in (probs, right)]
        torch.testing.assert_close(*grads)
    except RuntimeError as error:
        return Finding(about, "problem", str(error), "do what the message says")
    except AssertionError as error:
        return Finding(about, "problem", f"wrong results: {error}", "report it as a bug, please")
    return Finding(about, "ok", "works")


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, in columns, and one with the fix where there is one."""
    width = max(len(finding.about) for finding in findings) + 2
    indent = " " * (9 + width)
    lines = []
    for finding in findings:
        seen = finding.seen.rstrip().replace("\n", f"\n{indent}")
        lines.append(f"{finding.status:<9}{finding.about:<{width}}{seen}")
        if finding.fix:
            lines.append(f"{indent}-> {finding.fix}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sms_plugin.doctor",
        description="Say why the fused operator does, or does not, work on this machine. "
        "Exits with status 0 if it works, or needs only its first build, on every visible device.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--build", action="store_true", help="build the library if there is none")
    options = parser.parse_args(arguments)
    findings = examine(build=options.build)
    if options.json:
        listed = [asdict(finding) for finding in findings]
        whole = {"version": sms_plugin.__version__, "works": works(findings), "findings": listed}
        print(json.dumps(whole, indent=1))
    else:
        print(as_text(findings))
        print("Nothing is in the way." if works(findings) else "There are problems.")
    return 0 if works(findings) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`profiler=torch`: a trace of a few steps for Perfetto, and their kernels in a table.

The softmax group is what a fused softmax takes the place of, and what surrounds it: all work on a
tensor of the scores' shape but the products of matrices, forward and backward: scale, bias, mask,
softmax, dropout, casts.
"""

from __future__ import annotations

import csv
import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from sms_plugin.callbacks.whole_file import whole_file
from sms_plugin.tables import text_table

ACTIVE_STEPS = 5
COMPILED = "compiled graph"
PRODUCTS = ("bmm", "mm", "addmm", "baddbmm", "matmul", "linear")


class Group(enum.Enum):
    """What a kernel is there for."""

    softmax = "softmax"
    products = "products of matrices"
    compiled = "compiled, not told apart"  # on a CPU, where a compiled graph is one call
    other = "other"


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name (on a CPU: operators), over all profiled steps."""

    group: str
    name: str
    calls: int
    ms: float  # on the device, in all


class KernelProfiler(Callback):
    """Profiles some steps of a fit into trace.json.gz and kernels.csv, and prints the groups.

    Args:
        folder: where both files go.
        skip: batches before the first that is profiled.
        active: how many are.
    """

    def __init__(self, folder: Path, *, skip: int, active: int = ACTIVE_STEPS) -> None:
        self.folder, self.skip, self.active = folder, skip, active
        self._profile: torch.profiler.profile | None = None
        self._batches = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._batches == self.skip and trainer.is_global_zero:
            activities = [ProfilerActivity.CPU]
            if trainer.strategy.root_device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profile.start()
        self._batches += 1

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._profile is not None and self._batches == self.skip + self.active:
            self._stop(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profile is not None:
            self._stop(trainer)

    def on_exception(self, *args: Any) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _stop(self, trainer: pl.Trainer) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        profile.stop()
        with whole_file(self.folder / "trace.json.gz") as unfinished:
            profile.export_chrome_trace(str(unfinished))
        rows = kernel_rows(profile.events() or ())
        write_kernels(rows, self.folder / "kernels.csv")
        steps = self._batches - self.skip
        print(f"{steps} steps profiled; kernels.csv, and trace.json.gz for ui.perfetto.dev:")
        print(group_table(rows, steps))


def kernel_rows(events: Iterable[FunctionEvent]) -> list[KernelRow]:
    """The kernels that events of a profile launched, or, on a CPU, the operators themselves."""
    events = [event for event in events if event.device_type == DeviceType.CPU]
    on_gpu = any(event.kernels for event in events)
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        shapes: Any = event.input_shapes  # typed as if it were one shape
        operator = COMPILED if event.name.startswith("## Call Compiled") else event.name
        if on_gpu:
            timed = [(kernel.name, kernel.duration) for kernel in event.kernels]
        else:
            timed = [(operator, event.self_cpu_time_total)]
        for name, microseconds in timed:
            group = group_of(operator, shapes or (), name)
            found.setdefault((group.value, name), []).append(microseconds / 1e3)
    rows = [KernelRow(*key, len(ms), sum(ms)) for key, ms in found.items()]
    return sorted(rows, key=lambda row: -row.ms)


def group_of(operator: str, shapes: Sequence[Sequence[int]], kernel: str = "") -> Group:
    """By the names of an operator and its kernel, and by the shapes of the operator's inputs.

    Scores are (B, H, Tq, Tk) with as many keys as queries. So are heads that are as wide as the
    text is long, which are counted with them.
    """
    if operator == COMPILED and kernel in ("", COMPILED):
        return Group.compiled
    name = operator.removeprefix("aten::").strip("_").lower()
    if name in PRODUCTS or any(part in name for part in ("scaled_dot_product", "flash", "flex")):
        return Group.products
    for text in (name, kernel.lower()):  # compiled kernels are named after what they fuse
        if "softmax" in text and "logsoftmax" not in text.replace("_", ""):
            return Group.softmax
    if any(len(shape) == 4 and shape[-1] == shape[-2] > 1 for shape in shapes):
        return Group.softmax
    return Group.other


def group_table(rows: Sequence[KernelRow], steps: int) -> str:
    """Milliseconds a step and share of each group."""
    total = sum(row.ms for row in rows) or 1.0
    cells = []
    for group in Group:
        own = [row for row in rows if row.group == group.value]
        ms = sum(row.ms for row in own)
        calls = sum(row.calls for row in own)
        cells.append(
            (group.value, f"{calls / steps:.0f}", f"{ms / steps:.3f}", f"{ms / total:.1%}")
        )
    headings = ("group", "kernels a step", "ms a step", "share")
    return text_table(headings, cells, right=headings[1:])


def write_kernels(rows: Iterable[KernelRow], path: Path) -> None:
    with whole_file(path) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(KernelRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)

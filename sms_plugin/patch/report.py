"""What patch_attention did, module by module."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PatchedModule:
    """An attention module that runs the softmax asked for."""

    name: str  # qualified, as in model.named_modules(); "" is the model itself
    kind: str  # the class before patching
    already: bool  # it did so before this call


@dataclass(frozen=True)
class SkippedModule:
    """An attention module that was left as it was."""

    name: str
    kind: str
    reason: str
    blocking: bool  # an adapter knows it, and strict=True raises for it


@dataclass(frozen=True)
class PatchReport:
    """The result of `patch_attention`; `print(report)` shows a table."""

    softmax: str
    patched: tuple[PatchedModule, ...]
    skipped: tuple[SkippedModule, ...]

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(asdict(self), indent=indent)

    def summary(self) -> str:
        """One line for what was patched, and one for each module that was not."""
        already = sum(module.already for module in self.patched)
        line = f"softmax={self.softmax}: {len(self.patched)} attention module(s) patched"
        lines = [line + (f", {already} of them before" if already else "")]
        lines += [
            f"  left as it was: {module.name or '(the model itself)'}: {module.reason}"
            for module in self.skipped
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"Attention, softmax={self.softmax}", box=box.SIMPLE)
        for heading in ("module", "class", "state"):
            table.add_column(heading, overflow="fold")
        for done in self.patched:
            state = f"{self.softmax} (already)" if done.already else self.softmax
            table.add_row(done.name or "(the model itself)", done.kind, state)
        for left in self.skipped:
            table.add_row(left.name or "(the model itself)", left.kind, f"skipped: {left.reason}")
        text = io.StringIO()
        Console(file=text, width=100, markup=False, highlight=False).print(table)
        return text.getvalue().rstrip()


class PatchError(RuntimeError):
    """Nothing could be patched, or with strict=True not everything; the model is unchanged."""

    def __init__(self, message: str, report: PatchReport) -> None:
        super().__init__(f"{message}\n{report.summary()}")
        self.report = report

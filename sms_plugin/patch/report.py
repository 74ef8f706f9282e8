"""What patch_attention did, module by module."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from sms_plugin.tables import text_table

NAMED = 3  # modules in a line


@dataclass(frozen=True)
class PatchedModule:
    """An attention module that runs the softmax asked for."""

    name: str  # qualified, as in model.named_modules(); "" is the model itself
    kind: str  # the class before patching
    already: bool  # it did so before this call
    unread: bool = False  # nobody reads its probabilities: SDPA would be faster here


@dataclass(frozen=True)
class SkippedModule:
    """An attention module that was left as it was."""

    name: str
    kind: str
    reason: str
    blocking: bool  # an adapter knows it, and strict=True raises for it


def _shown(name: str) -> str:
    return name or "(the model itself)"


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
        line += f", {already} of them before" if already else ""
        return "\n".join([line, *self.advice(), *self.reasons()])

    def advice(self) -> list[str]:
        """A line that names the modules whose probabilities nobody reads; none without them."""
        names = [_shown(module.name) for module in self.patched if module.unread]
        if not names:
            return []
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return [
            "  SDPA would be faster here, nobody reads the probabilities: "
            f"{', '.join(names[:NAMED])}{more}"
        ]

    def reasons(self) -> list[str]:
        """A line for each module that is left as it was."""
        return [
            f"  left as it was: {_shown(module.name)}: {module.reason}" for module in self.skipped
        ]

    def __str__(self) -> str:
        rows = [
            (
                done.name,
                done.kind,
                self.softmax
                + (" (already)" if done.already else "")
                + ("; SDPA would be faster" if done.unread else ""),
            )
            for done in self.patched
        ]
        rows += [(left.name, left.kind, f"skipped: {left.reason}") for left in self.skipped]
        named = [(_shown(name), kind, state) for name, kind, state in rows]
        title = f"Attention, softmax={self.softmax}"
        return f"{title}\n{text_table(('module', 'class', 'state'), named)}"


class PatchError(RuntimeError):
    """Nothing could be patched, or with strict=True not everything; the model is unchanged."""

    def __init__(self, message: str, report: PatchReport) -> None:
        names = ", ".join(_shown(module.name) for module in report.patched)
        reasons = "\n".join(report.reasons())
        super().__init__(
            f"{message}. Nothing was changed; it could have patched: {names or 'nothing'}"
            + (f"\n{reasons}" if reasons else "")
        )
        self.report = report

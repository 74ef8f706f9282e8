"""Writes the README's tables of speed from the committed CSVs.

    python scripts/speed_tables.py            # replaces what is between the markers
    python scripts/speed_tables.py --check    # status 1 if that would change something
    python scripts/speed_tables.py --print gpt

A table stands between `<!-- speed:begin NAME -->` and `<!-- speed:end NAME -->`, each on a line of
its own. The names are those of `TABLES`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

from scripts.benchmarks.ledger_table import write_whole  # noqa: E402
from scripts.benchmarks.record import Row, read_rows  # noqa: E402
from scripts.benchmarks.speed_text import (  # noqa: E402
    bias_memory_text,
    bias_text,
    cpu_text,
    gpt_text,
    small_text,
    softmax_text,
)

# name: (CSV under the results, how its rows become text)
TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "gpt": ("h200/gpt.csv", gpt_text),
    "bias": ("h200/attention.csv", bias_text),
    "bias-memory": ("h200/attention.csv", bias_memory_text),
    "softmax": ("h200/softmax.csv", softmax_text),
    "small": ("h200/softmax.csv", small_text),
    "cpu": ("cpu/softmax.csv", cpu_text),
}
BETWEEN = re.compile(
    r"^<!-- speed:begin (?P<name>\S+) -->\n(?P<text>.*?)^<!-- speed:end (?P=name) -->$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"<!-- speed:(begin|end)\b")


class TableError(RuntimeError):
    """Markers or a CSV that don't fit."""


def table_text(name: str, results: Path) -> str:
    """Raises TableError: an unknown name, or no rows."""
    if name not in TABLES:
        raise TableError(f"there is no table {name!r}: the names are {', '.join(TABLES)}")
    path, render = TABLES[name]
    if not (results / path).is_file():
        raise TableError(
            f"table {name}: {results / path} isn't there; a benchmark's --out makes it"
        )
    rows = read_rows(results / path)
    if not rows:
        raise TableError(f"table {name}: {results / path} has no rows; measure again")
    return render(rows)


def with_tables(text: str, results: Path) -> str:
    """The text with every table made anew.

    Raises:
        TableError: a marker without its partner, an unknown name, a CSV that isn't there.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        made = table_text(name, results)
        return f"<!-- speed:begin {name} -->\n\n{made}\n\n<!-- speed:end {name} -->"

    new, count = BETWEEN.subn(replace, text)
    if len(MARKER.findall(text)) != 2 * count:
        raise TableError(
            "a marker has no partner: each table needs `<!-- speed:begin NAME -->` and "
            "`<!-- speed:end NAME -->` on lines of their own"
        )
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The README's tables from the CSVs.")
    parser.add_argument("--check", action="store_true", help="change nothing, status 1 if stale")
    parser.add_argument("--print", choices=tuple(TABLES), dest="name", help="print a table")
    parser.add_argument("--readme", type=Path, default=CHECKOUT / "README.md")
    parser.add_argument("--results", type=Path, default=CHECKOUT / "scripts" / "results")
    options = parser.parse_args(arguments)
    try:
        if options.name:
            print(table_text(options.name, options.results))
            return 0
        old = options.readme.read_text(encoding="utf-8")
        new = with_tables(old, options.results)
    except (TableError, OSError) as error:
        print(f"speed_tables: {error}", file=sys.stderr)
        return 1
    if options.check:
        changes = difflib.unified_diff(
            old.splitlines(),
            new.splitlines(),
            str(options.readme),
            "from the CSVs",
            lineterm="",
            n=0,
        )
        print("\n".join(changes) or "the tables are what the CSVs say")
        return int(new != old)
    if new != old:
        write_whole(options.readme, new)
    print("written" if new != old else "nothing to change")
    return 0


if __name__ == "__main__":
    sys.exit(main())

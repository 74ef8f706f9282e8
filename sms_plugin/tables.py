"""Small tables of text, for what the package prints without further packages."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> str:
    """Columns as wide as their widest cell under a ruled heading.

    Args:
        headings: one a column.
        rows: as many cells each.
        right: headings of the columns that are aligned to the right, such as numbers.
    """
    cells = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    aligned = [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([aligned[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *aligned[1:]])

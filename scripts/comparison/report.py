"""A report as Markdown, JSON and one HTML page that holds its pictures."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

from sms_plugin.callbacks.whole_file import whole_file

TEMPLATES = Path(__file__).parent / "templates"
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?|nan|")


def write_report(folder: Path, template: str, values: Mapping[str, Any]) -> None:
    """Write report.json, report.md and report.html into `folder`.

    Args:
        folder: the pictures that the text names lie in it.
        template: the name of a Markdown file in templates/.
        values: what it is filled with, plain values; all of report.json.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["table"] = markdown_table
    text = environment.get_template(template).render(values)
    page = environment.get_template("page.html.j2").render(
        title=text.splitlines()[0].lstrip("# "), body=to_html(text, folder)
    )
    for name, content in (
        ("report.json", json.dumps(values, indent=2) + "\n"),
        ("report.md", text),
        ("report.html", page),
    ):
        with whole_file(folder / name) as unfinished:
            unfinished.write_text(content)


def to_html(text: str, folder: Path) -> str:
    """Markdown as HTML, with the pictures of `folder` inside."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = lambda url: True  # type: ignore[method-assign]  # data: is our own
    tokens = parser.parse(text)
    for token in tokens:
        for child in token.children or ():
            source = child.attrs.get("src") if child.type == "image" else None
            if source is not None:
                picture = base64.b64encode((folder / str(source)).read_bytes()).decode()
                child.attrs["src"] = f"data:image/png;base64,{picture}"
    return str(parser.renderer.render(tokens, parser.options, {}))


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of numbers to the right; floats with four digits."""
    right = [
        bool(rows) and all(_NUMBER.fullmatch(_cell(row[column])) for row in rows)
        for column in range(len(headings))
    ]
    lines = [
        list(headings),
        ["---:" if is_right else "---" for is_right in right],
        *([_cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")

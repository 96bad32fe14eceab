"""What a result can be written as: JSON, CSV, Markdown, a page; and the environment as text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from batchtune.document import Document
from batchtune.report.export.frame import frame_of
from batchtune.report.page import markdown
from batchtune.report.page.html import to_html
from batchtune.report.view.read import view_of
from batchtune.units import size


def to_json(result: Document) -> str:
    """The result document."""
    return result.to_json() + "\n"


def to_csv(result: Document) -> str:
    """The rows behind the answer; see `Result.to_frame`."""
    buffer = io.StringIO()
    frame_of(result).to_csv(buffer, index=False)
    return buffer.getvalue()


def to_markdown(result: Document) -> str:
    """A summary to paste into an issue or a pull request."""
    return markdown.to_markdown(view_of(result))


def environment_text(facts: dict[str, Any]) -> str:
    """The environment as lines to paste into an issue."""
    lines = {"batchtune": facts["batchtune"]} | facts["environment"] | facts["sensors"]
    width = max(len(name) for name in lines)
    shown = {name: size(value) if name.endswith("_bytes") else value for name, value in lines.items()}
    shown["other_processes"] = ", ".join(
        f"pid {each['pid']} {size(each['memory_bytes'])}" for each in lines.get("other_processes") or ()
    )
    return "".join(f"{name:<{width}}  {value}\n" for name, value in shown.items() if value not in (None, ""))


FORMATS: dict[str, Callable[[Document], str]] = {
    "json": to_json,
    "markdown": to_markdown,
    "html": to_html,
    "csv": to_csv,
}
"""What `report --format` can write besides the table and the settings for a training library (`trainers.EXPORTS`)."""

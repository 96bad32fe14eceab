"""A result as Markdown, to paste into an issue or a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.report.view.model import Table, View
from batchtune.report.view.words import sentence

_SPARE = 1  # columns that a terminal would sooner leave out are no part of a summary


def to_markdown(view: View) -> str:
    """The answer with its proof and the tables of a summary."""
    lines = [f"## batchtune {view.kind}: {_line(view.title)}", ""]
    if view.status != "complete":
        lines += [f"**{view.status}**" + (f": {_line(view.problem)}" if view.problem else ""), ""]
    if view.comparison is not None and view.headline is not None:
        lines += [*_table(view.comparison), "", _line(view.headline.reason), ""]
    for found in view.certificates:
        largest = f"**{found.largest}**" + (f"; {found.proof}" if found.proof else "")
        lines += [sentence(_line(f"largest {found.batch} at {found.precision}: {largest}")), ""]
    for table in (table for section in view.sections for table in section.tables if table.summary):
        lines += [sentence(_line(table.title)), "", *_table(table), ""]
    lines += [f"> warning: {_line(warning)}" for warning in view.warnings]
    if view.measured_on:
        lines += [""] if view.warnings else []  # or else it goes on with the warning
        lines.append(f"Measured on {_line(view.measured_on)}.")
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(table: Table) -> Iterator[str]:
    shown = [column for column in table.columns if column.spare <= _SPARE and not column.detail]
    yield _row([column.name for column in shown])
    yield "|" + "|".join("---:" if column.values else "---" for column in shown) + "|"
    yield from (_row(list(cells)) for cells in zip(*(column.cells for column in shown), strict=True))


def _row(cells: list[str]) -> str:
    """Cells that neither end themselves nor their line."""
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())

"""What a result can be written as: JSON, CSV, Markdown, one HTML file; and the environment as text."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, Template
from markupsafe import Markup

from batchtune.document import Document
from batchtune.report.svg import chart
from batchtune.report.theme import DARK, LIGHT, shades
from batchtune.report.view.model import Table, View
from batchtune.report.view.read import plots_of, view_of
from batchtune.report.view.select import probes_of
from batchtune.report.view.words import sentence, stopped
from batchtune.units import counted, size

if TYPE_CHECKING:
    import pandas as pd

_MOST_FOLDED_ROWS = 100  # of a table on the page
_MOST_ROWS, _MOST_FIGURES = 20, 2  # of a table, and in all, in a notebook
_DARK_NOTEBOOKS = "[data-jp-theme-light=false]", "[theme=dark]", ".vscode-dark"  # Jupyter, Colab, VS Code
_SPARE = 1  # columns that a terminal would sooner leave out are no part of a summary


def to_html(result: Document, *, refresh_seconds: int | None = None, words: str = "") -> str:
    """The whole report of one result as a self-contained page; figures without measurements are left out.

    Of a run that goes on, a browser looks for a newer page after `refresh_seconds`; `words` say where it stands.
    """
    view, script = view_of(result), _asset("report.js")
    page = _template().render(
        part="page",
        view=view,
        most=_MOST_FOLDED_ROWS,
        refresh=refresh_seconds,
        words=words,
        plots=plots_of(result),
        settings={**view.settings, "Markdown": view_markdown(view)},
        policy=_policy(script),
        style=Markup(_colours() + _asset("chart.css") + _asset("report.css")),  # noqa: S704 - ours
        script=Markup(script),  # noqa: S704 - ours
    )
    return page.strip() + "\n"


def notebook(result: Document) -> str:
    """The answer for a notebook, why it is one, its warnings, and the first of its tables and figures."""
    dark = ",".join(f"{each} .batchtune" for each in _DARK_NOTEBOOKS)
    colours = f".batchtune{{{_variables(LIGHT)}}}{dark}{{{_variables(DARK)}}}.batchtune{{--card:transparent}}"
    answer = _template().render(
        part="notebook",
        view=view_of(result),
        most=_MOST_ROWS,
        plots=list(plots_of(result).values())[:_MOST_FIGURES],
        style=Markup(colours + _classes() + _asset("chart.css")),  # noqa: S704 - ours
    )
    return answer.strip()


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"sentence": sentence, "stopped": stopped, "counted": counted, "chart": chart}
    return environment.from_string(_asset("template.html.j2"))


def _asset(name: str) -> str:
    return resources.files("batchtune.report").joinpath("page", name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Only this script runs, and nothing is loaded."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _colours() -> str:
    """The page's colours as variables; paper is white whatever the screen is."""
    dark = f"@media screen and (prefers-color-scheme: dark){{:root{{{_variables(DARK)}}}}}"
    return f":root{{{_variables(LIGHT)}}}\n{dark}\n{_classes()}"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in (colours | shades(colours)).items())


def _classes() -> str:
    """A class for each colour that a figure uses."""
    return "".join(f".chart .{name}{{--c:var(--{name})}}\n" for name in LIGHT | shades(LIGHT))


def view_markdown(view: View) -> str:
    """The answer with its proof and the tables of a summary."""
    lines = [f"## batchtune {view.kind}: {_line(view.title)}", ""]
    if view.status != "complete":
        lines += [f"**{view.status}**" + (f": {_line(view.problem)}" if view.problem else ""), ""]
    if view.comparison is not None and view.headline is not None:
        lines += [f"**{_line(view.headline.figure)}** {_line(view.headline.words)}", ""]
        lines += [*table_lines(view.comparison), "", _line(view.headline.reason), ""]
    for found in view.certificates:
        largest = f"**{found.largest}**" + (f"; {found.proof}" if found.proof else "")
        lines += [sentence(_line(f"largest {found.batch} at {found.precision}: {largest}")), ""]
    for table in (table for section in view.sections for table in section.tables if table.summary):
        lines += [sentence(_line(table.title)), "", *table_lines(table), ""]
    lines += [f"> warning: {_line(warning)}" for warning in view.warnings]
    if view.measured_on:
        lines += [""] if view.warnings else []  # or else it goes on with the warning
        lines.append(f"Measured on {_line(view.measured_on)}.")
    return "\n".join(lines).rstrip("\n") + "\n"


def table_lines(table: Table) -> Iterator[str]:
    """The rows of a table, heading first."""
    shown = [column for column in table.columns if column.spare <= _SPARE and not column.detail]
    yield _row([column.name for column in shown])
    yield "|" + "|".join("---:" if column.values else "---" for column in shown) + "|"  # noqa: PD011 - no data frame
    yield from (_row(list(cells)) for cells in zip(*(column.cells for column in shown), strict=True))


def _row(cells: list[str]) -> str:
    """Cells that neither end themselves nor their line."""
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())


def frame_of(document: Document) -> pd.DataFrame:
    """Trials of a study, attempts of a probe, or estimates, one row each; see `Result.to_frame`."""
    import pandas as pd

    rows: list[dict[str, Any]]
    if document.trials:
        rows = [trial.model_dump(exclude={"curve"}) for trial in document.trials]
    elif document.estimates:
        rows = [estimate.model_dump() for estimate in document.estimates]
    else:
        probes = probes_of(document)
        rows = [{"precision": probe.precision, **each.model_dump()} for probe in probes for each in probe.attempts]
    frame = pd.DataFrame(rows)
    for name in frame:
        values = [row[str(name)] for row in rows]
        known = [value for value in values if value is not None]
        if 0 < len(known) < len(values) and all(type(value) is int for value in known):
            frame[name] = pd.array(values, dtype="Int64")  # numpy's integers have no gaps, and floats lose digits
    return frame


def to_json(result: Document) -> str:
    """The result document."""
    return result.to_json() + "\n"


def to_csv(result: Document) -> str:
    """The rows behind the answer; see `Result.to_frame`. What has parts is JSON."""
    frame = frame_of(result)
    for name in frame:
        if any(isinstance(each, dict | list | tuple) for each in frame[name]):
            frame[name] = [json.dumps(each) if isinstance(each, dict | list | tuple) else each for each in frame[name]]
    return str(frame.to_csv(index=False))


def to_markdown(result: Document) -> str:
    """A summary to paste into an issue or a pull request."""
    return view_markdown(view_of(result))


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

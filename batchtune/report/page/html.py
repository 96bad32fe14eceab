"""The report as one HTML file: it fetches nothing, runs no script but its own two, and shows user text as text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

from batchtune.document import Document
from batchtune.report.figures.theme import DARK, LIGHT
from batchtune.report.page.markdown import to_markdown
from batchtune.report.view.read import view_of
from batchtune.report.view.words import counted, sentence, stopped

_MOST_ROWS = 20  # of a table in a notebook
_BUTTONS = ["toImage", "resetScale2d"]
"""Of a figure: named one by one, since plotly's own choice has one that uploads the figure."""


def to_html(result: Document) -> str:
    """The whole report of one result as a self-contained page; figures without measurements are left out."""
    view, drawn = view_of(result), _figures(result)
    titles = {name: html.unescape(figure["layout"].pop("title")["text"]) for name, figure in drawn.items()}
    for figure in drawn.values():
        figure["layout"]["margin"]["t"] = 8
    scripts = [_script_text(text) for text in ([_plotly()] if drawn else []) + [_asset("report.js")]]
    page = _template().render(
        part="page",
        view=view,
        titles=titles,
        settings={**view.settings, "Markdown": to_markdown(view)},
        policy=_policy(scripts),
        style=Markup(_variables() + _asset("report.css")),  # noqa: S704 - ours
        data={"theme": _data({"light": LIGHT, "dark": DARK}), "figures": _data(drawn)},
        scripts=[Markup(text) for text in scripts],  # noqa: S704 - ours and plotly's
    )
    return page.strip() + "\n"


def notebook(result: Document) -> str:
    """The answer for a notebook, why it is one, and its tables, without figures or styles."""
    return _template().render(part="notebook", view=view_of(result), most=_MOST_ROWS).strip()


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"sentence": sentence, "stopped": stopped, "counted": counted}
    return environment.from_string(_asset("template.html.j2"))


def _figures(result: Document) -> dict[str, Any]:
    """Figures as plain JSON objects; none where plotly is not installed."""
    try:
        from batchtune.report.figures.plots import figures
    except ImportError:
        return {}
    config = {"displaylogo": False, "modeBarButtons": [_BUTTONS], "plotlyServerURL": ""}
    return {name: json.loads(figure.to_json()) | {"config": config} for name, figure in figures(result).items()}


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return resources.files("batchtune.report.page").joinpath(name).read_text(encoding="utf-8")


def _script_text(text: str) -> str:
    """A script as the HTML parser leaves it alone: only then does its hash match."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: list[str]) -> str:
    """Only these scripts run, and nothing is loaded; plotly writes styles of its own, so styles are free."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _variables() -> str:
    light, dark = ("".join(f"--{name}:{value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
    # paper is white whatever the screen is
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _data(value: object) -> Markup:
    """JSON that cannot end the script it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - no character of it is markup

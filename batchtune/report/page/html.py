"""The report as one HTML file: it fetches nothing, runs no script but its own two, and shows user text as text."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from batchtune.document import Document
from batchtune.report.figures.theme import DARK, LIGHT
from batchtune.report.page import sections as page_sections
from batchtune.report.page.markup import Markup, join, tag


def to_html(result: Document) -> str:
    """The whole report of one result as a self-contained page; figures without measurements are left out."""
    drawn = _figures(result)
    scripts = [_script_text(text) for text in ([_plotly()] if drawn else []) + [_asset("report.js")]]
    style = _variables() + _asset("report.css")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"batchtune {result.batchtune_version}"),
        tag("title", f"{page_sections.title(result)} – batchtune"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )
    parts = [part for part in page_sections.sections(result, _frames(drawn)) if part is not None]
    body = tag(
        "body",
        page_sections.header(result),
        tag("main", *parts),
        page_sections.footer(result),
        _data("theme", {"light": LIGHT, "dark": DARK}),
        _data("figures", drawn),
        *(tag("script", Markup(text)) for text in scripts),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _figures(result: Document) -> dict[str, Any]:
    """Figures as plain JSON objects; none where plotly is not installed."""
    try:
        from batchtune.report.figures.plots import figures
    except ImportError:
        return {}
    return {name: json.loads(figure.to_json()) for name, figure in figures(result).items()}


def _frames(drawn: dict[str, Any]) -> dict[str, Markup]:
    """The place of each figure; its title becomes a heading of the page."""
    frames = {}
    for name, figure in drawn.items():
        words = figure["layout"].pop("title")["text"]
        figure["layout"]["margin"]["t"] = 8
        plot = tag("div", class_="plot", data_figure=name, role="img", aria_label=words)
        frames[name] = tag("figure", tag("figcaption", words), plot)
    return frames


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
    light, dark = (join(f"--{name}:{value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
    # paper is white whatever the screen is
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _data(name: str, value: object) -> Markup:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", id=f"data-{name}")

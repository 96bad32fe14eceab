"""The look of every figure: what each colour stands for, on a light ground and on a dark one, and the shared axes."""

from __future__ import annotations

import html
import math
from typing import Any

_COLOURS = {
    "page": ("#f6f6f3", "#0f1214"),
    "card": ("#ffffff", "#171b1e"),
    "ink": ("#1c2024", "#e7e9eb"),
    "muted": ("#646b73", "#a0a8b0"),
    "faint": ("#9aa1a8", "#6f7881"),
    "rule": ("#e3e4df", "#2b3136"),
    "accent": ("#0b6e5f", "#54cdb4"),
    "tint": ("#e4f1ee", "#16302b"),
    "baseline": ("#b4580a", "#f0a158"),
    "bad": ("#b3261e", "#ff7a70"),
    "caution": ("#fbf1da", "#33290f"),
    "second": ("#3659b5", "#8aa8ff"),
    "third": ("#7b4bb0", "#c59bf2"),
    "quick": ("#0c6b5d", "#5fe0c5"),
    "brisk": ("#63b59f", "#3a9c88"),
    "slow": ("#edc36b", "#a9863c"),
    "slowest": ("#d2733a", "#b5592a"),
}
"""On a light ground, each its own value, and on a dark one: the page finds the first again to exchange it."""
LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
DARK = {name: dark for name, (_, dark) in _COLOURS.items()}
SERIES = [LIGHT["accent"], LIGHT["second"], LIGHT["third"], LIGHT["baseline"]]
"""One for each precision."""

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_MOST_TICKS = 8
_LONGEST_LABEL = 80


def label(text: object) -> str:
    """A text of the user's for a figure: plotly reads a few HTML tags, so none is left in it."""
    shown = str(text)
    if len(shown) > _LONGEST_LABEL:
        shown = shown[: _LONGEST_LABEL - 1] + "…"
    return html.escape(shown)


def layout(title: str, *, height: int = 360, **more: Any) -> dict[str, Any]:
    """What all figures share; `more` is laid over it."""
    shared: dict[str, Any] = {
        "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 16}},
        "template": {},
        "height": height,
        "font": {"family": _FONT, "size": 12.5, "color": LIGHT["ink"]},
        "paper_bgcolor": LIGHT["card"],
        "plot_bgcolor": LIGHT["card"],
        "margin": {"l": 8, "r": 16, "t": 64, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1 + 8 / height, "xanchor": "left", "yanchor": "bottom"},
        "hoverlabel": {
            "bgcolor": LIGHT["card"],
            "bordercolor": LIGHT["rule"],
            "font": {"color": LIGHT["ink"], "family": _FONT},
            "align": "left",
        },
        "hovermode": "closest",
    }
    return shared | more


def axis(title: str, **more: Any) -> dict[str, Any]:
    """One axis: thin rules, and room for its name."""
    shared: dict[str, Any] = {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": LIGHT["muted"]}},
        "gridcolor": LIGHT["rule"],
        "linecolor": LIGHT["faint"],
        "tickcolor": LIGHT["faint"],
        "tickfont": {"size": 11.5, "color": LIGHT["muted"]},
        "zeroline": False,
        "automargin": True,
    }
    return shared | more


def batch_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis over batch sizes, with powers of two for ticks."""
    first, last = math.floor(math.log2(max(low, 1))), math.ceil(math.log2(max(high, 2)))
    ticks = [2**power for power in range(first, last + 1, math.ceil((last - first + 1) / _MOST_TICKS))]
    texts = [f"{tick:,}" for tick in ticks]
    return axis(title, type="log", range=_padded(low, high), tickmode="array", tickvals=ticks, ticktext=texts)


def log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis with ticks at every digit of a decade, at 1, 2 and 5, or at the decades, as there is room."""
    decades = math.log10(high) - math.log10(low)
    ticks: dict[str, Any] = {"dtick": 1, "exponentformat": "power"}
    if decades < 3:  # noqa: PLR2004 - about six ticks each
        ticks = {"dtick": "D1" if decades < 0.9 else "D2", "tickformat": "~g"}  # noqa: PLR2004
    return axis(title, type="log", range=_padded(low, high), **ticks)


def _padded(low: float, high: float) -> list[float]:
    """The range of a logarithmic axis, in decades, with room at both ends."""
    first, last = math.log10(low), math.log10(high)
    room = max(0.1 * (last - first), 0.08)
    return [first - room, last + room]

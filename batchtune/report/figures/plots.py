"""All figures that a result has the measurements for, by the names under which a result and a page ask for them."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from batchtune.document import Document
from batchtune.report.figures.draw import draw
from batchtune.report.view.estimate_plots import efficiency, largest, step
from batchtune.report.view.model import Plot
from batchtune.report.view.plots import memory, sensors, throughput
from batchtune.report.view.select import chosen_probe, probes_of
from batchtune.report.view.study_plots import curves, landscape


def _sensors(result: Document) -> Plot | None:
    chosen = chosen_probe(result)
    return sensors(chosen) if chosen else None


_PLOTS: dict[str, Callable[[Document], Plot | None]] = {
    "estimates": largest,
    "efficiency": efficiency,
    "step": step,
    "memory": lambda result: memory(probes_of(result)),
    "throughput": lambda result: throughput(probes_of(result)),
    "sensors": _sensors,
    "curves": curves,
    "landscape": landscape,
}


def figure(result: Document, name: str) -> go.Figure | None:
    """One figure; None where the result has no measurements for it."""
    plot = _PLOTS[name](result)
    return None if plot is None else draw(plot)


def figures(result: Document) -> dict[str, go.Figure]:
    """Every figure that the result has the measurements for, by name, in reading order."""
    drawn = {name: figure(result, name) for name in _PLOTS}
    return {name: each for name, each in drawn.items() if each is not None}

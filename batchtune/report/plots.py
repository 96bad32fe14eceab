"""All figures that a result has the measurements for, as plotly draws them; sensors and estimates are drawn here."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from batchtune.report.pick import probes_of
from batchtune.report.plots_of_landscape import landscape
from batchtune.report.plots_of_probes import memory, throughput
from batchtune.report.plots_of_trials import curves
from batchtune.report.theme import LIGHT, axis, batch_axis, label, layout
from batchtune.report.units import size
from batchtune.results import Estimate, Result, ThroughputPoint

__all__ = ["curves", "estimates", "figures", "landscape", "memory", "sensors", "throughput"]

_MOST_BARS = 24
_LONGEST_NAME = 24
_SENSORS = {
    "gpu_utilization": ("GPU busy", "%", 100.0),
    "memory_controller_utilization": ("memory bus busy", "%", 100.0),
    "mfu": ("model FLOPs utilisation", "%", 100.0),
    "power_watts": ("power", "W", 1.0),
    "temperature_celsius": ("temperature", "°C", 1.0),
    "joules_per_sample": ("energy", "J per sample", 1.0),
}


def figures(result: Result) -> dict[str, go.Figure]:
    """Every figure that the result has the measurements for, by name, in reading order."""
    drawn = {
        "estimates": estimates(result),
        "memory": memory(result),
        "throughput": throughput(result),
        "sensors": sensors(result),
        "curves": curves(result),
        "landscape": landscape(result),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def sensors(result: Result) -> go.Figure | None:
    """What the device's sensors said at each batch size, one row for each sensor that was there."""
    probe = result.probe or next(iter(probes_of(result)), None)
    points = sorted(probe.throughput, key=lambda point: point.batch_size) if probe else []
    readings = {key: _read(points, key) for key in _SENSORS}
    seen = {key: values for key, values in readings.items() if any(value is not None for value in values)}
    if not seen:
        return None
    figure = make_subplots(rows=len(seen), cols=1, shared_xaxes=True, vertical_spacing=0.12 / len(seen))
    sizes = [point.batch_size for point in points]
    for row, (key, values) in enumerate(seen.items(), start=1):
        title, unit, factor = _SENSORS[key]
        figure.add_scatter(
            x=sizes,
            y=[None if value is None else value * factor for value in values],
            mode="lines+markers",
            line={"color": LIGHT["accent"], "width": 1.5},
            marker={"color": LIGHT["accent"], "size": 7},
            hovertemplate=f"batch %{{x:,}}<br>%{{y:.4~g}} {unit}<extra>{title}</extra>",
            row=row,
            col=1,
        )
        ends = [0, 105] if unit == "%" else None
        figure.update_yaxes(axis(f"{title}<br>{unit}", range=ends, rangemode="tozero", nticks=4), row=row, col=1)
        figure.update_xaxes(batch_axis(sizes[0], sizes[-1], "" if row < len(seen) else "micro-batch size"), row=row)
    title = "The device's sensors over batch size"
    figure.update_layout(layout(title, height=110 + 130 * len(seen), showlegend=False))
    return figure


def _read(points: list[ThroughputPoint], key: str) -> list[Any]:
    return [getattr(point, key, None) for point in points]


def estimates(result: Result) -> go.Figure | None:
    """The largest batch on each GPU as calculated, with the part of it that is safe drawn solid."""
    known = [row for row in result.estimates or [] if row.max_batch_size is not None]
    if not known:
        return None
    groups = _alike(sorted(known, key=lambda row: (row.memory_bytes, row.max_batch_size or 0)))
    several = len({row.precision for row in known}) > 1
    rows = [group[0] for group in groups]
    names = [_gpu(group, several=several) for group in groups]
    about = [[label(", ".join(row.gpu for row in group)), *_facts(group[0])] for group in groups]
    figure = go.Figure()
    for key, words, colour, width in (
        ("max_batch_size", "expected", LIGHT["brisk"], 0.62),
        ("safe_max_batch_size", "safe, error band included", LIGHT["accent"], 0.34),
    ):
        values = [getattr(row, key) for row in rows]
        if any(value is not None for value in values):
            figure.add_bar(
                y=list(range(len(rows))),
                x=values,
                orientation="h",
                name=words,
                width=width,
                marker={"color": colour, "line": {"width": 0}},
                customdata=about,
                hovertemplate=f"%{{customdata[0]}}<br>{words}: %{{x:,}}<br>%{{customdata[1]}}, %{{customdata[2]}}"
                "<br>confidence: %{customdata[3]}<extra></extra>",
            )
    figure.update_layout(
        layout(
            "Largest batch on each GPU, estimated",
            height=130 + 26 * len(rows),
            barmode="overlay",
            xaxis=axis("largest micro-batch size", rangemode="tozero", tickformat=",d", nticks=6),
            yaxis=axis("", tickmode="array", tickvals=list(range(len(rows))), ticktext=names, showgrid=False),
            showlegend=True,
        )
    )
    return figure


def _alike(rows: list[Estimate]) -> list[list[Estimate]]:
    """GPUs with one and the same answer share a bar where there are too many for a bar each."""
    if len(rows) <= _MOST_BARS:
        return [[row] for row in rows]
    groups: dict[tuple[object, ...], list[Estimate]] = {}
    for row in rows:
        answer = (row.memory_bytes, row.precision, row.max_batch_size, row.safe_max_batch_size)
        groups.setdefault(answer, []).append(row)
    return list(groups.values())


def _gpu(group: list[Estimate], *, several: bool) -> str:
    """What stands beside a bar; all its GPUs are named where the pointer rests on it."""
    row = group[0]
    words = [row.gpu if len(row.gpu) <= _LONGEST_NAME else f"{row.gpu[: _LONGEST_NAME - 1]}…"]
    words += [f"+{len(group) - 1}"] if len(group) > 1 else []
    words += [row.precision] if several else []
    return label(" ".join(words))


def _facts(row: Estimate) -> list[str]:
    return [size(row.memory_bytes), label(row.precision), label(row.confidence or "not stated")]

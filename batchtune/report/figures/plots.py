"""All figures that a result has the measurements for, as plotly draws them; sensors are drawn here."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from batchtune.document import Document, ThroughputPoint
from batchtune.report.figures.estimates import efficiency, estimates, step
from batchtune.report.figures.landscape import landscape
from batchtune.report.figures.probes import memory, throughput
from batchtune.report.figures.theme import LIGHT, axis, batch_axis, layout
from batchtune.report.figures.trials import curves
from batchtune.report.view.select import probes_of

__all__ = ["curves", "efficiency", "estimates", "figures", "landscape", "memory", "sensors", "step", "throughput"]

_SENSORS = {
    "gpu_utilization": ("GPU busy", "%", 100.0),
    "memory_controller_utilization": ("memory bus busy", "%", 100.0),
    "mfu": ("model FLOPs utilisation", "%", 100.0),
    "power_watts": ("power", "W", 1.0),
    "temperature_celsius": ("temperature", "°C", 1.0),
    "joules_per_sample": ("energy", "J per sample", 1.0),
}


def figures(result: Document) -> dict[str, go.Figure]:
    """Every figure that the result has the measurements for, by name, in reading order."""
    drawn = {
        "estimates": estimates(result),
        "efficiency": efficiency(result),
        "step": step(result),
        "memory": memory(result),
        "throughput": throughput(result),
        "sensors": sensors(result),
        "curves": curves(result),
        "landscape": landscape(result),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def sensors(result: Document) -> go.Figure | None:
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

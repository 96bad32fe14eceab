"""Figures of a probe: memory and speed over batch size, every attempt in them."""

from __future__ import annotations

import plotly.graph_objects as go

from batchtune.document import Document, ProbeResult
from batchtune.report.figures.theme import LIGHT, SERIES, axis, batch_axis, label, layout
from batchtune.report.view.select import fitted_speeds, memory_range, peak_of, probes_of
from batchtune.units import bytes_unit, duration, number, size

_TOP = 1.12  # room above the highest point
_OUTCOMES = {
    "oom": "out of memory",
    "kernel_limit": "kernel limit",
    "crash": "crashed",
    "timeout": "timed out",
    "user_error": "the task's code raised",
}


def memory(result: Document) -> go.Figure | None:
    """Peak memory against batch size: every attempt, the limit, what fitted and what did not."""
    probes = [probe for probe in probes_of(result) if probe.attempts]
    reach = memory_range(probes)
    if reach is None:
        return None
    limit, near, ceiling = reach.limit_bytes, reach.near, reach.ceiling_bytes
    unit, scale = bytes_unit(ceiling)
    widest = max(attempt.batch_size for probe in probes for attempt in probe.attempts)
    figure = go.Figure()
    for probe, colour in zip(probes, SERIES, strict=False):
        name = f"{label(probe.precision)} " if len(probes) > 1 else ""
        _draw_fits(figure, probe, scale, colour, name)
        _draw_failures(figure, probe, limit or ceiling, scale, name)
    if near:
        figure.add_scatter(
            x=[0, widest * 1.04],
            y=[limit / scale] * 2,
            mode="lines",
            line={"color": LIGHT["bad"], "width": 1.5, "dash": "dash"},
            name=f"memory limit, {size(limit)}",
            hoverinfo="skip",
        )
    figure.update_layout(
        layout(
            "Peak memory against batch size",
            xaxis=axis("micro-batch size", range=[0, widest * 1.04], tickformat=",d"),
            yaxis=axis(f"peak reserved, {unit}", range=[0, ceiling / scale * _TOP]),
            showlegend=True,
        )
    )
    if limit and not near:
        figure.add_annotation(
            text=f"↑ memory limit {size(limit)}",
            x=0,
            y=1,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font={"color": LIGHT["muted"]},
        )
    return figure


def _draw_fits(figure: go.Figure, probe: ProbeResult, scale: int, colour: str, name: str) -> None:
    fits = sorted(
        ((attempt.batch_size, peak, attempt) for attempt in probe.attempts if (peak := peak_of(attempt)) is not None),
        key=lambda each: each[:2],
    )
    search = [each for each in fits if each[2].purpose == "search"]
    checked = [each for each in fits if each[2].purpose == "verify"]
    for group, mode, words, marker in (
        (search, "lines+markers", "fits", {"color": colour, "size": 8}),
        (checked, "markers", "final check", {"color": colour, "size": 15, "symbol": "circle-open", "line_width": 2}),
    ):
        if group:
            figure.add_scatter(
                x=[batch for batch, _, _ in group],
                y=[peak / scale for _, peak, _ in group],
                mode=mode,
                name=f"{name}{words}",
                line={"color": colour, "width": 1.5},
                marker=marker,
                customdata=[[size(peak), each.steps] for _, peak, each in group],
                hovertemplate="batch %{x:,}<br>peak %{customdata[0]}<br>%{customdata[1]} steps<extra></extra>",
            )


def _draw_failures(figure: go.Figure, probe: ProbeResult, height_bytes: float, scale: int, name: str) -> None:
    for outcome, words in _OUTCOMES.items():
        failures = [attempt for attempt in probe.attempts if attempt.outcome == outcome]
        if failures:
            figure.add_scatter(
                x=[attempt.batch_size for attempt in failures],
                y=[height_bytes / scale] * len(failures),
                mode="markers",
                name=f"{name}{words}",
                marker={
                    "color": LIGHT["bad"],
                    "size": 10,
                    "symbol": "x-thin-open" if outcome == "oom" else "diamond-open",
                    "line": {"width": 2, "color": LIGHT["bad"]},
                },
                customdata=[[label(attempt.message or words)] for attempt in failures],
                hovertemplate="batch %{x:,}<br>%{customdata[0]}<extra></extra>",
            )


def throughput(result: Document) -> go.Figure | None:
    """Training speed against batch size, with the fitted step time and the point from which more gains little."""
    probes = [probe for probe in probes_of(result) if probe.throughput]
    if not probes:
        return None
    points = [point for probe in probes for point in probe.throughput]
    low, high = min(point.batch_size for point in points), max(point.batch_size for point in points)
    figure = go.Figure()
    for probe, colour in zip(probes, SERIES, strict=False):
        name = f"{label(probe.precision)} " if len(probes) > 1 else ""
        _draw_fitted(figure, probe, (low, high), colour, name)
        figure.add_scatter(
            x=[point.batch_size for point in probe.throughput],
            y=[point.samples_per_second for point in probe.throughput],
            mode="markers",
            name=f"{name}measured",
            marker={"color": colour, "size": 9},
            customdata=[[number(point.samples_per_second), duration(point.step_seconds)] for point in probe.throughput],
            hovertemplate="batch %{x:,}<br>%{customdata[0]} samples/s<br>step %{customdata[1]}<extra></extra>",
        )
        _draw_knee(figure, probe, colour, name)
    top = max(point.samples_per_second for point in points) * _TOP
    figure.update_layout(
        layout(
            "Throughput against batch size",
            xaxis=batch_axis(low, high, "micro-batch size"),
            yaxis=axis("samples per second", range=[0, top], tickformat="~s"),
            showlegend=True,
        )
    )
    return figure


def _draw_fitted(figure: go.Figure, probe: ProbeResult, ends: tuple[int, int], colour: str, name: str) -> None:
    fit = probe.throughput_fit
    if fit is None:
        return
    curve = fitted_speeds(fit, *ends)
    figure.add_scatter(
        x=[batch for batch, _ in curve],
        y=[speed for _, speed in curve],
        mode="lines",
        name=f"{name}fitted t = α + β·B",
        line={"color": colour, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
    )


def _draw_knee(figure: go.Figure, probe: ProbeResult, colour: str, name: str) -> None:
    fit = probe.throughput_fit
    knee = fit.batch_size_within_5_percent if fit else None
    speed = {point.batch_size: point.samples_per_second for point in probe.throughput}
    if knee in speed:
        figure.add_scatter(
            x=[knee],
            y=[speed[knee]],
            mode="markers",
            name=f"{name}within 5 % of the best from {knee:,}",
            marker={"color": colour, "size": 18, "symbol": "circle-open", "line": {"width": 2}},
            hoverinfo="skip",
        )

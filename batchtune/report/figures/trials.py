"""Learning curves of a study over training time: what is recommended, what runs today, and all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from batchtune.document import Document, Target, Trial
from batchtune.report.figures.theme import LIGHT, axis, gaps, label, layout, spread
from batchtune.report.view.select import is_of
from batchtune.units import number

_LOG_FROM = 8  # a quantity that spans so many times its smallest value is drawn on a logarithmic axis


def curves(result: Document) -> go.Figure | None:
    """The metric of every run against its training time, with the target."""
    trials = [trial for trial in result.trials or [] if any(point.value is not None for point in trial.curve)]
    if not trials:
        return None
    seconds = [point.seconds for trial in trials for point in trial.curve if point.seconds > 0]
    values = [point.value for trial in trials for point in trial.curve if point.value is not None]
    log_time = bool(seconds) and spread(seconds) > _LOG_FROM
    log_value = _LOG_FROM / 4 < spread(values) < math.inf and (
        result.target is None or result.target.goal == "minimize"
    )
    best = [trial for trial in trials if is_of(trial, result.recommendation)]
    today = [trial for trial in trials if trial not in best and _is_baseline(trial, result)]
    others = [trial for trial in trials if trial not in best and trial not in today]
    figure = go.Figure()
    for group, name, colour, width in (
        (others, "other runs", LIGHT["faint"], 1.0),
        (today, "what you run today", LIGHT["baseline"], 2.0),
        (best, "recommended", LIGHT["accent"], 2.5),
    ):
        _draw_curves(figure, group, name, {"color": colour, "width": width}, log_time=log_time)
    metric = label(result.target.metric if result.target else "metric")
    if result.target is not None and result.target.value is not None and seconds:
        _draw_target(figure, result.target, [min(seconds) if log_time else 0, max(seconds)])
    figure.update_layout(
        layout(
            "Learning curves against training time",
            height=400,
            xaxis=_value_axis("training time, seconds", seconds, log=log_time),
            yaxis=_value_axis(metric, values, log=log_value),
            showlegend=True,
        )
    )
    return figure


def _is_baseline(trial: Trial, result: Document) -> bool:
    return trial.role == "baseline" or is_of(trial, result.baseline)


def _value_axis(title: str, values: Sequence[float], *, log: bool) -> dict[str, Any]:
    """An axis with ticks at every digit of a decade, at 1, 2 and 5, or at the decades, as there is room."""
    if not log:
        return axis(title)
    decades = math.log10(spread([value for value in values if value > 0]))
    step = "D1" if decades < 0.9 else "D2" if decades < 3 else 1  # noqa: PLR2004 - about six ticks each
    return axis(title, type="log", dtick=step, tickformat="~g" if decades < 3 else None)  # noqa: PLR2004


def _draw_curves(
    figure: go.Figure, trials: Sequence[Trial], name: str, line: dict[str, Any], *, log_time: bool
) -> None:
    if not trials:
        return
    shown = [[point for point in trial.curve if point.seconds > 0 or not log_time] for trial in trials]
    abouts = [
        f"run {trial.number}, {trial.role}<br>batch {trial.batch_size:,}, learning rate {number(trial.learning_rate)}"
        for trial in trials
    ]
    figure.add_scatter(
        x=gaps([point.seconds for point in points] for points in shown),
        y=gaps([point.value for point in points] for points in shown),
        text=gaps([about] * len(points) for about, points in zip(abouts, shown, strict=True)),
        mode="lines",
        name=name,
        line=line,
        hovertemplate="%{text}<br>%{y:.4~g} after %{x:.3~g} s<extra></extra>",
    )


def _draw_target(figure: go.Figure, target: Target, ends: list[float]) -> None:
    sign = "≤" if target.goal == "minimize" else "≥"
    figure.add_scatter(
        x=ends,
        y=[target.value] * 2,
        mode="lines",
        name=f"target: {label(target.metric)} {sign} {number(target.value, 4)}",
        line={"color": LIGHT["ink"], "width": 1.2, "dash": "dash"},
        hoverinfo="skip",
    )

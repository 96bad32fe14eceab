"""Figures of a study: learning curves over training time, and where in the search space its runs lie."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from batchtune.report.pick import is_of
from batchtune.report.theme import LIGHT, axis, batch_axis, gaps, label, layout, padded, spread
from batchtune.report.units import duration, number
from batchtune.results import Recommendation, Result, Target, Trial

_LOG_FROM = 8  # a quantity that spans so many times its smallest value is drawn on a logarithmic axis
_BROKEN = {"diverged", "oom", "crash", "timeout", "user_error"}
_SCALE = [[0, LIGHT["quick"]], [0.35, LIGHT["brisk"]], [0.7, LIGHT["slow"]], [1, LIGHT["slowest"]]]


def curves(result: Result) -> go.Figure | None:
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


def _is_baseline(trial: Trial, result: Result) -> bool:
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


@dataclass(frozen=True, slots=True)
class _Place:
    """All runs of one configuration, seen as one point of the search space."""

    batch_size: int
    learning_rate: float
    precision: str
    runs: int
    score: float | None
    broken: bool


def landscape(result: Result) -> go.Figure | None:
    """The configurations tried over batch size and learning rate, coloured by the time to target (or the metric).

    A contour of the response surface belongs under these points. The surface lives in `tune`, above this floor, so it
    is drawn here on the day the result document carries a grid of it.
    """
    trials = [trial for trial in result.trials or [] if trial.state != "waiting" and trial.learning_rate > 0]
    places = _places(trials)
    if len(places) < 2:  # noqa: PLR2004 - one point is no landscape
        return None
    timed = any(trial.time_to_target_seconds is not None for trial in trials)
    figure = go.Figure()
    broken = [place for place in places if place.broken and place.score is None]
    open_ended = [place for place in places if not place.broken and place.score is None]
    for group, words, symbol, colour in (
        (open_ended, "stopped before the target" if timed else "no value", "circle-open", LIGHT["faint"]),
        (broken, "diverged or failed", "x-thin-open", LIGHT["bad"]),
    ):
        if group:
            marker = {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 2, "color": colour}}
            _draw_places(figure, group, words, marker, [words] * len(group))
    scored = [place for place in places if place.score is not None]
    if scored:
        _draw_scored(figure, scored, result.target, timed=timed)
    _ring(figure, result.baseline, "what you run today", LIGHT["baseline"])
    _ring(figure, result.recommendation, "recommended", LIGHT["accent"])
    sizes, rates = [place.batch_size for place in places], [place.learning_rate for place in places]
    rate_axis = axis("learning rate", type="log", range=padded(min(rates), max(rates), 0.14), exponentformat="power")
    if spread(rates) < 1e4:  # noqa: PLR2004 - further apart, the decades alone are enough ticks
        rate_axis |= {"dtick": "D2", "tickformat": "~g"}
    title = "Where the runs lie: batch size and learning rate"
    x_axis = batch_axis(min(sizes), max(sizes), "global batch size", room=0.14)
    figure.update_layout(layout(title, height=420, xaxis=x_axis, yaxis=rate_axis, showlegend=True))
    return figure


def _places(trials: Sequence[Trial]) -> list[_Place]:
    timed = any(trial.time_to_target_seconds is not None for trial in trials)
    by_place: dict[tuple[int, float, str], list[Trial]] = {}
    for trial in trials:
        by_place.setdefault((trial.batch_size, trial.learning_rate, trial.precision), []).append(trial)
    found = []
    for (batch, rate, precision), runs in by_place.items():
        scores = [run.time_to_target_seconds if timed else run.value for run in runs]
        known = [score for score in scores if score is not None]
        broken = all(run.outcome in _BROKEN or run.state == "fail" for run in runs)
        score = statistics.median(known) if known else None
        found.append(_Place(batch, rate, precision, len(runs), score, broken))
    return found


def _draw_places(
    figure: go.Figure, places: Sequence[_Place], name: str, marker: dict[str, Any], abouts: Sequence[str]
) -> None:
    figure.add_scatter(
        x=[place.batch_size for place in places],
        y=[place.learning_rate for place in places],
        mode="markers",
        name=name,
        marker=marker,
        customdata=[
            [number(place.learning_rate), label(place.precision), place.runs, about]
            for place, about in zip(places, abouts, strict=True)
        ],
        hovertemplate="batch %{x:,}, learning rate %{customdata[0]}, %{customdata[1]}<br>%{customdata[3]}"
        "<br>runs: %{customdata[2]}<extra></extra>",
    )


def _draw_scored(figure: go.Figure, places: Sequence[_Place], target: Target | None, *, timed: bool) -> None:
    scores = [place.score for place in places if place.score is not None]
    logarithmic = timed and min(scores) > 0
    shade = [math.log10(score) if logarithmic else score for score in scores]
    low, high = min(shade), max(shade)
    ticks = [low + (high - low) * step / 3 for step in range(4)] if high > low else [low]
    shown = [10**tick if logarithmic else tick for tick in ticks]
    metric = label(target.metric if target else "metric")
    marker = {
        "size": 14,
        "color": shade,
        "colorscale": _SCALE,
        "reversescale": not timed and target is not None and target.goal == "maximize",
        "line": {"width": 1, "color": LIGHT["card"]},
        "colorbar": {
            "title": {"text": "time to<br>target<br> " if timed else f"{metric}<br> ", "font": {"size": 11.5}},
            "tickvals": ticks,
            "ticktext": [duration(value) if timed else number(value, 4) for value in shown],
            "tickfont": {"size": 11.5, "color": LIGHT["muted"]},
            "thickness": 10,
            "outlinewidth": 0,
            "len": 0.9,
        },
    }
    abouts = [f"reached in {duration(score)}" if timed else f"{metric} {number(score, 4)}" for score in scores]
    _draw_places(figure, places, "reached the target" if timed else "finished", marker, abouts)


def _ring(figure: go.Figure, configuration: Recommendation | None, name: str, colour: str) -> None:
    if configuration is None or not configuration.learning_rate:
        return
    figure.add_scatter(
        x=[configuration.global_batch_size],
        y=[configuration.learning_rate],
        mode="markers",
        name=name,
        marker={"symbol": "circle-open", "size": 24, "color": colour, "line": {"width": 2.5, "color": colour}},
        hoverinfo="skip",
    )

"""The search space of a study as a map: its runs, what is recommended, and between them what the surface predicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from batchtune.document import Document, Interval, Landscape, Prior, Recommendation, Target, Trial
from batchtune.report.figures.theme import LIGHT, axis, batch_axis, label, layout, padded, spread
from batchtune.report.view.select import SECONDS, VALUE, is_broken, score
from batchtune.units import duration, number, time_interval, time_unit

_SCALE = [[0, LIGHT["quick"]], [0.35, LIGHT["brisk"]], [0.7, LIGHT["slow"]], [1, LIGHT["slowest"]]]
_LINES = 8  # of equal predicted time, at most
_FAR = 4.0  # times the predicted best: beyond it, nobody asks how slow


@dataclass(frozen=True, slots=True)
class _Place:
    """All runs of one configuration, seen as one point of the search space."""

    batch_size: int
    learning_rate: float
    precision: str
    runs: int
    score: float | None
    broken: bool


def landscape(result: Document) -> go.Figure | None:
    """The configurations tried over batch size and learning rate, coloured by the time to target (or the metric).

    Under them the response surface's prediction, as lines: it is an estimate, and its legend says so.
    """
    trials = [trial for trial in result.trials or [] if trial.state != "waiting" and trial.learning_rate > 0]
    places = _places(trials)
    if len(places) < 2:  # noqa: PLR2004 - one point is no landscape
        return None
    timed = any(trial.time_to_target_seconds is not None for trial in trials)
    figure = go.Figure()
    if result.landscape is not None:
        _draw_predicted(figure, result.landscape)
    if result.prior is not None:
        _draw_belief(figure, result.prior, result)
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
    rates += [rate for _, rate in _edges(result.prior)]
    rate_axis = axis("learning rate", type="log", range=padded(min(rates), max(rates), 0.14), exponentformat="power")
    if spread(rates) < 1e4:  # noqa: PLR2004 - further apart, the decades alone are enough ticks
        rate_axis |= {"dtick": "D2", "tickformat": "~g"}
    title = "Where the runs lie: batch size and learning rate"
    x_axis = batch_axis(min(sizes), max(sizes), "global batch size", room=0.14)
    figure.update_layout(layout(title, height=420, xaxis=x_axis, yaxis=rate_axis, showlegend=True))
    return figure


def _draw_predicted(figure: go.Figure, predicted: Landscape) -> None:
    """Lines of equal predicted time, the nearest around the predicted best; a field of one row has none."""
    median = predicted.median_seconds
    if len(predicted.batch_sizes) < 2 or len(predicted.learning_rates) < 2:  # noqa: PLR2004
        return
    fastest = min(map(min, median))
    if fastest <= 0:  # no surface predicts that
        return
    unit, scale = time_unit(fastest)
    step = _round_up((_FAR - 1) * fastest / scale / _LINES)
    figure.add_contour(
        x=predicted.batch_sizes,
        y=predicted.learning_rates,
        z=_turned([[seconds / scale for seconds in row] for row in median]),
        text=_turned(_predictions(predicted)),
        name=f"predicted time, {unit} (response surface, {predicted.runs} runs)",
        contours={
            "coloring": "none",
            "start": math.ceil(fastest / scale / step) * step,
            "end": _FAR * fastest / scale,
            "size": step,
            "showlabels": True,
            "labelformat": "~g",
            "labelfont": {"size": 11, "color": LIGHT["muted"]},
        },
        line={"color": LIGHT["faint"], "width": 1, "dash": "dot"},
        showlegend=True,
        showscale=False,
        hovertemplate="batch %{x:,}, learning rate %{y:.3~g}<br>%{text}<extra>not measured</extra>",
    )


def _draw_belief(figure: go.Figure, prior: Prior, result: Document) -> None:
    """Where the search started: the batch size and learning rate believed best, and where training came apart."""
    today = next((trial.batch_size for trial in result.trials or [] if trial.role == "baseline"), None)
    start = prior.start_batch_size or today
    if start is not None:
        spread = 10**prior.learning_rate_decades
        _draw_start(figure, [(start, prior.learning_rate)], "believed best before the search", "diamond-open", spread)
    _draw_start(figure, _edges(prior), "edge of stability, range test", "line-ew-open")


def _edges(prior: Prior | None) -> list[tuple[int, float]]:
    tests = prior.range_tests if prior else []
    return [(test.batch_size, test.edge_learning_rate) for test in tests if test.edge_learning_rate]


def _draw_start(
    figure: go.Figure, points: Sequence[tuple[int, float]], name: str, symbol: str, spread: float | None = None
) -> None:
    """Points, each with a bar from its rate over `spread` to its rate times `spread`."""
    if not points:
        return
    rates = [rate for _, rate in points]
    figure.add_scatter(
        x=[batch for batch, _ in points],
        y=rates,
        mode="markers",
        name=name,
        marker={"symbol": symbol, "size": 12, "color": LIGHT["second"], "line": {"width": 2, "color": LIGHT["second"]}},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [rate * (spread - 1) for rate in rates],
            "arrayminus": [rate * (1 - 1 / spread) for rate in rates],
            "color": LIGHT["second"],
            "thickness": 1.2,
        }
        if spread
        else None,
        hovertemplate=f"{name}<br>batch %{{x:,}}, learning rate %{{y:.3~g}}<extra></extra>",
    )


def _predictions(predicted: Landscape) -> list[list[str]]:
    bounds = zip(predicted.median_seconds, predicted.low_seconds, predicted.high_seconds, strict=True)
    return [
        [
            f"predicted {time_interval(Interval(median=median, low=low, high=high))}, {predicted.band:.0%} band"
            for median, low, high in zip(*rows, strict=True)
        ]
        for rows in bounds
    ]


def _turned(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows for columns: plotly's outer list runs along the vertical axis."""
    return [list(column) for column in zip(*rows, strict=True)]


def _round_up(value: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value)


def _places(trials: Sequence[Trial]) -> list[_Place]:
    timed = any(trial.time_to_target_seconds is not None for trial in trials)
    by_place: dict[tuple[int, float, str], list[Trial]] = {}
    for trial in trials:
        by_place.setdefault((trial.batch_size, trial.learning_rate, trial.precision), []).append(trial)
    found = []
    for (batch, rate, precision), runs in by_place.items():
        known = [value for run in runs if (value := score(run, SECONDS if timed else VALUE)) is not None]
        median = statistics.median(known) if known else None
        found.append(_Place(batch, rate, precision, len(runs), median, all(map(is_broken, runs))))
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

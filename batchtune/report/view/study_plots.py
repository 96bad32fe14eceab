"""A study's figures: the answer against what runs today, its runs over time, and where in its space they lie."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchtune.document import Document, Interval, Landscape, Prior, Recommendation, Trial, is_of
from batchtune.report.view.figure import Axis, Field, Mark, Plot, Point, Scale, Series, with_points
from batchtune.report.view.model import Bar, Bars
from batchtune.report.view.select import (
    JOULES,
    SECONDS,
    VALUE,
    is_broken,
    least_is_best,
    metric_of,
    objective,
    ran,
    score,
    that_count,
)
from batchtune.report.view.words import IDLE, batch_text
from batchtune.units import bounds, duration, number, time_interval, time_unit

_LOG_FROM = 8  # a quantity that spans so many times its smallest value is drawn on a logarithmic axis
_LINES = 8  # of equal predicted time, at most
_FAR = 4.0  # times the predicted best: beyond it, nobody asks how slow
_TODAY = "what you run today"


def bars(result: Document, found: Recommendation) -> list[Bars]:
    """Recommendation and baseline side by side for all that is known of the first, the study's objective first."""
    titles = {
        SECONDS: "Time to target" + (f", {IDLE}" if found.timed_in_turn else ""),
        JOULES: "Energy to target",
        VALUE: f"{metric_of(result)} reached",
    }
    shown = [found] if result.baseline is None else [found, result.baseline]
    made = []
    for key in sorted(titles, key=lambda each: each != objective(result)):
        values = [(each, getattr(each, key)) for each in shown if getattr(each, key) is not None]
        if getattr(found, key) is not None:
            made.append(Bars(titles[key], _drawn(values, found, key)))
    return made


def _drawn(values: list[tuple[Recommendation, Interval]], found: Recommendation, key: str) -> list[Bar]:
    longest = max(value.high for _, value in values)
    drawable = longest > 0 and all(value.low >= 0 for _, value in values) and len(values) > 1
    unit = " J" if key == JOULES else ""
    made = []
    for each, value in values:
        ends = (value.low, value.median, value.high)
        low, median, high = (duration(end) if key == SECONDS else f"{number(end, 4)}{unit}" for end in ends)
        text, between = (f"≥ {median}", "cut off") if value.at_least else (median, bounds(low, high))
        shares = (value.low / longest, value.median / longest, value.high / longest) if drawable else None
        about = f"{batch_text(each)} @ {number(each.learning_rate)}"
        made.append(Bar("recommended" if each is found else "today", about, text, between, shares))
    return made


def curves(result: Document) -> Plot | None:
    """The metric of every run against its training time, with the target."""
    trials = [trial for trial in result.trials or [] if any(point.value is not None for point in trial.curve)]
    if not trials:
        return None
    target = result.target
    seconds = [point.seconds for trial in trials for point in trial.curve if point.seconds > 0]
    values = [point.value for trial in trials for point in trial.curve if point.value is not None]
    log_time = bool(seconds) and _spread(seconds) > _LOG_FROM
    log_value = _LOG_FROM / 4 < _spread(values) < math.inf and (target is None or target.goal == "minimize")
    series = list(_grouped(result, trials, log_time=log_time))
    if target is not None and target.value is not None and seconds:
        sign = "≤" if target.goal == "minimize" else "≥"
        ends = [(min(seconds) if log_time else 0.0, target.value), (max(seconds), target.value)]
        series.append(Series("target", f"target: {target.metric} {sign} {number(target.value, 4)}", ends))
    x_axis, y_axis = Axis("training time, seconds", log=log_time), Axis(metric_of(result), log=log_value)
    return Plot("Learning curves against training time", x_axis, y_axis, series)


def _grouped(result: Document, trials: Sequence[Trial], *, log_time: bool) -> Iterator[Series]:
    """What is recommended, what runs today, and all others, each as one series."""
    groups: dict[Mark, list[Trial]] = {"other": [], "today": [], "recommended": []}
    for trial in trials:
        today = trial.role == "baseline" or is_of(trial, result.baseline)
        mark: Mark = "recommended" if is_of(trial, result.recommendation) else "today" if today else "other"
        groups[mark].append(trial)
    for mark, group in groups.items():
        points: list[Point | None] = []
        hover: list[Sequence[str]] = []
        for trial in group:
            about = _where(trial.batch_size, trial.learning_rate)
            for point in trial.curve:
                if point.seconds > 0 or not log_time:
                    points.append(None if point.value is None else (point.seconds, point.value))
                    reached = f"{number(point.value, 4)} after {duration(point.seconds)}"
                    hover.append((f"run {trial.number}, {trial.role}", about, reached))
            points.append(None)
            hover.append(())
        if group:
            yield Series(mark, {"other": "other runs", "today": _TODAY}.get(mark, mark), points, hover)


def _spread(values: Sequence[float]) -> float:
    """How many times the largest is the smallest; infinite where one of them is not positive."""
    return max(values) / min(values) if min(values) > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _Configuration:
    """All runs of one configuration, seen as one point of the search space."""

    runs: Sequence[Trial]  # at least one; those that were interrupted only where there are no others
    score: float | None  # their median

    @property
    def point(self) -> Point:
        return self.runs[0].batch_size, self.runs[0].learning_rate

    @property
    def broken(self) -> bool:
        return all(map(is_broken, self.runs))

    def about(self, outcome: str) -> tuple[str, ...]:
        return f"{_where(*self.point)}, {self.runs[0].precision}", outcome, f"runs: {len(self.runs)}"


def landscape(result: Document) -> Plot | None:
    """The configurations tried over batch size and learning rate, coloured by the time to target (or the metric).

    Under them the response surface's prediction, as lines: it is an estimate, and its legend says so.
    """
    trials = [trial for trial in ran(result) if trial.learning_rate > 0]
    timed = any(trial.time_to_target_seconds is not None for trial in trials)
    found = _configurations(trials, SECONDS if timed else VALUE)
    if len(found) < 2:  # noqa: PLR2004 - one point is no landscape
        return None
    without = [each for each in found if each.score is None]
    stopped = "stopped before the target" if timed else "no value"
    series = [
        *(_start_of_search(result.prior, result) if result.prior else ()),
        _outcome("open", stopped, [each for each in without if not each.broken]),
        _outcome("broken", "diverged or failed", [each for each in without if each.broken]),
        _scored(result, [each for each in found if each.score is not None], timed=timed),
        _ring("ring today", _TODAY, result.baseline),
        _ring("ring recommended", "recommended", result.recommendation),
    ]
    return Plot(
        "Where the runs lie: batch size and learning rate",
        Axis("global batch size", log=True, whole=True),
        Axis("learning rate", log=True),
        with_points(series),
        field=_predicted(result.landscape) if result.landscape else None,
    )


def _configurations(trials: Sequence[Trial], key: str) -> list[_Configuration]:
    alike: dict[tuple[int, float, str], list[Trial]] = {}
    for trial in trials:
        alike.setdefault((trial.batch_size, trial.learning_rate, trial.precision), []).append(trial)
    found = []
    for runs in map(that_count, alike.values()):
        known = [value for run in runs if (value := score(run, key)) is not None]
        found.append(_Configuration(runs, statistics.median(known) if known else None))
    return found


def _where(batch: float, rate: float) -> str:
    return f"batch {batch:,}, learning rate {number(rate)}"


def _outcome(mark: Mark, words: str, found: Sequence[_Configuration]) -> Series:
    return Series(mark, words, [each.point for each in found], [each.about(words) for each in found])


def _scored(result: Document, found: Sequence[_Configuration], *, timed: bool) -> Series:
    """Those with a figure, shaded by it."""
    scores, metric = [each.score for each in found if each.score is not None], metric_of(result)
    name = "reached the target" if timed else "finished"
    if not scores:
        return Series("scored", name, ())
    logarithmic = timed and min(scores) > 0
    shades = [math.log10(value) if logarithmic else value for value in scores]
    low, high = min(shades), max(shades)
    ticks = [low + (high - low) * part / 3 for part in range(4)] if high > low else [low]
    shown = {tick: 10**tick if logarithmic else tick for tick in ticks}
    texts = {tick: duration(value) if timed else number(value, 4) for tick, value in shown.items()}
    least = least_is_best(result, SECONDS if timed else VALUE)
    outcomes = [f"reached in {duration(value)}" if timed else f"{metric} {number(value, 4)}" for value in scores]
    hover = [each.about(outcome) for each, outcome in zip(found, outcomes, strict=True)]
    scale = Scale("time to target" if timed else metric, texts, least_is_best=least)
    return Series("scored", name, [each.point for each in found], hover, shades=shades, scale=scale)


def _ring(mark: Mark, name: str, found: Recommendation | None) -> Series:
    rate = found.learning_rate if found else None
    return Series(mark, name, [(found.global_batch_size, rate)] if found and rate else ())


def _start_of_search(prior: Prior, result: Document) -> Iterator[Series]:
    """The batch size and learning rate believed best before the search, and where training diverged."""
    today = next((trial.batch_size for trial in result.trials or [] if trial.role == "baseline"), None)
    start = prior.start_batch_size or today
    best = [(start, prior.learning_rate)] if start else []
    edges = [(test.batch_size, test.edge_learning_rate) for test in prior.range_tests if test.edge_learning_rate]
    marks: list[tuple[Mark, str, list[tuple[int, float]], float | None]] = [
        ("prior", "believed best before the search", best, 10**prior.learning_rate_decades),
        ("edge", "edge of stability, range test", edges, None),
    ]
    for mark, name, points, spread in marks:
        hover = [(name, _where(*point)) for point in points]
        yield Series(mark, name, points, hover, spread=spread)


def _predicted(predicted: Landscape) -> Field | None:
    """Lines of equal predicted time, the nearest around the predicted best; a field of one row has none."""
    median = predicted.median_seconds
    fastest = min(map(min, median), default=0.0)
    if len(predicted.batch_sizes) < 2 or len(predicted.learning_rates) < 2 or fastest <= 0:  # noqa: PLR2004
        return None
    unit, scale = time_unit(fastest)
    step = _round_up((_FAR - 1) * fastest / scale / _LINES)

    def about(batch: int, rate: float, row: int, column: int) -> tuple[str, ...]:
        low, high = predicted.low_seconds[row][column], predicted.high_seconds[row][column]
        seconds = time_interval(Interval(median=median[row][column], low=low, high=high))
        return _where(batch, rate), f"predicted {seconds}, {predicted.band:.0%} band", "not measured"

    return Field(
        f"predicted time, {unit} (response surface, {predicted.runs} runs)",
        predicted.batch_sizes,
        predicted.learning_rates,
        [[row[at] / scale for row in median] for at in range(len(predicted.learning_rates))],
        [
            [about(batch, rate, row, column) for row, batch in enumerate(predicted.batch_sizes)]
            for column, rate in enumerate(predicted.learning_rates)
        ],
        start=math.ceil(fastest / scale / step) * step,
        end=_FAR * fastest / scale,
        step=step,
    )


def _round_up(value: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value)

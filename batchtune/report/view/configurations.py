"""The configurations of a study as a table: what each came to on fresh seeds, and why it is not the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.document import Document, Interval, Recommendation, Trial
from batchtune.report.export.settings import is_of
from batchtune.report.view.columns import counts, numbers, seconds, table, words
from batchtune.report.view.model import Column, Table
from batchtune.report.view.select import JOULES, SECONDS, best_first, least_is_best, metric_of, score
from batchtune.report.view.words import OUTCOMES, clipping_text, counted, named_values
from batchtune.units import duration, number

_MOST = 12
_TIMES = {SECONDS: "times as long", JOULES: "times the energy"}
_ENDED = OUTCOMES | {
    "pruned": "stopped early: others were ahead",
    "capped": "stopped: slower than the best",
    "diverged": "diverged",
    "finished": "did not reach the target",
}


@dataclass(frozen=True, slots=True)
class _Configuration:
    """All runs of one configuration, the best first.

    Attributes:
        runs: at least one.
        found: what the study made of it, where that is the answer or what runs today.
        fresh: runs on fresh seeds.
        key: the figure that ranks them.
    """

    runs: Sequence[Trial]
    found: Recommendation | None
    fresh: Sequence[Trial]
    key: str

    @property
    def interval(self) -> Interval | None:
        """The median with its interval; without the study's own, the least and the most of the runs that count."""
        told = getattr(self.found, self.key, None)
        known = [value for each in self.fresh or self.runs if (value := score(each, self.key)) is not None]
        if told is not None or not known:
            return told
        return Interval(median=statistics.median(known), low=min(known), high=max(known))

    @property
    def runs_today(self) -> bool:
        """Whether it is the baseline."""
        return any(run.role == "baseline" for run in self.runs)

    @property
    def first(self) -> Trial:
        """One that has what all have in common."""
        return self.runs[0]


def table_of(result: Document) -> Table:
    """A row for each configuration: the answer, those confirmed, the best of the others, and last what runs today."""
    answer, others, today = _in_order(result)
    ends = [each for each in (answer, today) if each is not None]
    shown = [each for each in (answer, *others[: _MOST - len(ends)], today) if each is not None]
    intervals, key = [each.interval for each in shown], shown[0].key
    several = len({each.first.precision for each in shown}) > 1  # else the recommendation names it
    columns = [
        words("", ["●" if each is answer else "" for each in shown]),
        counts("batch", [each.first.batch_size for each in shown]),
        numbers("learning rate", [each.first.learning_rate for each in shown]),
        words("optimizer", [named_values(each.first.optimizer_arguments) for each in shown], spare=1),
        words("clipping", [clipping_text(each.first.gradient_clipping) for each in shown], spare=1),
        words("precision", [each.first.precision if several else "" for each in shown], spare=1),
        _medians(result, key, [each.median if each else None for each in intervals]),
        words("interval", [_bounds(each, key) if each else "" for each in intervals], spare=1),
        counts("seeds", [len(each.fresh) or None for each in shown], spare=1),
        words("why", [_verdict(result, each, answer, today) for each in shown], spare=1, wraps=True),
    ]
    count = len(ends) + len(others)
    part = f", {len(shown)} of {count}" if len(shown) < count else ""
    order = ", the recommended first" if answer else ""
    title = f"configurations{order}{part}: medians over their seeds"
    return table(title, columns, marked=[0] if answer else [], summary=True)


def _in_order(result: Document) -> tuple[_Configuration | None, list[_Configuration], _Configuration | None]:
    """The answer, the others from the best on, those with fresh seeds before, and what runs today if another."""
    runs, key = best_first(result)
    alike: dict[tuple[object, ...], list[Trial]] = {}
    for run in runs:
        clipped, arguments = run.gradient_clipping, tuple(sorted(run.optimizer_arguments.items()))
        alike.setdefault((run.batch_size, run.learning_rate, run.precision, arguments, clipped), []).append(run)
    answer = today = None
    others = []
    for group in alike.values():
        known = [each for each in (result.recommendation, result.baseline) if is_of(group[0], each)]
        fresh = [run for run in group if run.role == "confirm" and run.state != "running"]
        made = _Configuration(group, known[0] if known else None, fresh, key)
        if is_of(group[0], result.recommendation):
            answer = made
        elif made.runs_today or is_of(group[0], result.baseline):
            today = made
        else:
            others.append(made)
    sign = 1 if least_is_best(result, key) else -1
    others.sort(key=lambda each: (not each.fresh, sign * each.interval.median if each.interval else math.inf))
    return answer, others, today


def _medians(result: Document, key: str, values: Sequence[float | None]) -> Column:
    if key == SECONDS:
        return seconds("to target", values)
    if key == JOULES:
        return numbers("energy", values, unit="J")
    return numbers(f"best {metric_of(result)}", values, digits=4)


def _bounds(found: Interval, key: str) -> str:
    if found.at_least:
        return "or more"
    write = duration if key == SECONDS else number
    return "" if found.low == found.high else f"{write(found.low)} to {write(found.high)}"


def _verdict(
    result: Document, each: _Configuration, answer: _Configuration | None, today: _Configuration | None
) -> str:
    """In one line why this is the answer, or why it is not."""
    if each is answer:
        also = ", and what you run today" if each.runs_today else ""
        return f"recommended{also}" + ("" if each.fresh else ", not confirmed on fresh seeds")
    why = _why_not(result, each, answer)
    return f"what you run today: {why}" if each is today else why


def _why_not(result: Document, each: _Configuration, answer: _Configuration | None) -> str:
    missed = sum(score(run, each.key) is None for run in each.fresh)
    if missed and not (each.found and each.interval):
        return f"{missed} of {counted(len(each.fresh), 'fresh seed')} came to no result"
    if each.interval is None:
        outcome = each.first.outcome or each.first.state
        return _ENDED.get(outcome, outcome)
    if not each.fresh and not each.found:
        return f"{'a single run' if len(each.runs) == 1 else counted(len(each.runs), 'run')}, not confirmed"
    best = answer.interval if answer else None
    return "confirmed" if best is None else _against(best, each.interval, result, each.key)


def _against(best: Interval, other: Interval, result: Document, key: str) -> str:
    if best.low <= other.high and other.low <= best.high:
        return "no better beyond noise"
    if (other.median < best.median) is least_is_best(result, key):
        return "ahead on these seeds alone"
    if key not in _TIMES or best.median <= 0:
        return "worse"
    return f"{'at least ' if other.at_least else ''}{number(other.median / best.median, 2)} {_TIMES[key]}"

"""What a report shows of a study: its answer, its configurations and runs, and what several devices would take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchtune.document import Document, Interval, Recommendation, Scaling, ScalingPoint, Trial, by_configuration, is_of
from batchtune.report.view.model import Column, Headline, Section, Table, counts, facts, numbers, seconds
from batchtune.report.view.select import (
    JOULES,
    SECONDS,
    VALUE,
    best_first,
    least_is_best,
    metric_of,
    score,
    that_count,
)
from batchtune.report.view.words import (
    IDLE,
    OUTCOMES,
    batch_text,
    checkpointing_text,
    clipping_text,
    named_values,
    ranks,
    tone,
)
from batchtune.units import bounds, counted, duration, interval, number, time_interval

_MOST_CONFIGURATIONS = 12
_TIMES = {SECONDS: "times as long", JOULES: "times the energy"}
_ENDED = OUTCOMES | {
    "pruned": "stopped early: behind others, or levelled off",
    "capped": "stopped: slower than the best",
    "diverged": "diverged",
    "interrupted": "interrupted before its end",
    "finished": "did not reach the target",
}


def headline(result: Document, found: Recommendation) -> Headline:
    """What is gained, and what to choose for it."""
    choice = facts({name: text for name, text in _chosen(found).items() if name not in {"ranks", "schedule"}})
    if result.status == "running" and found.time_to_target_seconds is not None:
        return Headline(duration(found.time_to_target_seconds.median), "to the target, best so far", choice)
    as_today = any(is_of(trial, found) for trial in result.trials or [] if trial.role == "baseline")
    if found.seeds_to_confirm is not None:
        level, few = "yet, and so far no better than what you run today", "yet: too few runs to compare with today's"
        return Headline("not confirmed", level if as_today else few, choice, found.reason, repeats=True)
    gain = found.speedup_over_baseline or found.energy_saving_over_baseline
    if gain is None and as_today and result.baseline is None:
        alone = "configuration came to a result: this is what you run today"
        return Headline("no other", alone, choice, found.reason, repeats=True)
    if gain is None and as_today:
        return Headline("no better", "than what you run today: keep it", choice, found.reason)
    if gain is None:
        size = "batch size in tokens" if found.batch_unit == "tokens" else "batch size"
        return Headline(f"{found.global_batch_size:,}", f"is the {size} to train with", choice, found.reason)
    between = "" if gain.at_least else bounds(number(gain.low), number(gain.high))
    seeds = sum(trial.tells_of_fresh_seed and is_of(trial, found) for trial in result.trials or [])
    told = " ".join(filter(None, [between, f"over {counted(seeds, 'fresh seed')}" if seeds else ""]))
    said = "as fast as today" if found.speedup_over_baseline else "less energy than today"
    figure = f"≥ {number(gain.low)}×" if gain.at_least else f"{number(gain.median)}×"
    return Headline(figure, f"{said} ({told})" if told else said, choice, found.reason, repeats=True)


def _chosen(found: Recommendation) -> dict[str, str]:
    """What to train with, each in words; '' or '-' where there is nothing to say."""
    return {
        "batch size": batch_text(found),
        "ranks": f"{found.world_size} with {found.strategy}" if found.strategy else "",
        "learning rate": number(found.learning_rate),
        "optimizer": named_values(found.optimizer_arguments),
        "gradient clipping": clipping_text(found.gradient_clipping),
        "schedule": f"{found.total_steps:,} steps" if found.total_steps else "",
        "precision": found.precision,
        "activation checkpointing": checkpointing_text(found.activation_checkpointing),
    }


def comparison(result: Document, found: Recommendation) -> Table:
    """The recommended configuration and, where it is another, today's: a row for each fact known of the first.

    The first row is the batch size. A metric may be called what another row is.
    """
    today = result.baseline
    as_today = today is None or any(is_of(trial, found) and is_of(trial, today) for trial in result.trials or [])
    shown = [found] if today is None or as_today else [found, today]
    chosen = [_chosen(each) for each in shown]
    if any(each["gradient clipping"] for each in chosen):
        chosen = [each | {"gradient clipping": each["gradient clipping"] or "none"} for each in chosen]
    timed = "time to target" + (f", {IDLE}" if found.timed_in_turn else "")
    rows = [(name, *(each[name] or "-" for each in chosen)) for name in chosen[0]] + [
        (timed, *(time_interval(each.time_to_target_seconds) for each in shown)),
        ("energy to target", *(interval(each.energy_to_target_joules, " J") for each in shown)),
        (metric_of(result), *(interval(each.value) for each in shown)),
    ]
    known = zip(*(row for row in rows if row[1] != "-"), strict=True)
    return Table("", [Column(*each) for each in zip(("", "train with", "today"), known, strict=False)])


def runs(result: Document) -> Table:
    """The runs of a study, best first, those of the recommended configuration marked."""
    shown, key = best_first(result)
    marked = [row for row, trial in enumerate(shown) if is_of(trial, result.recommendation)]
    outcomes, best = [trial.came_to for trial in shown], f"best {metric_of(result)}"
    columns = [
        Column("", ["●" if row in marked else "" for row in range(len(shown))]),
        counts("run", [trial.number for trial in shown], cells=[str(trial.number) for trial in shown], spare=4),
        Column("role", [trial.role for trial in shown], spare=2),
        counts("batch", [trial.batch_size for trial in shown]),
        Column("micro × acc.", [_made_up(trial) for trial in shown], detail=True),
        numbers("learning rate", [trial.learning_rate for trial in shown]),
        Column("optimizer", [named_values(trial.optimizer_arguments) for trial in shown], spare=3),
        *_differing(shown, spare=2),
        seconds("to target", [trial.time_to_target_seconds for trial in shown], spare=3 if key == JOULES else 0),
        numbers("energy", [each.energy_to_target_joules for each in shown], unit="J", spare=0 if key == JOULES else 3),
        counts("samples", [trial.samples_to_target for trial in shown], detail=True),
        numbers(best, [trial.value for trial in shown], digits=4, spare=0 if key == VALUE else 3),
        seconds("trained", [trial.training_seconds for trial in shown], detail=True),
        Column("outcome", outcomes, tones=[*map(tone, outcomes)], spare=1),
        Column("note", [trial.message or "" for trial in shown], detail=True),
    ]
    title = "every run, best first" + ("; ● with what is recommended" if marked else "")
    return Table(title, columns, marked=marked, folded=True)


def _differing(trials: Sequence[Trial], spare: int) -> list[Column]:
    """What trials were trained by, where that is not the same for all: else the recommendation names it."""
    ways = {"precision": [each.precision for each in trials], "trained by": [each.variant.name for each in trials]}
    return [Column(name, texts, spare=spare) for name, texts in ways.items() if len(set(texts)) > 1]


def _made_up(trial: Trial) -> str:
    steps, ranks = trial.gradient_accumulation_steps or 1, trial.world_size or 1
    if steps == ranks == 1:
        return "-"
    return f"{trial.micro_batch_size} × {steps}" + (f" × {ranks} ranks" if ranks > 1 else "")


def scaling(found: Scaling) -> Section:
    """What to train with on 1, 2, 4 and 8 ranks, and which were timed for that."""
    points = found.points
    made = [f"{one.micro_batch_size:,} × {one.gradient_accumulation_steps}".removesuffix(" × 1") for one in points]
    of_all = [each.world_size * each.time_to_target_seconds.median for each in points]
    energies = [each.energy_to_target_joules for each in points]
    columns = [
        counts("ranks", [each.world_size for each in points]),
        counts("batch", [each.global_batch_size for each in points]),
        counts("of each rank", [each.micro_batch_size for each in points], cells=made, spare=2),
        numbers("learning rate", [each.learning_rate for each in points], spare=1),
        Column("time to target", [time_interval(each.time_to_target_seconds) for each in points], wraps=True),
        Column("of all devices", [*map(duration, of_all)], spare=3),
        Column("energy", [interval(each, " J") if each else "" for each in energies], spare=4),
        Column(" ", [_known_by(each) for each in points]),
    ]
    return Section("Several devices", [Table("on several devices", columns)], [f"ranks timed: {ranks(found.measured)}"])


def _known_by(point: ScalingPoint) -> str:
    """Whether so many ranks have trained, and how far the estimate was from what they took."""
    if point.is_estimate or point.estimated_seconds is None:
        return "estimated" if point.is_estimate else "measured"
    return f"measured; the estimate: {point.estimated_seconds / point.time_to_target_seconds.median:.2f} times as long"


@dataclass(frozen=True, slots=True)
class _Configuration:
    """All runs of one configuration, the best first."""

    runs: Sequence[Trial]  # at least one; those that were interrupted only where there are no others
    runs_today: bool  # whether it is the baseline
    found: Recommendation | None  # what the study made of it, where that is the answer or what runs today
    fresh: Sequence[Trial]  # runs on fresh seeds
    key: str  # the figure that ranks them

    @property
    def interval(self) -> Interval | None:
        """The median with its interval; without the study's own, the least and the most of the runs that count."""
        told: Interval | None = getattr(self.found, self.key, None)
        return told or self.of_runs

    @property
    def of_runs(self) -> Interval | None:
        """The same by its runs as they were, also where the study tells what they would take on an idle machine."""
        known = [value for each in self.fresh or self.runs if (value := score(each, self.key)) is not None]
        return Interval(median=statistics.median(known), low=min(known), high=max(known)) if known else None


def configurations(result: Document) -> Table:
    """A row for each configuration: the answer, those confirmed, the best of the others, and last what runs today."""
    answer, others, today = _in_order(result)
    ends = [each for each in (answer, today) if each is not None]
    shown = [each for each in (answer, *others[: _MOST_CONFIGURATIONS - len(ends)], today) if each is not None]
    intervals, key = [each.interval for each in shown], shown[0].key
    is_timed_in_turn = result.recommendation is not None and bool(result.recommendation.timed_in_turn)
    idle = [key == SECONDS and each.found is not None and is_timed_in_turn for each in shown]
    columns = [
        Column("", ["●" if each is answer else "" for each in shown]),
        counts("batch", [each.runs[0].batch_size for each in shown]),
        numbers("learning rate", [each.runs[0].learning_rate for each in shown]),
        Column("optimizer", [named_values(each.runs[0].optimizer_arguments) for each in shown], spare=1),
        Column("clipping", [clipping_text(each.runs[0].gradient_clipping) for each in shown], spare=1),
        *_differing([each.runs[0] for each in shown], spare=1),
        _medians(result, key, intervals, idle),
        Column("interval", [_bounds(each, key) if each else "" for each in intervals], spare=1),
        counts("seeds", [len(each.fresh) or None for each in shown], spare=1),
        Column("why", [_verdict(result, each, answer, today) for each in shown], spare=1, wraps=True),
    ]
    count = len(ends) + len(others)
    part = f", {len(shown)} of {count}" if len(shown) < count else ""
    order = ", the recommended first" if answer else ""
    title = f"configurations{order}{part}: medians over their seeds{f'; ≈: {IDLE}' if any(idle) else ''}"
    return Table(title, columns, marked=[0] if answer else [], summary=True)


def _in_order(result: Document) -> tuple[_Configuration | None, list[_Configuration], _Configuration | None]:
    """The answer, the others from the best on, those with fresh seeds before, and what runs today if another."""
    runs, key = best_first(result)
    answer = today = None
    others = []
    for group in by_configuration(runs).values():
        found = next((each for each in (result.recommendation, result.baseline) if is_of(group[0], each)), None)
        fresh = [run for run in group if run.tells_of_fresh_seed]
        made = _Configuration(that_count(group), any(run.role == "baseline" for run in group), found, fresh, key)
        if found is not None and found is result.recommendation:
            answer = made
        elif made.runs_today or found is not None:
            today = made
        else:
            others.append(made)
    sign = 1 if least_is_best(result, key) else -1
    others.sort(key=lambda each: (not each.fresh, sign * each.interval.median if each.interval else math.inf))
    return answer, others, today


def _medians(result: Document, key: str, intervals: Sequence[Interval | None], idle: Sequence[bool]) -> Column:
    """Lower bounds are marked as such, and what was not measured, but would be on an idle machine."""
    values = [each.median if each else None for each in intervals]
    if key == SECONDS:
        column = seconds("to target", values)
    elif key == JOULES:
        column = numbers("energy", values, unit="J")
    else:
        column = numbers(f"best {metric_of(result)}", values, digits=4)
    marks = [
        "" if each is None else "≥ " if each.at_least else "≈ " if is_estimate else ""
        for each, is_estimate in zip(intervals, idle, strict=True)
    ]
    cells, lined_up = ([*map("".join, zip(marks, texts, strict=True))] for texts in (column.cells, column.lined_up))
    return replace(column, cells=cells, lined_up=lined_up)


def _bounds(found: Interval, key: str) -> str:
    write = duration if key == SECONDS else number
    return "" if found.at_least or found.low == found.high else f"{write(found.low)} to {write(found.high)}"


def _verdict(
    result: Document, each: _Configuration, answer: _Configuration | None, today: _Configuration | None
) -> str:
    """In one line why this is the answer, or why it is not."""
    if each is answer:
        also = ", and what you run today" if each.runs_today else ""
        is_open = not each.runs_today and each.found is not None and each.found.seeds_to_confirm is not None
        unsure = ", not confirmed" if is_open else ""
        return f"recommended{also}{unsure if each.fresh else ', not confirmed on fresh seeds'}"
    why = _why_not(result, each, answer)
    return f"what you run today: {why}" if each is today else why


def _why_not(result: Document, each: _Configuration, answer: _Configuration | None) -> str:
    missed = sum(score(run, each.key) is None for run in each.fresh)
    if missed and not (each.found and each.interval):
        return f"{missed} of {counted(len(each.fresh), 'fresh seed')} came to no result"
    if each.interval is None:
        return _ENDED.get(each.runs[0].came_to, each.runs[0].came_to)
    if not each.fresh and not each.found:
        return f"{'a single run' if len(each.runs) == 1 else counted(len(each.runs), 'run')}, not confirmed"
    if answer and not answer.fresh and each.fresh:
        return "on fresh seeds, of which the recommended ran on none"  # a search's best run was lucky, too
    found, best = (answer.found, answer.interval) if answer else (None, None)
    gain = found and (found.speedup_over_baseline or found.energy_saving_over_baseline)
    if gain and each.found:
        return _times(gain.low if gain.at_least else gain.median, each.key, at_least=gain.at_least)
    as_it_was = answer.of_runs if answer and found and found.timed_in_turn and not each.found else None
    best = as_it_was or best  # of two paces nothing can be divided
    told = "confirmed" if best is None else _against(best, each.interval, result, each.key)
    return f"{told}{_then_took(as_it_was, each.key)}" if as_it_was else told


def _then_took(as_it_was: Interval, key: str) -> str:
    """What is divided by, where the table shows what it would be on an idle machine."""
    took = duration(as_it_was.median) if key == SECONDS else f"{number(as_it_was.median)} J"
    return f": on the busy machine, where the recommended took {took}"


def _against(best: Interval, other: Interval, result: Document, key: str) -> str:
    if best.low <= other.high and other.low <= best.high:
        return "no better beyond noise"
    if (other.median < best.median) is least_is_best(result, key):
        return "ahead on these seeds alone"
    if key not in _TIMES or best.median <= 0:
        return "worse"
    return _times(other.median / best.median, key, at_least=other.at_least)


def _times(ratio: float, key: str, *, at_least: bool) -> str:
    return f"{'at least ' if at_least else ''}{number(ratio, 2)} {_TIMES[key]}"

"""What a trial comes to: what it cost, its score, and how sure a median over a few seeds is."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from batchtune.document import Configuration, CurvePoint, Interval, Trial, by_configuration, config_of
from batchtune.vocabulary import FAILED, Goal, Kind

IN_REACH = 1.5  # times the least expected cost: fresh seeds may still show that this is the better one
WORTHLESS = {"diverged", *FAILED}  # whatever their metric was before
Expected = Mapping[Configuration, float]  # logarithm of what a configuration costs on average, by all runs together
CONFIDENCE = 0.9
STEADY = 1.05  # times as long, or less, is no sign of other programs
_LEAST = 1e-9  # what has a logarithm
_PACES_APART = 0.1  # standard error of the logarithm of a ratio; that of a few seeds is about as large


@dataclass(frozen=True, slots=True)
class Cost:
    """A quantity that grows along a run, of which a study wants the least until the target.

    Attributes:
        field: of a curve's point.
        attribute: of a trial that reached the target: what it took.
        adverb: how something that costs less gets to the target.
        gain: of a recommendation: how much less it costs than the baseline.
        step: what one of the whole-numbered steps is worth at which a trial reports to Optuna.
    """

    field: Literal["seconds", "joules"]
    attribute: Literal["time_to_target_seconds", "energy_to_target_joules"]
    adverb: str
    gain: Literal["speedup_over_baseline", "energy_saving_over_baseline"]
    step: float

    def at(self, point: CurvePoint) -> float:
        """What the run had cost at a point of its curve."""
        value: float | None = getattr(point, self.field)
        return value or 0.0

    def of(self, trial: Trial) -> float | None:
        """What the target cost a trial; None where it did not get there."""
        value: float | None = getattr(trial, self.attribute)
        return value

    def spent(self, trial: Trial) -> float | None:
        """What a trial cost in all."""
        return self.at(trial.curve[-1]) if trial.curve else None if self.field == "joules" else trial.training_seconds


SECONDS = Cost("seconds", "time_to_target_seconds", "fast", "speedup_over_baseline", step=1e-3)
JOULES = Cost("joules", "energy_to_target_joules", "sparingly, in joules,", "energy_saving_over_baseline", step=1.0)


def cost_of(kind: Kind) -> Cost | None:
    """What an objective counts; None for the best metric, which has no target."""
    return {"time_to_target": SECONDS, "energy_to_target": JOULES, "best_metric": None}[kind]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the trials of an objective compare: lower is better.

    Attributes:
        kind: the objective: what the target costs, or the metric itself.
        goal: the direction of the metric.
        expected: what each configuration costs by all runs together; None: each run counts as it was.
    """

    kind: Kind
    goal: Goal
    expected: Expected | None = None

    @property
    def cost(self) -> Cost | None:
        """What the target costs; None where there is no target."""
        return cost_of(self.kind)

    def of(self, trial: Trial) -> float | None:
        """A trial's result; None where it has none."""
        if self.cost is not None:
            return self.cost.of(trial)
        if trial.value is None or trial.outcome in WORTHLESS:
            return None
        return trial.value if self.goal == "minimize" else -trial.value

    def worth(self, trial: Trial) -> float:
        """What orders configurations: what all runs tell of this one, or else its own run's score."""
        if self.expected is not None:
            return self.expected.get(config_of(trial), math.inf)
        value = self.of(trial)
        return math.inf if value is None else value

    def missed(self, group: Iterable[Trial]) -> int:
        """How many of these runs came to no result."""
        return sum(1 for trial in group if self.of(trial) is None)

    def refused(self, group: Sequence[Trial]) -> bool:
        """Whether so many of a configuration's runs on fresh seeds came to no result that it is no answer."""
        return bool(group) and 2 * self.missed(group) >= len(group)


def baseline_run(trials: Sequence[Trial]) -> Trial | None:
    """The baseline's run: the first that was not cut off or lost, of which not all is known."""
    runs = [trial for trial in trials if trial.role == "baseline"]
    return next((run for run in runs if run.is_over), runs[0] if runs else None)


def finalists(trials: Sequence[Trial], *, kind: Kind, goal: Goal, expected: Expected | None = None) -> list[Trial]:
    """The configurations of the search, the best first and the baseline's own left out; see `recommend`.

    Where all runs together tell what each takes, the best of every batch size within `IN_REACH` comes first: learning
    rates next to one another at the same size are nearly the same answer, and to confirm both tells little.
    """
    scoring = Scoring(kind, goal, expected)
    whole = baseline_run(trials)
    base = config_of(whole) if whole else None
    ended = (trial for trial in trials if trial.role == "search" and trial.state == "complete")
    groups = by_configuration(trial for trial in ended if scoring.of(trial) is not None)
    best = [min(each, key=lambda run: scoring.of(run) or 0.0) for config, each in groups.items() if config != base]
    ranked = sorted(best, key=scoring.worth)
    if expected is None:
        return ranked
    near = [trial for trial in ranked if scoring.worth(trial) <= scoring.worth(ranked[0]) + math.log(IN_REACH)]
    leaders = {trial.batch_size: trial.number for trial in reversed(near)}.values()
    return sorted(ranked, key=lambda trial: (trial.number not in leaders, scoring.worth(trial)))


def slowdown(trials: Sequence[Trial]) -> float:
    """How many times as long training took as it counts, since other programs slowed it down."""
    counted = sum(each.training_seconds or 0.0 for each in trials)
    took = sum(each.measured_training_seconds or each.training_seconds or 0.0 for each in trials)
    return took / counted if counted else 1.0


def is_disturbed(trials: Sequence[Trial]) -> bool:
    """Whether other programs had a part in how long runs took, such that their steps alone tell how they compare.

    By their clocks, or as equal steps took unlike long; not where the starts of epochs, which are no steps, take part.
    """
    if sum(each.starting_seconds or 0.0 for each in trials) > (STEADY - 1) * sum(
        each.training_seconds or 0.0 for each in trials
    ):
        return False
    paces = defaultdict[Configuration, list[float]](list)
    for trial in trials:
        seconds, last = trial.measured_training_seconds or trial.training_seconds, trial.curve[-1:]
        if seconds and last and last[0].samples:
            paces[config_of(trial)].append(seconds / last[0].samples)
    return slowdown(trials) > STEADY or any(max(each) > STEADY * min(each) for each in paces.values())


def comparable_paces(rounds: Sequence[Sequence[float]], known: Sequence[float | None]) -> list[float] | None:
    """Seconds of a step of several configurations that compare with one another, of steps that were timed in turn.

    The quieter half of the rounds counts. Where runs have shown that the machine can be faster, all are as much faster:
    by the one of which that is known best. None where even those rounds disagree about how the configurations compare:
    an interval over seeds does not have that error.

    Args:
        rounds: seconds of a step of each.
        known: seconds of a step of each in its runs; None where none ran.
    """
    least = [min(each) for each in zip(*rounds, strict=True)]
    noise = [sum(taken / best for taken, best in zip(each, least, strict=True)) for each in rounds]
    quiet = [rounds[index] for index in sorted(range(len(rounds)), key=noise.__getitem__)[: -(-len(rounds) // 2)]]
    for times in zip(*quiet, strict=True):
        ratios = [math.log(own / last) for own, (*_, last) in zip(times, quiet, strict=True)]
        if statistics.stdev(ratios) / math.sqrt(len(ratios)) > _PACES_APART:
            return None
    paces = [statistics.fmean(each) for each in zip(*quiet, strict=True)]
    faster = [before / now for before, now in zip(known, paces, strict=True) if before is not None]
    return [min([1.0, *faster]) * each for each in paces]


def at_pace(trial: Trial, step_seconds: float) -> Trial:
    """The trial as if each of its optimizer steps had taken so long."""
    curve = [replace(at, seconds=at.samples / trial.batch_size * step_seconds) for at in trial.curve]
    changes: dict[str, object] = {"curve": curve}
    if curve:
        changes |= {"training_seconds": curve[-1].seconds, "measured_training_seconds": None}
    if trial.samples_to_target is not None:
        changes[SECONDS.attribute] = trial.samples_to_target / trial.batch_size * step_seconds
    return trial.model_copy(update=changes)


def median_interval(values: Sequence[float]) -> Interval:
    """The median of a few runs with its interval; of times by their logarithms, as in `ratio_interval`."""
    median = statistics.median(values)
    if min(values) <= 0:  # a metric that is maximized, or has no logarithm
        return _interval(median, statistics.fmean(values), _half_width(values))
    logs = [math.log(each) for each in values]
    return _interval(median, statistics.fmean(logs), _half_width(logs), math.exp)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The ratio of two medians with its interval; seeds differ by factors, so that logarithms are what is compared."""
    left, right = ([math.log(max(each, _LEAST)) for each in values] for values in (numerators, denominators))
    median = statistics.median(numerators) / max(statistics.median(denominators), _LEAST)
    return _interval(median, statistics.fmean(left) - statistics.fmean(right), _half_width(left, right), math.exp)


def difference_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """By how much one median exceeds another, with its interval."""
    median = statistics.median(values) - statistics.median(others)
    return _interval(median, statistics.fmean(values) - statistics.fmean(others), _half_width(values, others))


def _half_width(*sides: Sequence[float]) -> float:
    """Half of the interval for a mean, or for the difference of two whose runs need not vary alike (Welch 1947).

    To resample so few values says too little of how they vary where one side's do so more than the other's, and so does
    to pool them: `tests/benchmarks/interval_coverage.py`. A side of one run is taken to vary as the other does.
    """
    known = [(statistics.variance(each), len(each) - 1) for each in sides if len(each) > 1]
    if not known:
        return 0.0  # two single runs tell nothing of that
    spreads = [(statistics.variance(each), len(each) - 1) if len(each) > 1 else max(known) for each in sides]
    errors = [(variance / len(each), free) for (variance, free), each in zip(spreads, sides, strict=True)]
    squared = sum(error for error, _ in errors)
    if not squared:
        return 0.0
    return _student(squared**2 / sum(error**2 / free for error, free in errors)) * math.sqrt(squared)


def _student(freedom: float) -> float:
    """Student's t beyond which lies half of what `CONFIDENCE` leaves.

    By Wallace 1959: at 2, 3 and 4 degrees of freedom 1.8, 0.5 and 0.2 % more than it is, never less.
    """
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(normal**2 / freedom))


def _interval(median: float, centre: float, half: float, shown: Callable[[float], float] = float) -> Interval:
    low, high = (median, median) if not half else (shown(centre - half), shown(centre + half))
    return Interval(median=median, low=min(median, low), high=max(median, high))

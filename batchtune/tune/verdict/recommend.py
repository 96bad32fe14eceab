"""From trials to a recommendation: the finalists, the winner among them, and an honest sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from batchtune.document import GradientClipping, Interval, Recommendation, Trial, Value
from batchtune.tune.objective.cost import JOULES, SECONDS, Cost, cost_of
from batchtune.tune.objective.records import FAILED, FAILED_FOR_GOOD
from batchtune.tune.verdict.intervals import CONFIDENCE, difference_interval, median_interval, ratio_interval
from batchtune.vocabulary import Goal, Kind

LEVEL = 1.02  # closer than this nothing is a difference
TIED = 1.05  # a few seeds overlap far beyond what a user would call the same; more than this is a difference
FEWEST_SEEDS = 3  # of either side, below which nothing is said of how much better one is
IN_REACH = 1.5  # times the least expected cost: fresh seeds may still show that this is the better one
_WORTHLESS = {"diverged", *FAILED}  # whatever their metric was before
Configuration = tuple[int, float, str, tuple[tuple[str, Value], ...], GradientClipping | None]
Expected = Mapping[Configuration, float]  # logarithm of what a configuration costs on average, by all runs together


def config_of(trial: Trial) -> Configuration:
    """What makes two trials the same configuration, whatever their seed."""
    arguments = tuple(sorted(trial.optimizer_arguments.items()))
    return trial.batch_size, trial.learning_rate, trial.precision, arguments, trial.gradient_clipping


def score(trial: Trial, *, kind: Kind, goal: Goal) -> float | None:
    """A trial's result, lower is better; None where it has none.

    Args:
        trial: a finished trial.
        kind: the objective: what the target costs, or the metric itself.
        goal: the direction of the metric.
    """
    cost = cost_of(kind)
    if cost is not None:
        return cost.of(trial)
    if trial.value is None or trial.outcome in _WORTHLESS:
        return None
    return trial.value if goal == "minimize" else -trial.value


def finalists(
    trials: Sequence[Trial], top: int, *, kind: Kind, goal: Goal, expected: Expected | None = None
) -> list[Trial]:
    """The best `top` configurations of the search, the baseline's own left out; see `recommend`.

    Where all runs together tell what each takes, the best of every batch size within `IN_REACH` comes first: learning
    rates next to one another at the same size are nearly the same answer, and to confirm both tells little.
    """
    base = next((config_of(trial) for trial in trials if trial.role == "baseline"), None)
    best: dict[Configuration, Trial] = {}
    for trial in trials:
        value = score(trial, kind=kind, goal=goal)
        if trial.role != "search" or trial.state != "complete" or value is None or config_of(trial) == base:
            continue
        held = best.get(config_of(trial))
        if held is None or value < (score(held, kind=kind, goal=goal) or 0.0):
            best[config_of(trial)] = trial
    ranked = sorted(best.values(), key=lambda trial: _worth(trial, expected, kind=kind, goal=goal))
    if expected is None:
        return ranked[:top]
    worth = {trial.number: _worth(trial, expected, kind=kind, goal=goal) for trial in ranked}
    near = [trial for trial in ranked if worth[trial.number] <= worth[ranked[0].number] + math.log(IN_REACH)]
    leaders = {trial.batch_size: trial.number for trial in reversed(near)}.values()
    return sorted(ranked, key=lambda trial: (trial.number not in leaders, worth[trial.number]))[:top]


def _worth(trial: Trial, expected: Expected | None, *, kind: Kind, goal: Goal) -> float:
    """What orders configurations, lower is better: what all runs tell of this one, or else its own run's score."""
    if expected is not None:
        return expected.get(config_of(trial), math.inf)
    value = score(trial, kind=kind, goal=goal)
    return math.inf if value is None else value


def recommend(
    trials: Sequence[Trial], *, kind: Kind, goal: Goal, expected: Expected | None = None
) -> tuple[Recommendation | None, Recommendation | None]:
    """The recommendation and the baseline, from confirmation runs where there are any.

    The figures are those of fresh seeds. Which configuration is the best is told by all runs together where `expected`
    has that, since three seeds cannot tell two good ones apart, and otherwise by the median of the fresh seeds. Of
    those that are level the one with the smallest batch is taken. One that beats the baseline beyond noise goes before
    one that does not, one that came to a result on all of its fresh seeds before one that did not, and one that did so
    on half of them or fewer is out. Where none beats the baseline, that is recommended, and the reason says so.

    Returns:
        (recommendation, baseline); the first is None where no run was usable, the second where none was confirmed.
    """
    today = next((trial for trial in trials if trial.role == "baseline"), None)
    base = config_of(today) if today is not None else None
    groups: dict[Configuration, list[Trial]] = {}
    for trial in trials:
        failed = trial.outcome in FAILED_FOR_GOOD
        if trial.role == "confirm" and (trial.state in {"complete", "pruned"} or failed):
            group = groups.setdefault(config_of(trial), [])
            if not failed or config_of(trial) != base:  # what the baseline failed at is run again
                group.append(trial)
    if base not in groups or len(groups) < 2:  # noqa: PLR2004 - nothing to compare with
        return _unconfirmed(trials, kind=kind, goal=goal, expected=expected), None
    scores = {base: _baseline_scores(groups[base], kind=kind, goal=goal)}
    contenders = [config for config in groups if config != base]
    for config in contenders:
        scores[config] = _contender_scores(groups[config], scores[base], kind=kind, goal=goal)
    usable = {config: scores[config] for config in contenders if scores[config]}
    if not usable and not scores[base]:
        return _unconfirmed(trials, kind=kind, goal=goal, expected=expected), None
    if not usable:
        reason = "no other configuration came to a result on most of its fresh seeds"
        return _of(groups[base], scores[base], kind=kind, goal=goal, reason=reason), None
    held = {config: usable[config] for config in usable if _missed(groups[config], kind=kind, goal=goal) == 0}
    ours = scores[base]
    better = {config: each for config, each in usable.items() if ours and _beats(each, ours, kind)}
    both = {config: each for config, each in better.items() if config in held}
    ahead = both or better
    winner = _winner(ahead or held or usable, expected) if ahead or not ours else _best(held or usable, expected)
    baseline = (
        _of(groups[base], scores[base], kind=kind, goal=goal, reason="what you run today") if scores[base] else None
    )
    if not scores[base]:
        reason = "the baseline diverged or failed on fresh seeds, so there is no speed-up to give"
        return _of(groups[winner], usable[winner], kind=kind, goal=goal, reason=reason), None
    return _verdict(groups, scores, winner, base, today=today, kind=kind, goal=goal), baseline


def _best(usable: Mapping[Configuration, Sequence[float]], expected: Expected | None) -> Configuration:
    if expected is not None and all(config in expected for config in usable):
        return min(usable, key=lambda config: expected[config])
    return min(usable, key=lambda config: statistics.median(usable[config]))


def _winner(usable: Mapping[Configuration, Sequence[float]], expected: Expected | None) -> Configuration:
    """The best of the confirmed configurations; of those that are level the one with the smallest batch."""
    best = _best(usable, expected)
    if expected is not None and all(config in expected for config in usable):
        level = [config for config in usable if expected[config] <= expected[best] + math.log(LEVEL)]
        return min(level, key=lambda config: (config[0], expected[config]))
    ties = [config for config in usable if _tied(usable[config], usable[best])]
    return min(ties, key=lambda config: (config[0], statistics.median(usable[config])))


def _beats(contender: Sequence[float], baseline: Sequence[float], kind: Kind) -> bool:
    """Whether a contender is better beyond noise: the interval says so, or with a single run of either `TIED`."""
    single = min(len(contender), len(baseline)) == 1  # two single runs differ by chance
    if cost_of(kind) is not None:
        return ratio_interval(baseline, contender).low > (TIED if single else 1.0)
    least = (TIED - 1) * abs(statistics.median(baseline)) if single else 0.0
    return difference_interval(baseline, contender).low > least


def _verdict(
    groups: dict[Configuration, list[Trial]],
    scores: dict[Configuration, list[float]],
    winner: Configuration,
    base: Configuration | None,
    *,
    today: Trial | None,
    kind: Kind,
    goal: Goal,
) -> Recommendation:
    assert base is not None  # noqa: S101 - the caller has its runs
    theirs, ours, cost = scores[winner], scores[base], cost_of(kind)
    gain = None if cost is None else ratio_interval(ours, theirs)
    missed, lost = _missed(groups[winner], kind=kind, goal=goal), len(groups[base]) - len(ours)
    but = f"; {missed} of its {len(theirs)} runs came to no result" if missed else ""
    but += f"; the baseline diverged on {lost} more" if lost else ""
    seeds = f"{len(theirs)} fresh seed{'s' if len(theirs) > 1 else ''}"
    over = f"over {seeds} each" if len(theirs) == len(ours) else f"over {seeds}, baseline {len(ours)}"
    is_better = _beats(theirs, ours, kind)
    if min(len(theirs), len(ours)) < FEWEST_SEEDS:
        so_far = "" if is_better else ", and so far no better than what you run today"
        reason = f"not confirmed{so_far}: {over.removeprefix('over ')}; to compare takes {FEWEST_SEEDS} of each{but}"
        taken, values = (winner, theirs) if is_better else (base, ours)
        found = _of(groups[taken], values, kind=kind, goal=goal, reason=reason)
        return found.model_copy(update={"seeds_to_confirm": FEWEST_SEEDS + max(missed, lost)})
    if cost is None or gain is None:
        sign = 1 if goal == "minimize" else -1
        best, today_s = (sign * statistics.median(each) for each in (theirs, ours))
        told = f"{best:.4g} against {today_s:.4g} of the baseline, median {over}{but}"
    elif cut := sum(1 for trial in groups[base] if cost.of(trial) is None and trial.outcome not in _WORTHLESS):
        gain = gain.model_copy(update={"at_least": True})
        whole = _whole(today, theirs, cost)
        told = f"at least {gain.low:.2f} times as {cost.adverb} as the baseline"
        where = "" if cut == len(ours) else f"{cut} of "
        told += f" ({over.removeprefix('over ')}, on {where}which the baseline was cut off{whole}{but})"
    else:
        interval = f"{CONFIDENCE:.0%} interval {gain.low:.2f} to {gain.high:.2f} {over}"
        told = f"{gain.median:.2f} times as {cost.adverb} as the baseline ({interval}{but})"
    if not is_better:
        came = "got there" if cost else "came to"
        gained = "speed-up" if kind == "time_to_target" else "improvement"
        reason = f"no significant {gained} over the baseline; the best candidate {came} {told}"
        return _of(groups[base], ours, kind=kind, goal=goal, reason=reason)
    reason = f"reaches the target {told}" if cost else f"comes to {told}"
    found = _of(groups[winner], theirs, kind=kind, goal=goal, reason=reason)
    return found.model_copy(update={cost.gain: gain}) if cost else found


def _whole(today: Trial | None, winner: Sequence[float], cost: Cost) -> str:
    """What the baseline's one whole run says beyond those that were cut off."""
    whole = cost.of(today) if today is not None else None
    if whole:
        return f"; its one whole run took {whole / statistics.median(winner):.1f} times as much"
    given = cost.spent(today) if today is not None and today.outcome == "finished" else None
    if not given:
        return ""
    return f"; its one whole run had not got there after {given / statistics.median(winner):.1f} times as much"


def _missed(group: Sequence[Trial], *, kind: Kind, goal: Goal) -> int:
    """How many of a configuration's runs came to no result."""
    return sum(1 for trial in group if score(trial, kind=kind, goal=goal) is None)


def _baseline_scores(group: Sequence[Trial], *, kind: Kind, goal: Goal) -> list[float]:
    """Scores of the baseline's runs; one that missed the target counts with what it was given: a lower bound.

    One that diverged has none: how soon it did says nothing of how long it would take.
    """
    cost = cost_of(kind)
    values = [score(trial, kind=kind, goal=goal) for trial in group]
    if cost is not None:
        ran = [cost.spent(trial) if trial.outcome not in _WORTHLESS else None for trial in group]
        values = [given if value is None else value for given, value in zip(ran, values, strict=True)]
    return [value for value in values if value is not None]


def _contender_scores(group: Sequence[Trial], baseline: Sequence[float], *, kind: Kind, goal: Goal) -> list[float]:
    """Scores of a contender's runs; none where half of them or more came to no result.

    Fewer may miss the target, diverge or fail: each then counts as no better than the baseline's worst run.
    """
    if 2 * _missed(group, kind=kind, goal=goal) >= len(group):
        return []
    found = [score(trial, kind=kind, goal=goal) for trial in group]
    cost = cost_of(kind)
    spent = [cost.spent(trial) for trial in group] if cost else []
    worst = max(value for value in (*baseline, *found, *spent) if value is not None)
    return [worst if value is None else value for value in found]


def _tied(left: Sequence[float], right: Sequence[float]) -> bool:
    """Whether a configuration is level with the best: 2 % apart, or `TIED` and the ratio's interval includes 1.

    Where values are not all positive: `TIED` apart and within the best one's runs.
    """
    if any(value <= 0 for value in (*left, *right)):  # a metric that has no ratios, or is maximized
        apart = statistics.median(left) - statistics.median(right)
        return statistics.median(left) <= max(right) and apart <= (TIED - 1) * abs(statistics.median(right))
    ratio = ratio_interval(left, right)
    return ratio.median < LEVEL or (ratio.median <= TIED and ratio.low <= 1.0)


def _unconfirmed(
    trials: Sequence[Trial], *, kind: Kind, goal: Goal, expected: Expected | None
) -> Recommendation | None:
    """The best configuration of search or baseline, said to be just that."""
    runs = [trial for trial in trials if trial.role != "confirm" and score(trial, kind=kind, goal=goal) is not None]
    if not runs:
        return None
    best = min(runs, key=lambda trial: _worth(trial, expected, kind=kind, goal=goal))
    group = [trial for trial in runs if config_of(trial) == config_of(best)]
    values = [value for trial in group if (value := score(trial, kind=kind, goal=goal)) is not None]
    count = f"best of {len(runs)} single runs" if len(runs) > 1 else "the only run that came to a result"
    count += ", and what you run today" if best.role == "baseline" else ""
    reason = f"{count}, not confirmed on fresh seeds"
    needed = FEWEST_SEEDS if any(trial.role == "search" for trial in runs) else None
    found = _of(group, values, kind=kind, goal=goal, reason=reason)
    return found.model_copy(update={"seeds_to_confirm": needed})


def _of(group: Sequence[Trial], values: Sequence[float], *, kind: Kind, goal: Goal, reason: str) -> Recommendation:
    trained = [trial for trial in group if trial.state != "fail"] or group
    first = min(trained, key=lambda trial: trial.micro_batch_size or trial.batch_size)  # a larger one may have failed
    interval = median_interval(values) if values else None
    cost = cost_of(kind)
    if interval is not None and cost is not None and any(cost.of(trial) is None for trial in group):
        interval = interval.model_copy(update={"at_least": True})
    if interval is not None and cost is None and goal == "maximize":
        interval = Interval(median=-interval.median, low=-interval.high, high=-interval.low)
    return Recommendation(
        micro_batch_size=first.micro_batch_size or first.batch_size,
        gradient_accumulation_steps=first.gradient_accumulation_steps or 1,
        global_batch_size=first.batch_size,
        learning_rate=first.learning_rate,
        precision=first.precision,
        optimizer_arguments=first.optimizer_arguments,
        optimizer=first.optimizer,
        gradient_clipping=first.gradient_clipping,
        total_steps=first.total_steps,
        time_to_target_seconds=interval if cost is SECONDS else _other(group, SECONDS),
        energy_to_target_joules=interval if cost is JOULES else _other(group, JOULES),
        value=interval if cost is None else None,
        reason=reason,
    )


def _other(group: Sequence[Trial], cost: Cost) -> Interval | None:
    """What is not the objective, where every run has it."""
    costs = [found for trial in group if (found := cost.of(trial)) is not None]
    return median_interval(costs) if len(costs) == len(group) else None

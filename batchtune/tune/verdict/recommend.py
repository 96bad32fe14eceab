"""From trials to a recommendation: the winner among the finalists, and an honest sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from batchtune.document import Configuration, Interval, Recommendation, Trial, by_configuration, config_of
from batchtune.tune.verdict.scores import (
    CONFIDENCE,
    JOULES,
    SECONDS,
    WORTHLESS,
    Cost,
    Expected,
    Scoring,
    baseline_run,
    difference_interval,
    median_interval,
    ratio_interval,
    slowdown,
)
from batchtune.units import counted
from batchtune.vocabulary import FAILED_FOR_GOOD, Goal, Kind

LEVEL = 1.02  # closer than this nothing is a difference
TIED = 1.05  # a few seeds overlap far beyond what a user would call the same; more than this is a difference
MOST_MORE = 4  # times as many seeds: with more than that, what is so hard to tell is hardly a difference
FEWEST_SEEDS = 3  # of either side, below which nothing is said of how much better one is


def recommend(
    trials: Sequence[Trial], *, kind: Kind, goal: Goal, expected: Expected | None = None
) -> tuple[Recommendation | None, Recommendation | None]:
    """The recommendation and the baseline, from confirmation runs where there are any.

    The figures are those of fresh seeds. Which configuration is the best is told by all runs together where `expected`
    has that, since three seeds cannot tell two good ones apart, and otherwise by the median of the fresh seeds. Of
    those that are level the one with the smallest batch is taken. One that beats the baseline beyond noise goes before
    one that does not, one that came to a result on all of its fresh seeds before one that did not, and one that did so
    on half of them or fewer is out; so is one that ran on fewer seeds than the baseline, if another did not. Where none
    beats the baseline, that is recommended, and the reason says so.

    Returns:
        (recommendation, baseline); the first is None where no run was usable, the second where none was confirmed.
    """
    scoring = Scoring(kind, goal, expected)
    whole = baseline_run(trials)
    base = config_of(whole) if whole is not None else None
    groups = _confirmed(trials, base)
    if base not in groups or len(groups) < 2:  # noqa: PLR2004 - nothing to compare with
        return _unconfirmed(trials, groups, scoring), None
    ours = _baseline_scores(groups[base], scoring)
    contenders = {config: group for config, group in groups.items() if config != base}
    usable = {config: each for config, group in contenders.items() if (each := _scores(group, ours, scoring))}
    enough = min(len(groups[base]), max(map(len, usable.values()), default=0))
    usable = {config: each for config, each in usable.items() if len(each) >= enough}
    if not usable and not ours:
        return _unconfirmed(trials, groups, scoring), None
    if not usable:
        reason = "no other configuration came to a result on most of its fresh seeds"
        return _of(groups[base], ours, scoring, reason), None
    held = {config: each for config, each in usable.items() if not scoring.missed(groups[config])}
    better = {config: each for config, each in usable.items() if ours and _beats(each, ours, scoring.cost)}
    ahead = {config: each for config, each in better.items() if config in held} or better
    winner = _winner(ahead or held or usable, scoring, takes_smallest=bool(ahead) or not ours)
    if not ours:
        reason = "the baseline diverged or failed on fresh seeds, so there is no speed-up to give"
        return _of(groups[winner], usable[winner], scoring, reason), None
    found = _verdict(groups[winner], groups[base], usable[winner], ours, scoring, whole)
    return found, _of(groups[base], ours, scoring, "what you run today")


def _confirmed(trials: Sequence[Trial], base: Configuration | None) -> dict[Configuration, list[Trial]]:
    """The runs on fresh seeds by configuration; what the baseline failed at does not count, and is run again."""
    groups = by_configuration(trial for trial in trials if trial.tells_of_fresh_seed)
    if base is not None and base in groups:
        groups[base] = [trial for trial in groups[base] if trial.outcome not in FAILED_FOR_GOOD]
    return groups


def _winner(
    usable: Mapping[Configuration, Sequence[float]], scoring: Scoring, *, takes_smallest: bool
) -> Configuration:
    """The best of the confirmed configurations, or of those that are level with it the one with the smallest batch."""
    told = scoring.expected if scoring.expected and usable.keys() <= scoring.expected.keys() else None
    worth = told or {config: statistics.median(each) for config, each in usable.items()}
    best = min(usable, key=worth.__getitem__)
    if not takes_smallest:
        return best

    def is_level(config: Configuration) -> bool:
        return worth[config] <= worth[best] + math.log(LEVEL) if told else _tied(usable[config], usable[best])

    return min(filter(is_level, usable), key=lambda config: (config[0], worth[config]))


def _beats(contender: Sequence[float], baseline: Sequence[float], cost: Cost | None) -> bool:
    """Whether a contender is better beyond noise: the interval says so, or with a single run of either `TIED`."""
    single = min(len(contender), len(baseline)) == 1  # two single runs differ by chance
    if cost is not None:
        return ratio_interval(baseline, contender).low > (TIED if single else 1.0)
    least = (TIED - 1) * abs(statistics.median(baseline)) if single else 0.0
    return difference_interval(baseline, contender).low > least


def _verdict(
    winners: Sequence[Trial],
    baselines: Sequence[Trial],
    theirs: Sequence[float],
    ours: Sequence[float],
    scoring: Scoring,
    whole: Trial | None,
) -> Recommendation:
    """What the winner's fresh seeds against the baseline's come to; `whole` is the baseline's one whole run."""
    cost, is_better = scoring.cost, _beats(theirs, ours, scoring.cost)
    missed, lost = scoring.missed(winners), len(baselines) - len(ours)
    but = f"; {missed} of its {len(theirs)} runs came to no result" if missed else ""
    but += f"; the baseline diverged on {lost} more" if lost else ""
    seeds = f"{len(theirs)} fresh seed{'s' if len(theirs) > 1 else ''}"
    seeds += " each" if len(theirs) == len(ours) else f", baseline {len(ours)}"
    if min(len(theirs), len(ours)) < FEWEST_SEEDS:
        so_far = "" if is_better else ", and so far no better than what you run today"
        reason = f"not confirmed{so_far}: {seeds}; to compare takes {FEWEST_SEEDS} of each{but}"
        taken, values = (winners, theirs) if is_better else (baselines, ours)
        wanted = FEWEST_SEEDS + max(missed, lost)
        return _of(taken, values, scoring, reason).model_copy(update={"seeds_to_confirm": wanted})
    gain = None if cost is None else ratio_interval(ours, theirs)
    if cost is None or gain is None:
        sign = 1 if scoring.goal == "minimize" else -1
        best, baseline = (sign * statistics.median(each) for each in (theirs, ours))
        told = f"{best:.4g} against {baseline:.4g} of the baseline, median over {seeds}{but}"
    elif cut := sum(1 for trial in baselines if cost.of(trial) is None and trial.outcome not in WORTHLESS):
        gain = gain.model_copy(update={"at_least": True})
        where = "" if cut == len(ours) else f"{cut} of "
        told = f"at least {gain.low:.2f} times as {cost.adverb} as the baseline"
        told += f" ({CONFIDENCE:.0%} interval from there up over {seeds}, on {where}which the baseline was cut off"
        told += f"{_whole(whole, theirs, cost, gain.low)}{but})"
    else:
        interval = f"{CONFIDENCE:.0%} interval {gain.low:.2f} to {gain.high:.2f} over {seeds}"
        told = f"{gain.median:.2f} times as {cost.adverb} as the baseline ({interval}{but})"
    if is_better:
        found = _of(winners, theirs, scoring, f"reaches the target {told}" if cost else f"comes to {told}")
        return found.model_copy(update={cost.gain: gain}) if cost else found
    gained = "speed-up" if scoring.kind == "time_to_target" else "improvement"
    came = "got there" if cost else "came to"
    reason = f"no significant {gained} over the baseline; the best candidate {came} {told}"
    more, hint = None, ""
    if gain is not None and not missed:
        more, hint = _what_would_tell(gain, min(len(theirs), len(ours)), slowdown([*winners, *baselines]))
    return _of(baselines, ours, scoring, reason + hint).model_copy(update={"seeds_to_confirm": more})


def seeds_to_tell(gain: Interval, seeds: int) -> int | None:
    """Fresh seeds of each after which a gain as large would be beyond noise, whose interval narrows with their root.

    None where they are out of reach, or the gain is none that a user would notice.
    """
    if gain.median <= TIED or gain.low >= 1:
        return None
    wanted = math.ceil(seeds * (math.log(gain.median / gain.low) / math.log(gain.median)) ** 2)
    return wanted if wanted <= MOST_MORE * seeds else None


def _what_would_tell(gain: Interval, seeds: int, slower: float) -> tuple[int | None, str]:
    """How many seeds of each may tell whether there is such a gain, and in words what may, where it is in doubt.

    An idle machine is a part of that where others made the runs take so many times longer.
    """
    more, took = seeds_to_tell(gain, seeds), f"these took {slower:.2g} times as long"
    if more is not None:
        idle = f", on an idle machine fewer ({took})" if slower > TIED else ""
        return more, f"; {more} seeds of each may tell{idle}"
    is_open = gain.low < 1 and gain.high > TIED
    return None, f"; on an idle machine it may show ({took})" if is_open and slower > TIED else ""


def _whole(baseline: Trial | None, winner: Sequence[float], cost: Cost, known: float) -> str:
    """What the baseline's one whole run says beyond those that were cut off; nothing where it was so much faster."""
    whole = None if baseline is None else cost.of(baseline)
    if whole and whole > known * statistics.median(winner):
        return f"; its one whole run took {whole / statistics.median(winner):.1f} times as much"
    given = cost.spent(baseline) if baseline is not None and baseline.outcome == "finished" else None
    if not given:
        return ""
    return f"; its one whole run had not got there after {given / statistics.median(winner):.1f} times as much"


def _baseline_scores(group: Sequence[Trial], scoring: Scoring) -> list[float]:
    """Scores of the baseline's runs; one that missed the target counts with what it was given: a lower bound.

    One that diverged has none: how soon it did says nothing of how long it would take.
    """
    values = [scoring.of(trial) for trial in group]
    if (cost := scoring.cost) is not None:
        ran = [cost.spent(trial) if trial.outcome not in WORTHLESS else None for trial in group]
        values = [given if value is None else value for given, value in zip(ran, values, strict=True)]
    return [value for value in values if value is not None]


def _scores(group: Sequence[Trial], baseline: Sequence[float], scoring: Scoring) -> list[float]:
    """Scores of a contender's runs; none where half of them or more came to no result.

    Fewer may miss the target, diverge or fail: each then counts as no better than the baseline's worst run.
    """
    if scoring.refused(group):
        return []
    found, cost = [scoring.of(trial) for trial in group], scoring.cost
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
    trials: Sequence[Trial], groups: Mapping[Configuration, Sequence[Trial]], scoring: Scoring
) -> Recommendation | None:
    """The best configuration of search or baseline that fresh seeds have not refuted, said to be just that.

    One that has run on a fresh seed goes before those that have not, and its figures are of that: the seed of the
    search may have been a lucky one for all. Nothing whose figures are worse, beyond noise, than those of what runs
    today, or of what has run on a fresh seed, is said to be better than that, whatever all runs together tell of it.
    """
    ended = [trial for trial in trials if trial.role != "confirm" or trial.tells_of_fresh_seed]
    known = [trial for trial in ended if scoring.of(trial) is not None]
    runs = [trial for trial in known if not scoring.refused(groups.get(config_of(trial), ()))]
    if not runs:
        return None
    by_config = by_configuration(runs)
    told = {each: [run for run in group if run.role == "confirm"] or group for each, group in by_config.items()}
    shown = {each: [value for run in of if (value := scoring.of(run)) is not None] for each, of in told.items()}
    ranked = sorted(by_config, key=lambda each: statistics.median(map(scoring.worth, by_config[each])))
    firm = [shown[config_of(run)] for run in runs if run.role in {"baseline", "confirm"}]
    least = min(firm, key=statistics.median, default=None)
    able = [each for each in ranked if least is None or _tied(shown[each], least)]
    roles = {each: {run.role for run in by_config[each]} for each in able}
    chosen = next((each for each in able if "confirm" in roles[each] and "baseline" not in roles[each]), able[0])
    fresh = groups.get(chosen, ())
    best = "best of" if scoring.expected is None else "best by all of"
    count = f"{best} {len(runs)} single runs" if len(runs) > 1 else "the only run that came to a result"
    count += ", and what you run today" if "baseline" in roles[chosen] else ""
    if ranked[0] != able[0]:
        count += ", leaving out what its own runs show to be worse"
    elif chosen != able[0]:
        count += ", leaving out what has run on no fresh seed"
    so_far = f": {counted(len(fresh), 'fresh seed')} so far" if fresh else " on fresh seeds"
    so_far += f", {missed} without a result" if (missed := scoring.missed(fresh)) else ""
    needed = FEWEST_SEEDS if any(trial.role == "search" for trial in runs) else None
    found = _of(told[chosen], shown[chosen], scoring, f"{count}, not confirmed{so_far}")
    return found.model_copy(update={"seeds_to_confirm": needed})


def _of(group: Sequence[Trial], values: Sequence[float], scoring: Scoring, reason: str) -> Recommendation:
    trained = [trial for trial in group if trial.state != "fail"] or group
    first = min(trained, key=lambda trial: trial.micro_batch_size or trial.batch_size)  # a larger one may have failed
    interval, cost = median_interval(values) if values else None, scoring.cost
    if interval is not None and cost is not None and any(cost.of(trial) is None for trial in group):
        interval = interval.model_copy(update={"at_least": True})
    if interval is not None and cost is None and scoring.goal == "maximize":
        interval = Interval(median=-interval.median, low=-interval.high, high=-interval.low)
    changes = {
        "micro_batch_size": first.micro_batch_size or first.batch_size,
        "gradient_accumulation_steps": first.gradient_accumulation_steps or 1,
        "world_size": first.world_size or 1,
        "global_batch_size": first.batch_size,
        "time_to_target_seconds": interval if cost is SECONDS else _other(group, SECONDS),
        "energy_to_target_joules": interval if cost is JOULES else _other(group, JOULES),
        "value": interval if cost is None else None,
        "reason": reason,
    }
    return Recommendation.model_validate(dict(first) | changes)  # what else it trained with has the same names


def _other(group: Sequence[Trial], cost: Cost) -> Interval | None:
    """What is not the objective, where every run has it."""
    costs = [found for trial in group if (found := cost.of(trial)) is not None]
    return median_interval(costs) if len(costs) == len(group) else None

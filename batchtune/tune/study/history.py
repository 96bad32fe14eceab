"""What the study's trials say so far, as the result document has them: best time, what is spent, the pace of steps."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from batchtune.document import CurvePoint, ThroughputFit, Trial, Value
from batchtune.protocol.messages import NO_VARIANT, Json, PaceKind, RunSpec, pace_kind
from batchtune.tune.optuna_parts.storages import params_of
from batchtune.tune.plan.prior import step_seconds
from batchtune.tune.plan.space import VARIANT
from batchtune.tune.verdict.scores import SECONDS, Cost
from batchtune.vocabulary import Variant

_OURS = {"batch_size", "learning_rate", "precision", "gradient_clipping", VARIANT}
CUT_OFF = {"cut_off": True, "message": "budget.total was used up"}
"""Attributes of a run that the end of the budget cut off: nothing that counts, so that it is to run again."""
INTERRUPTED = "interrupted before its end, so that the study runs it again"
"""The message of a run that came to no outcome, and of which nothing else is known."""
RAISED = "raised"  # attribute of a run: whether the user's code raised, which ends a study
SEEN = "seen_seconds"  # attribute of a run: for how long it was seen at work; `wall_seconds` is that of one that ended
Role = Literal["baseline", "search", "confirm"]
_RECENT = 200  # runs, that say how fast the machine is
_FASTEST, _ABOUT = 0.1, 1.15  # share of all steps that tell how fast the machine can be; times that, as steps vary
_KNOWN, _PREDICTED = 1.33, 2.0  # times as long as runs of its size had it, or as foretold by others, a step may take


def to_record(trial: FrozenTrial) -> Trial:
    """The result document's view of a trial of the study that is settled."""
    attributes: Json = trial.user_attrs
    params = params_of(trial)
    kept = {name: attributes[name] for name in attributes.keys() & Trial.model_fields.keys()}
    if attributes.get(RAISED):
        kept["outcome"] = "user_error"
    elif trial.state is TrialState.FAIL and "outcome" not in attributes:
        kept.setdefault("message", INTERRUPTED)
    if VARIANT in params:
        kept |= Variant.named(params[VARIANT])._asdict()
    own = {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "batch_size": int(params["batch_size"]),
        "learning_rate": float(params["learning_rate"]),
        "precision": str(params.get("precision", attributes.get("precision", "fp32"))),
        "optimizer_arguments": {name: value for name, value in params.items() if name not in _OURS},
        "seed": int(attributes.get("seed", 0)),
        "value": attributes.get("best_value"),
        "curve": to_curve(attributes.get("curve", [])),
    }
    return Trial.model_validate(kept | own)


def curve_attribute(curve: list[CurvePoint]) -> list[tuple[float | int | None, ...]]:
    """A curve as a trial's attribute keeps it: (seconds, samples, value), and joules and measured seconds if any."""
    rows = [(round(at.seconds, 6), at.samples, at.value, at.joules, at.measured_seconds) for at in curve]
    return [row if row[4] is not None else row[:4] if row[3] is not None else row[:3] for row in rows]


def to_curve(rows: list[tuple[Any, ...]]) -> list[CurvePoint]:
    """The curve that `curve_attribute` made rows of."""
    names = ("seconds", "samples", "value", "joules", "measured_seconds")
    return [CurvePoint(**dict(zip(names, row, strict=False))) for row in rows]


class StudyHistory:
    """Questions to the trials of one study, whose values are a `cost`, or those of the metric; it changes nothing."""

    def __init__(self, study: Study, cost: Cost | None) -> None:
        self._study, self._cost = study, cost
        self._ended: tuple[int, list[Trial]] = 0, []  # the first trials: their number, and the records among them

    def records(self) -> list[Trial]:
        """All trials, in the form of the result document; not those cut off before it was settled what to try."""
        # those ended change no more and are not looked at again: what a trial costs must not grow with their number
        number, ended = self._ended
        later = self._study.get_trials(deepcopy=False)[number:]
        over = next((index for index, trial in enumerate(later) if not trial.state.is_finished()), len(later))
        ended = [*ended, *_records(later[:over])]
        self._ended = number + over, ended
        return [*ended, *_records(later[over:])]

    def wall_seconds(self, role: Role | None = None) -> float:
        """Wall-clock time in which trials (of one role) ran, with evaluation; what ran at the same time counts once.

        Those under way do not count. Those that were interrupted do, for as long as they were seen at work.
        """
        spans = [_span(trial, self._cost or SECONDS) for trial in self._trials(role)]
        total = latest = 0.0
        for begin, end in sorted(span for span in spans if span is not None):
            total += max(0.0, end - max(begin, latest))
            latest = max(latest, end)
        return total

    @property
    def has_run(self) -> bool:
        """Whether a run has come to its end, of whatever kind."""
        return any("wall_seconds" in trial.user_attrs for trial in self._trials())

    def seconds_beside_training(self, role: Role | None = None) -> float:
        """What a run (of one role) takes besides training: evaluation above all; the median, 0 where nothing has run.

        Of runs that reached the target, where there are any: others end sooner, and are evaluated less often.
        """
        ran = [trial.user_attrs for trial in self._trials(role) if trial.state.is_finished()]
        ran = [run for run in ran if "wall_seconds" in run]
        whole = [run for run in ran if self._cost and run.get(self._cost.attribute) is not None]
        beside = [run["wall_seconds"] - run.get("training_seconds", 0.0) for run in whole or ran]
        return max(0.0, statistics.median(beside)) if beside else 0.0

    def finished(self, role: Role) -> list[FrozenTrial]:
        """Trials of a role that ran to an end that counts."""
        return self._trials(role, TrialState.COMPLETE, TrialState.PRUNED)

    def costs(self, role: Role | None = None) -> list[tuple[FrozenTrial, float]]:
        """The trials (of one role) that reached the target, each with what it cost; none where there is no target.

        Those that did not have a value, too, but that is their metric's: Optuna takes the last one they reported.
        """
        complete = self._trials(role, TrialState.COMPLETE) if self._cost else []
        return [(trial, trial.value) for trial in complete if trial.value is not None]

    def best_cost(self) -> float | None:
        """The least cost of the target so far; None where nothing got there, or there is no target."""
        return min((cost for _, cost in self.costs()), default=None)

    def best_seconds(self) -> float | None:
        """The shortest time to target so far; None where nothing got there, or there is no target."""
        times = (trial.time_to_target_seconds for trial in self.records())
        return min((value for value in times if value is not None), default=None)

    def total_steps(self, params: Mapping[str, Value]) -> int | None:
        """The horizon that an earlier run of this configuration gave to the user's scheduler; None: there is none."""
        same = (each.user_attrs for each in self._trials() if each.params == params)
        return next((each["total_steps"] for each in same if "total_steps" in each), None)

    def searched(self) -> int:
        """Runs of the search so far, failed ones included, so that a search in which all fail ends, too."""
        return sum(1 for trial in self.records() if trial.role == "search" and trial.outcome is not None)

    def last_outcome(self, role: Role) -> str | None:
        """How the latest run of a role ended; None where there was none."""
        outcomes = [trial.outcome for trial in self.records() if trial.role == role and trial.outcome is not None]
        return outcomes[-1] if outcomes else None

    def last_attributes(self, role: Role) -> Json:
        """What the study keeps of the latest run of a role that has ended; empty where there was none."""
        ended = self._trials(role, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return ended[-1].user_attrs if ended else {}

    def is_under_way(self, role: Role | None = None, *states: TrialState) -> bool:
        """Whether a trial (of one role) runs or is queued, or only the one of these states."""
        return bool(self._trials(role, *(states or (TrialState.RUNNING, TrialState.WAITING))))

    def _trials(self, role: Role | None = None, *states: TrialState) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False, states=states or None)
        return [trial for trial in trials if role in {None, trial.user_attrs.get("role", "search")}]

    def out_of_memory(self, precision: str, variant: Variant = NO_VARIANT) -> int | None:
        """The smallest micro-batch at which runs in this precision met the end of memory; None where none did.

        Those of another variant do not count. The probe measured one precision, and steps of another may
        take more. Sizes at which a run has come through, or at a larger one, do not count either: what was missing
        there was not the run's fault.
        """
        alike = [each for each in self.records() if (each.precision, each.variant) == (precision, variant)]
        came_through = max((each.micro_batch_size or 0 for each in alike if each.is_over), default=0)
        failed = [each.micro_batch_size or 0 for each in alike if each.outcome == "oom"]
        return min((size for size in failed if size > came_through), default=None)

    def paces(self, precision: str, kind: PaceKind | None = None, cost: Cost = SECONDS) -> dict[tuple[int, int], float]:
        """What an optimizer step costs, by micro-batch size and number of micro-batches, while nothing slows it down.

        Of ranks, the micro-batches of all together are one.

        Load only ever adds to a time: of the stretches between evaluations of recent runs, those count that are about
        as fast as the fastest tenth of them. Runs in another precision, or of another `pace_kind`, tell nothing;
        None: of any.
        """
        paces: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for trial in self.records()[-_RECENT:]:
            own = pace_kind(trial.optimizer_arguments, trial.variant)
            if trial.precision == precision and kind in {None, own}:
                paces[_shape(trial)] += _stretches(trial, cost)
        return {shape: _undisturbed(each) for shape, each in paces.items() if each}

    def pace(self, spec: RunSpec) -> float | None:
        """Seconds of an optimizer step of such runs while nothing slows them down; None where there were none."""
        known = self.paces(spec.precision, pace_kind(spec.optimizer_arguments, spec.variant))
        return known.get((spec.micro_batch_size, spec.accumulation_steps))

    def shares(self, paces: Mapping[tuple[int, int], float]) -> dict[int, float]:
        """What share of each trial's seconds its steps take at these paces, by number; 1 where it was no slower."""
        found = {}
        for trial in self.records():
            last, pace = trial.curve[-1] if trial.curve else None, paces.get(_shape(trial))
            if last is not None and last.samples and last.seconds and pace is not None:
                found[trial.number] = min(1.0, last.samples / trial.batch_size * pace / last.seconds)
        return found

    def most_step_seconds(self, spec: RunSpec, fit: ThroughputFit | None) -> float | None:
        """The most that an optimizer step of such a run takes: by recent ones, or predicted from other sizes.

        Predicted is the longer of two: the probe's fit, scaled as those runs were slower than it, and the step of the
        next smaller batch that ran, grown as the batch. For the fit does not know all that training does, and a run
        whose steps were predicted too short would count as shorter than it was.

        Returns:
            Seconds; None where nothing of this kind (see `pace_kind`) ran in this precision, or there is no fit.
        """
        known = self.paces(spec.precision, pace_kind(spec.optimizer_arguments, spec.variant))
        shape = spec.micro_batch_size * spec.world_size, spec.accumulation_steps
        if shape in known:
            return _KNOWN * known[shape]
        if fit is None or not known:
            return None

        def fitted(shape: tuple[int, int]) -> float:
            return shape[1] * max(step_seconds(fit, shape[0]), 1e-9)

        scaled = fitted(shape) * statistics.median(pace / fitted(each) for each, pace in known.items())
        smaller = [(math.prod(each), pace) for each, pace in known.items() if math.prod(each) < math.prod(shape)]
        size, pace = max(smaller, default=(1, 0.0))
        return _PREDICTED * max(scaled, math.prod(shape) / size * pace)


def _records(trials: Sequence[FrozenTrial]) -> list[Trial]:
    """Those of which it is known what they try; one that is cut off while the sampler proposes has no parameters."""
    return [to_record(each) for each in trials if {"batch_size", "learning_rate"} <= params_of(each).keys()]


def _span(trial: FrozenTrial, cost: Cost) -> tuple[float, float] | None:
    """When a trial began and ended, or was last seen, in seconds since 1970; None of one that is under way."""
    told = trial.user_attrs
    if trial.datetime_complete is not None and "wall_seconds" in told:
        end = trial.datetime_complete.timestamp()
        return end - told["wall_seconds"], end
    if trial.datetime_start is None or not (trial.state.is_finished() or "message" in told):
        return None
    begin, trained = trial.datetime_start.timestamp(), (trial.last_step or 0) * cost.step if cost is SECONDS else 0.0
    return begin, begin + max(told.get(SEEN, 0.0), trained)


def _shape(trial: Trial) -> tuple[int, int]:
    steps = trial.gradient_accumulation_steps or 1
    return trial.batch_size // steps, steps  # of all ranks


def _stretches(trial: Trial, cost: Cost) -> list[tuple[float, float]]:
    """What an optimizer step cost in each stretch between two evaluations, and how many there were."""
    found = []
    for before, after in pairwise(trial.curve):
        samples, spent = after.samples - before.samples, cost.at(after) - cost.at(before)
        if samples and spent > 0:
            found.append((spent * trial.batch_size / samples, samples / trial.batch_size))
    return found


def _undisturbed(stretches: Sequence[tuple[float, float]]) -> float:
    """The mean pace of those that are about as fast as the fastest tenth of all steps."""
    ordered = sorted(stretches)
    done = list(accumulate(steps for _, steps in ordered))
    fastest, _ = next(each for each, steps in zip(ordered, done, strict=True) if steps >= _FASTEST * done[-1])
    near = [(pace, steps) for pace, steps in ordered if pace <= _ABOUT * fastest]
    return sum(pace * steps for pace, steps in near) / sum(steps for _, steps in near)

"""What the study's trials say so far: by role, the best time, what is spent, and the pace of each batch size."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from batchtune.document import ThroughputFit, Trial
from batchtune.protocol.run_spec import pace_kind
from batchtune.tune.objective.cost import Cost
from batchtune.tune.objective.records import is_settled, to_record

Role = Literal["baseline", "search", "confirm"]
_RECENT = 200  # runs, that say how fast the machine is


class StudyHistory:
    """Questions to the trials of one study; it changes nothing.

    Args:
        study: whose trials.
        cost: what its values are; None: values of the metric.
    """

    def __init__(self, study: Study, cost: Cost | None) -> None:
        self._study, self._cost = study, cost
        self._ended: tuple[int, list[Trial]] = 0, []  # the first trials: their number, and the records among them

    def records(self) -> list[Trial]:
        """All trials, in the form of the result document; not those cut off before it was settled what to try."""
        # those ended change no more and are not looked at again: what a trial costs must not grow with their number
        number, ended = self._ended
        later = self._study.get_trials(deepcopy=False)[number:]
        records = [to_record(trial) if is_settled(trial) else None for trial in later]
        over = next((index for index, trial in enumerate(later) if not trial.state.is_finished()), len(later))
        if over:
            ended = [*ended, *(record for record in records[:over] if record is not None)]
            self._ended = number + over, ended
        return [*ended, *(record for record in records[over:] if record is not None)]

    def wall_seconds(self) -> float:
        """Wall-clock time in which trials ran, evaluation included; what ran at the same time counts once."""
        spans = []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.datetime_complete is not None:
                end = trial.datetime_complete.timestamp()
                spans.append((end - trial.user_attrs.get("wall_seconds", 0.0), end))
        total = latest = 0.0
        for begin, end in sorted(spans):
            total += max(0.0, end - max(begin, latest))
            latest = max(latest, end)
        return total

    def seconds_beside_training(self) -> float:
        """What a run takes besides training: evaluation above all; the median, 0 where nothing has run."""
        ran = [trial.user_attrs for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]
        whole = [run for run in ran if "wall_seconds" in run]
        beside = [run["wall_seconds"] - run.get("training_seconds", 0.0) for run in whole]
        return max(0.0, statistics.median(beside)) if beside else 0.0

    def finished(self, role: Role) -> list[FrozenTrial]:
        """Trials of a role that ran to an end that counts."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = self._study.get_trials(deepcopy=False, states=states)
        return [trial for trial in trials if trial.user_attrs.get("role", "search") == role]

    def costs(self, role: Role | None = None) -> list[tuple[FrozenTrial, float]]:
        """The trials (of one role) that reached the target, each with what it cost; none where there is no target.

        Those that did not have a value, too, but that is their metric's: Optuna takes the last one they reported.
        """
        if self._cost is None:
            return []
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        wanted = [trial for trial in trials if role in {None, trial.user_attrs.get("role", "search")}]
        return [(trial, trial.value) for trial in wanted if trial.value is not None]

    def best_cost(self) -> float | None:
        """The least cost of the target so far; None where nothing got there, or there is no target."""
        return min((cost for _, cost in self.costs()), default=None)

    def best_seconds(self, role: Role | None = None) -> float | None:
        """The shortest time to target so far (of one role); None where nothing got there, or there is no target."""
        times = [trial.time_to_target_seconds for trial in self.records() if role in {None, trial.role}]
        return min((value for value in times if value is not None), default=None)

    def total_steps(self, params: Mapping[str, Any]) -> int | None:
        """The horizon that an earlier run of this configuration gave to the user's scheduler; None: there is none."""
        settled: list[int] = [
            trial.user_attrs["total_steps"]
            for trial in self._study.get_trials(deepcopy=False)
            if "total_steps" in trial.user_attrs and trial.params == params
        ]
        return settled[0] if settled else None

    def searched(self) -> int:
        """Runs of the search so far, failed ones included, so that a search in which all fail ends, too."""
        return sum(1 for trial in self.records() if trial.role == "search" and trial.outcome is not None)

    def last_outcome(self, role: Role) -> str | None:
        """How the latest run of a role ended; None where there was none."""
        outcomes = [trial.outcome for trial in self.records() if trial.role == role and trial.outcome is not None]
        return outcomes[-1] if outcomes else None

    def last_attributes(self, role: Role) -> dict[str, Any]:
        """What the study keeps of the latest run of a role that has ended; empty where there was none."""
        ended = [each.user_attrs for each in self._study.get_trials(deepcopy=False) if each.state.is_finished()]
        return next((each for each in reversed(ended) if each.get("role", "search") == role), {})

    def out_of_memory(self, precision: str) -> int | None:
        """The smallest micro-batch at which runs in this precision met the end of memory; None where none did.

        The probe measured one precision, and steps of another may take more. Sizes at which a run has come through, or
        at a larger one, do not count: what was missing there was not the run's fault.
        """
        same = [each for each in self.records() if each.precision == precision and each.micro_batch_size is not None]
        came_through = max((each.micro_batch_size or 0 for each in same if over(each)), default=0)
        failed = [each.micro_batch_size for each in same if each.outcome == "oom"]
        return min((size for size in failed if size is not None and size > came_through), default=None)

    def step_seconds(
        self,
        micro_batch_size: int,
        accumulation_steps: int,
        precision: str,
        fit: ThroughputFit | None,
        kind: tuple[tuple[str, Any], ...] = (),
    ) -> float | None:
        """An optimizer step so made up: as recent runs had it, or predicted from runs of other sizes.

        Predicted is the longer of two: the probe's fit, scaled as those runs were slower than it, and the step of the
        next smaller batch that ran, grown as the batch. For the fit does not know all that training does, and a run
        whose steps were predicted too short would count as shorter than it was.

        Args:
            micro_batch_size: of the run.
            accumulation_steps: of the run.
            precision: of the run; runs of another tell nothing.
            fit: the probe's.
            kind: of the run's optimizer arguments, see `pace_kind`; runs of another tell nothing.

        Returns:
            Seconds; None where nothing of this kind ran in this precision, or there is no fit.
        """
        paces: dict[tuple[int, int], list[float]] = defaultdict(list)
        for trial in self.records()[-_RECENT:]:
            pace = _pace(trial)
            if (trial.precision, pace_kind(trial.optimizer_arguments)) == (precision, kind) and pace is not None:
                micro, steps = trial.micro_batch_size or trial.batch_size, trial.gradient_accumulation_steps or 1
                paces[micro, steps].append(pace)
        medians = {shape: statistics.median(each) for shape, each in paces.items()}
        shape = micro_batch_size, accumulation_steps
        if shape in medians:
            return medians[shape]
        if fit is None or not medians:
            return None

        def fitted(shape: tuple[int, int]) -> float:
            return shape[1] * max(fit.alpha_seconds + fit.beta_seconds_per_sample * shape[0], 1e-9)

        scaled = fitted(shape) * statistics.median(pace / fitted(each) for each, pace in medians.items())
        smaller = [(math.prod(each), pace) for each, pace in medians.items() if math.prod(each) < math.prod(shape)]
        size, pace = max(smaller, default=(1, 0.0))
        return max(scaled, math.prod(shape) / size * pace)


def _pace(trial: Trial) -> float | None:
    """Seconds of an optimizer step of a run; None where it took none."""
    last = trial.curve[-1] if trial.curve else None
    return last.seconds * trial.batch_size / last.samples if last and last.samples else None


def over(trial: Trial) -> bool:
    """Whether a trial ran to an end that counts."""
    return trial.state in {"complete", "pruned"}

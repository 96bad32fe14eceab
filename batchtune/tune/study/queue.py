"""The runs that are to come: queued in the study, done by whichever worker is free."""

from __future__ import annotations

import time
from typing import Any

from optuna.trial import TrialState

from batchtune.processes.worker import Worker
from batchtune.tune.objective.history import Role
from batchtune.tune.storage.shared import requeue
from batchtune.tune.study.parts import StudyParts
from batchtune.tune.study.trials import Trials

_LOOK_SECONDS = 0.5  # between two looks at what other machines do


class RunQueue:
    """Runs that are not for the sampler to choose.

    Args:
        parts: of the study.
        trials: runs them.
    """

    def __init__(self, parts: StudyParts, trials: Trials) -> None:
        self._parts, self._trials = parts, trials

    def add(self, params: dict[str, Any], role: Role, seed: int) -> None:
        """Has a configuration run next."""
        self._parts.study.enqueue_trial(params, user_attrs={"role": role, "seed": seed})

    def revive(self) -> None:
        """Trials that a killed start left running are queued again as they were; those that had ended are told.

        Where other machines are in the study, they may be theirs: they are taken over when nobody is heard of them.
        """
        study = self._parts.study
        if self._parts.machines.several:
            return
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "outcome" in trial.user_attrs:
                self._trials.close(trial.number, trial.user_attrs)
                continue
            study.tell(trial.number, state=TrialState.FAIL)
            requeue(study, trial)

    def drain(self, awaited: Role | None = None) -> None:
        """Runs whatever is queued.

        Args:
            awaited: other machines' runs of this role are waited for; they become this one's when those die.
        """
        parts = self._parts

        def run_queued(worker: Worker) -> bool:
            parts.machines.take_over()
            if self._trials.run_next(worker, lambda: parts.has(TrialState.WAITING)):
                return True
            if awaited is None or not parts.machines.several or parts.budget.seconds_left() <= 0:
                return False
            time.sleep(_LOOK_SECONDS)
            return parts.has(TrialState.RUNNING, TrialState.WAITING, role=awaited)

        parts.pool.work(run_queued)

"""The search: its first runs where the range test says, then what the sampler proposes, and when it is enough."""

from __future__ import annotations

from optuna.trial import TrialState

from batchtune.processes.worker import Worker
from batchtune.tune.study.belief import Belief
from batchtune.tune.study.parts import StudyParts
from batchtune.tune.study.queue import RunQueue
from batchtune.tune.study.trials import Trials

ENOUGH = 0.01  # expected improvement of log time that is worth another run
MIN_SEARCH_TRIALS = 10
USER_ERRORS = 3  # runs of the search in which the user's code raises (on a NaN, say) end it
FIRST_RUNS, RETREAT = 3, 3.0  # first runs before the baseline is asked, and how far apart their learning rates lie
_QUIET = 2  # such proposals in a row end the search: twice is no accident


class Search:
    """One start's search.

    Args:
        parts: of the study.
        queue: for the first runs.
        trials: runs what the sampler proposes.
        belief: what the sampler expects of another run.
    """

    def __init__(self, parts: StudyParts, queue: RunQueue, trials: Trials, belief: Belief) -> None:
        self._parts, self._queue, self._trials, self._belief = parts, queue, trials, belief
        self._quiet = 0

    def open(self) -> None:
        """The first runs: where the range test says, and at lower rates while they come to nothing."""
        parts, prior = self._parts, self._parts.plan.prior
        if prior is None or not prior.range_tests or prior.start_batch_size is None:
            return
        self._queue.drain()
        lowest, highest = parts.space.learning_rates
        for number in range(parts.history.searched(), FIRST_RUNS):
            rate = float(f"{prior.learning_rate / RETREAT**number:.3g}")
            start = {"batch_size": prior.start_batch_size, "learning_rate": min(max(rate, lowest), highest)}
            seed = parts.plan.config.seed + len(parts.study.trials)
            self._queue.add(parts.space.baseline | start, "search", seed)
            self._queue.drain()
            parts.targets.check_start(parts.history)
            if parts.history.last_outcome("search") not in {"pruned", "diverged"}:
                return  # it got there, or something else than its learning rate was in the way

    def run(self) -> None:
        """Runs what the sampler proposes until that is enough, or the budget is needed for the confirmation.

        Raises:
            UserCodeError: the user's code raised in run after run, and nothing else came of the search.
        """
        parts, raised = self._parts, self._trials.raised
        parts.pool.work(self._run_one)
        if self._quiet >= _QUIET:
            parts.observer.note(f"the search ends: less than {ENOUGH:.0%} improvement is expected of another run")
        elif len(raised) >= USER_ERRORS:
            parts.observer.note(f"the search ends: the task raised an error in {len(raised)} of its runs: {raised[-1]}")
        elif parts.history.searched() < parts.plan.config.budget.trials:
            parts.observer.note("the search ends: what is left of budget.total is for confirmation")
        parts.study.set_user_attr("searched", parts.search_budget)

    def _run_one(self, worker: Worker) -> bool:
        """Runs one trial on a worker, if there is to be another."""
        self._parts.machines.take_over()
        if not self._trials.run_next(worker, self.is_wanted):
            return False
        with self._parts.pool.lock:
            gain = self._belief.expected_improvement
            enough = gain is not None and gain < ENOUGH
            enough = enough and len(self._parts.history.finished("search")) >= MIN_SEARCH_TRIALS
            self._quiet = self._quiet + 1 if enough else 0
        return True

    def is_wanted(self) -> bool:
        """Whether another run is to be proposed.

        Raises:
            UserCodeError: as `run`.
        """
        parts = self._parts
        if self._quiet >= _QUIET or parts.budget.seconds_left() <= parts.budget.reserve():
            return False
        if parts.machines.several and parts.has_searched:
            return False  # another machine has found that it was enough
        if len(raised := self._trials.raised) >= USER_ERRORS:
            others = not parts.machines.several and parts.has(TrialState.RUNNING, role="search")  # here
            if not parts.history.finished("search") and not others:
                raise raised[-1]
            return False
        running = parts.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return parts.history.searched() + len(running) < parts.plan.config.budget.trials

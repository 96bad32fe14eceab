"""What a study has time for: what its phases share, its budget, and how long each run may train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from optuna import Study, create_study
from optuna.logging import ERROR, set_verbosity
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from batchtune.config.schema import Config
from batchtune.document import ProbeResult, Value
from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.protocol.messages import RunSpec, pace_kind
from batchtune.tune.plan.prior import MAX_EVALUATION_BATCH
from batchtune.tune.plan.space import Plan, Space
from batchtune.tune.plan.tokens import split
from batchtune.tune.study.history import Role, StudyHistory, over
from batchtune.tune.study.storage import Machines
from batchtune.tune.study.targets import Targets
from batchtune.tune.verdict.scores import JOULES, SECONDS, cost_of
from batchtune.units import duration

MOST_RESERVED = 0.5  # of what the baseline leaves of budget.total, for confirmation: there must be room to search
TOLD_SHARE = 0.05  # of budget.total: after so much of a first run it is told what the rest is enough for
BASELINE_SHARE = 0.1  # of budget.total, for a baseline whose run nobody has limited
FEWEST_RUNS, FAIR_RUNS = 3, 10  # of a search, as long as the baseline's: fewer are none, and more are seldom needed
Clock = Callable[[], float]
CAP_FACTOR = 1.5  # of the best run, which was lucky: one as good may well take a third more on another seed
CONFIRM_CAP_FACTOR = 2.0  # of budget.run: a fresh seed of the baseline may need longer than the first did
LOST_FACTOR = 3.0  # of a contender's time: on a fresh seed it has shown by then to be so much faster, or not


class StudyParts:
    """One study and what its phases share: Optuna's `study`, the `pool` of workers and the `machines` in it.

    Attributes:
        cost: what the study counts until its target; None where it has none.
    """

    def __init__(
        self, plan: Plan, study: Study, pool: WorkerPool, observer: Observer, clock: Clock, opening_seconds: float
    ) -> None:
        self.plan, self.study, self.pool, self.observer = plan, study, pool, observer
        self.cost = cost_of(plan.config.objective.kind)
        self.space, self.history = Space(plan), StudyHistory(study, self.cost)
        self.targets, self.machines = Targets(study, plan.config, self.history), Machines(study)
        measured = opening_seconds + plan.probe.seconds + plan.prior.seconds
        self.budget = StudyBudget(
            plan.config, study, self.history, len(pool), clock, measured, has_schedule=plan.has_schedule
        )

    def has(self, *states: TrialState, **attributes: Value) -> bool:
        """Whether a trial in one of these states has these attributes."""
        trials = self.study.get_trials(deepcopy=False, states=states)
        return any(attributes.items() <= trial.user_attrs.items() for trial in trials)

    def tell_budget(self) -> None:
        """Says what the time left is enough for; sets budget.total where nobody has, once a run has got there."""
        if self.history.best_cost() is not None:
            self.budget.settle()
        self.observer.announce(self.budget.outlook())

    @property
    def search_budget(self) -> list[float]:
        """What the search may use; with a larger one it goes on."""
        return [self.budget.total, self.plan.config.budget.trials]

    @property
    def has_searched(self) -> bool:
        """Whether the search has ended, on this machine or another."""
        return bool(self.study.user_attrs.get("searched") == self.search_budget)


class StudyBudget:
    """budget.total; opening the task, the probe, the measurements after it and earlier starts have used a part of it.

    Who gives no budget.total gets one once the baseline has run: what is spent by then, the confirmation, and a search
    of 10 runs that take as long as the baseline to its target. Searches end by themselves after 10 to 20 runs, most of
    them much shorter than the baseline, so it is enough for slow tasks and keeps nobody waiting for quick ones.

    Who gives no budget.run has the baseline set the target until its curve levels off, or for a tenth of budget.total,
    unless a schedule of the learning rate counts on all of budget.run.

    Args:
        at_once: how many runs train side by side.
        measured_seconds: that opening the task, the probe and the measurements after it have taken.

    Attributes:
        total: seconds.
        is_open: how long the baseline trains is not the user's choice.
    """

    def __init__(
        self,
        config: Config,
        study: Study,
        history: StudyHistory,
        at_once: int,
        clock: Clock,
        measured_seconds: float,
        *,
        has_schedule: bool,
    ) -> None:
        self._config, self._history, self._at_once, self._clock = config, history, at_once, clock
        self._measured_seconds, self._slower, self._is_told = measured_seconds, 1.0, False
        self._began, self._study = clock() - measured_seconds - history.wall_seconds(), study
        self._cost = cost_of(config.objective.kind)
        self.total: float = config.budget.given_total or study.user_attrs.get("total", config.budget.total)
        self._sets_target = config.objective.target == "auto" and self._cost is not None
        self.is_open = self._sets_target and "run" not in config.budget.model_fields_set and not has_schedule

    @property
    def longest(self) -> float:
        """Training seconds of the baseline at the most."""
        longest = self._config.budget.run
        return min(longest, BASELINE_SHARE * self.total) if self.is_open else longest

    def seconds_left(self) -> float:
        """Of budget.total."""
        return self._began + self.total - self._clock()

    def settle(self) -> None:
        """Sets budget.total where nobody has, now that a run has shown how long it takes; see above."""
        if self._config.budget.given_total is None and "total" not in self._study.user_attrs:
            self.total = self._enough()
            self._study.set_user_attr("total", self.total)

    def foresees(self, training_seconds: float, seconds: float) -> bool:
        """Takes in how long the very first run has taken so far; returns whether it is time to tell what that means.

        That is once, when it has taken 5 % of a given budget.total: evaluation, and other programs, may make a second
        of training take several.
        """
        is_first = not self._is_told and not self._history.wall_seconds()
        given = self._config.budget.given_total
        if given is None or not is_first or not training_seconds or seconds < TOLD_SHARE * given:
            return False
        self._is_told, self._slower = True, max(1.0, seconds / training_seconds)
        return True

    def outlook(self) -> str:
        """What the time left is enough for, and what would be where that is no search."""
        left, each = self.seconds_left(), self._run_seconds()
        runs = max(0, self._at_once * int((left - self._baseline_first() - self.reserve()) / each))
        told = f"{duration(max(left, 0.0))} left, about {runs} runs of {duration(each)}"
        if runs >= FEWEST_RUNS:
            return told
        return f"{told}: too little for a search, which needs budget.total={self.enough()} or so"

    def enough(self) -> str:
        """A budget.total that has room for a search, as people write it."""
        return f"{math.ceil(self._enough() / 60)}m"

    def _enough(self) -> float:
        searching = math.ceil(FAIR_RUNS / self._at_once) * self._run_seconds()
        confirming, first = self._needed(self._config.confirm.seeds), self._baseline_first()
        one_by_one = self.total - self.seconds_left() + first + searching + confirming
        return float(math.ceil(max(one_by_one, self._before_search() + first + confirming / MOST_RESERVED)))

    def _run_seconds(self) -> float:
        """What a run of the search is expected to take: as the best so far; before there is one, all it may."""
        training = self._history.best_seconds() or self._slower * self.longest
        return max(training + self._history.seconds_beside_training(), 1e-3)

    def _baseline_first(self) -> float:
        """What the baseline's run takes that is yet to set the target."""
        return self._slower * self.longest if self._sets_target and not self._history.finished("baseline") else 0.0

    def _before_search(self) -> float:
        """Seconds that went by before anything could be searched."""
        return self._measured_seconds + self._history.wall_seconds("baseline")

    def reserve(self) -> float:
        """Seconds that confirmation and one more run of the search need; at the most half of what the baseline leaves.

        Where a baseline takes all of budget.run, its confirmation could take all of budget.total, and nothing would be
        searched: it is then cut short instead.
        """
        left = self.total - self._before_search() - self._baseline_first()
        return min(self._needed(self._config.confirm.seeds), MOST_RESERVED * max(0.0, left))

    def to_confirm(self, seeds: int) -> str:
        """What of the configuration to change for so many fresh seeds to run, as on the command line."""
        total, seeds = self.total, max(seeds, self._config.confirm.seeds)
        needed = self._needed(seeds)
        enough = math.ceil(max(total - self.seconds_left() + needed, needed / MOST_RESERVED))
        is_known = enough <= total == self._config.budget.total
        return f"confirm.seeds={seeds}" + ("" if is_known else f" budget.total={max(enough, math.ceil(total))}s")

    def _needed(self, seeds: int) -> float:
        """Seconds for the confirmation and one more run of the search, with what runs take besides training."""
        config, longest = self._config, self.longest
        best = self._history.best_seconds() or longest
        one_baseline = min(LOST_FACTOR * best, longest)
        needed = seeds * 1.2 * (one_baseline + config.confirm.top * best) + CAP_FACTOR * best
        runs = seeds * (1 + config.confirm.top) + (not self._history.finished("baseline")) + 1
        needed += math.ceil(runs / self._at_once) * self._history.seconds_beside_training()
        if not self._sets_target and not self._history.finished("baseline"):
            needed += longest
        return needed

    def affordable_contenders(self) -> int:
        """How many are confirmed: as asked for, or where every run takes all of budget.run, as all seeds allow."""
        config, most = self._config, self._config.confirm.top
        if self._cost is not None:
            return most
        round_seconds = config.confirm.seeds * (config.budget.run + self._history.seconds_beside_training())
        rounds = self.seconds_left() // max(round_seconds, 1e-9)  # of each seed, in which all workers train once
        return next((each for each in range(most, 1, -1) if math.ceil((each + 1) / self._at_once) <= rounds), 1)


def outlook_at_start(config: Config, at_once: int, opening_seconds: float, *, has_schedule: bool) -> str:
    """What `StudyBudget.outlook` says before anything has been measured."""
    set_verbosity(ERROR)  # nobody asked for a word on a study that is none
    study = create_study(storage=InMemoryStorage())
    history = StudyHistory(study, cost_of(config.objective.kind))
    budget = StudyBudget(config, study, history, at_once, lambda: 0.0, opening_seconds, has_schedule=has_schedule)
    return budget.outlook()


def _evaluated(probe: ProbeResult) -> int | None:
    """The batch size of the evaluation in the final check of the answer, where not as many samples as asked fitted."""
    checks = [each for each in probe.attempts if each.purpose == "verify" and each.fits]
    largest = max((each.batch_size for each in checks), default=None)  # of a rank, as attempts have it
    return next((each.evaluation_batch_size for each in checks if each.batch_size == largest), None)


class Limits:
    """Makes the run of each trial; the best time so far is what caps the others."""

    def __init__(self, plan: Plan, space: Space, history: StudyHistory) -> None:
        self._plan, self._space, self._history = plan, space, history
        self._cost = cost_of(plan.config.objective.kind)

    def spec(self, params: Mapping[str, Value], role: Role, seed: int, target: float | None) -> RunSpec:
        """The run of a trial; `target`: the metric value at which it ends, None: it runs to its limit."""
        config, objective, probe = self._plan.config, self._plan.config.objective, self._plan.probe
        ranks, max_micro = config.ranks.of_each, (probe.max_batch_size or 1) // config.ranks.of_each
        precision = self._space.precision(params)
        too_large = self._history.out_of_memory(precision)
        most = max_micro if too_large is None else max(1, min(max_micro, too_large // 2))
        of_rank = int(params["batch_size"]) // ranks
        made = split(self._plan.tokens, of_rank, min(self._plan.prior.micro_batch_size or most, most), max_micro)
        cap, arguments, fit = self._cap(params, role), self._space.optimizer_arguments(params), probe.throughput_fit
        longest = config.budget.run * (CONFIRM_CAP_FACTOR if role == "confirm" and self._cost else 1.0)
        return RunSpec(
            micro_batch_size=made.micro_batch_size,
            accumulation_steps=made.steps,
            learning_rate=float(params["learning_rate"]),
            precision=precision,
            seed=seed,
            metric=objective.metric,
            goal=objective.goal,
            target=target,
            limit_seconds=min(longest, cap) if cap is not None and self._cost is SECONDS else longest,
            limit_joules=cap if self._cost is JOULES else None,
            evaluate_every=None if config.evaluate_every == "auto" else config.evaluate_every,
            evaluation_batch_size=min(made.at_once, _evaluated(probe) or MAX_EVALUATION_BATCH),
            most_step_seconds=self._history.most_step_seconds(
                made.micro_batch_size * ranks, made.steps, precision, fit, pace_kind(arguments)
            ),
            optimizer_arguments=arguments,
            gradient_clipping=self._space.gradient_clipping(params),
            horizon_seconds=config.budget.run,
            total_steps=self._history.total_steps(params),
            world_size=ranks,
            samples=made.samples,
            length_batches=made.length_batches,
        )

    def is_capped(self, spec: RunSpec, seconds: float) -> bool:
        """Whether a run that ended without the target, after so long, had less than a whole run's time."""
        given = spec.limit_seconds if spec.limit_joules is None else seconds
        return self._cost is not None and given < self._plan.config.budget.run

    def _cap(self, params: Mapping[str, Value], role: Role) -> float | None:
        """What a run may cost before it is not the answer; None where nothing says so."""
        if role == "confirm":
            return self._confirm_cap(params)
        best = self._history.best_cost() if role == "search" else None
        return None if best is None else CAP_FACTOR * best

    def _confirm_cap(self, params: Mapping[str, Value]) -> float | None:
        """Of a contender's own time in the search; for the baseline, of the slowest contender's on fresh seeds.

        What takes longer than the baseline did has lost for sure, and nothing sooner. The baseline is interleaved
        behind the contenders: with all of them far ahead it need not run to its end.
        """
        if params == self._space.baseline:
            costs = [cost for trial, cost in self._history.costs("confirm") if trial.params != params]
            best = max(costs, default=self._history.best_cost())
            return LOST_FACTOR * best if best is not None else None
        own = [cost for trial, cost in self._history.costs("search") if trial.params == params]
        ran = [trial for trial in self._history.records() if trial.role == "baseline" and over(trial)]
        baseline = [cost for trial in ran if self._cost and (cost := self._cost.of(trial) or self._cost.spent(trial))]
        return max([LOST_FACTOR * min(own), *baseline]) if own else None

"""What the phases of a study share, and what its budget has time for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from optuna import Study
from optuna.storages import InMemoryStorage

from batchtune.config.schema import Config
from batchtune.document import Attempt
from batchtune.errors import NothingFitsError
from batchtune.observer import Forwarder, Observer
from batchtune.processes.pool import WorkerPool
from batchtune.tune.plan.space import Plan, Space
from batchtune.tune.study.history import StudyHistory
from batchtune.tune.study.limits import CAP_FACTOR, CONFIRM_SHARE, LOST_FACTOR, Limits
from batchtune.tune.study.storage import Machines, open_study
from batchtune.tune.study.targets import Targets
from batchtune.tune.verdict.scores import SECONDS, cost_of
from batchtune.units import counted, duration

_FIRST_SHOWS = "the first run shows what is enough, "
MOST_RESERVED = 0.5  # of what the baseline leaves of budget.total, for confirmation: there must be room to search
TOLD_SHARE = 0.05  # of budget.total: after so much of a first run it is told what the rest is enough for
BASELINE_SHARE = 0.1  # of budget.total, for a baseline, or runs as long as each other, that nobody has limited
ON_FIRST_SEED = 2  # times as many contenders run on the first fresh seed, where nobody has set how many are confirmed
FEWEST_RUNS, FAIR_RUNS = 3, 10  # of a search, as long as the baseline's: fewer are none, and more are seldom needed
SHORTEST_RUN = 1.0  # seconds, as long as the user's own training, if that is over sooner
FEWEST_STEPS, STEPS_IN_TOTAL = 20, 200  # of a run that learns anything, and of a study of such runs
AGAIN = "searched_again"  # attribute of the study: how often, since fresh seeds had left nothing better than today's
Clock = Callable[[], float]


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
        self.limits = Limits(plan, self.space, self.history, self.targets)
        measured = opening_seconds + plan.probe.seconds + plan.prior.seconds
        self.budget = StudyBudget(
            plan.config, study, self.history, len(pool), clock, measured, has_schedule=plan.has_schedule
        )

    def tell_budget(self) -> None:
        """Says what the time left is enough for; sets budget.total where nobody has, once a run has got there."""
        if self.history.best_cost() is not None:
            self.budget.settle()
        self.observer.announce(self.budget.outlook())

    @property
    def search_budget(self) -> list[float]:
        """What the search may use; with a larger one it goes on, and where it is to once fresh seeds have spoken."""
        again = self.study.user_attrs.get(AGAIN, 0)
        return [self.budget.total, self.plan.config.budget.trials, *([again] if again else [])]

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
    unless every run takes all of budget.run; see `with_run_length`. Runs to a target of the user's own end there: how
    long they are shows with the first.

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
        self._first_look: tuple[float, float] | None = None  # training seconds, and seconds, of the very first run
        self._began, self._study = clock() - measured_seconds, study
        self._earlier_seconds = history.wall_seconds()
        self._cost = cost_of(config.objective.kind)
        self.total: float = config.budget.given_total or study.user_attrs.get("total", config.budget.total)
        self._sets_target = config.objective.target == "auto" and self._cost is not None
        is_free = "run" not in config.budget.model_fields_set and not has_schedule
        self.is_open = is_free and self._sets_target
        self._ends_at_target = is_free and not self._sets_target and self._cost is not None

    @property
    def longest(self) -> float:
        """Training seconds of the baseline at the most."""
        longest = self._config.budget.run
        return min(longest, BASELINE_SHARE * self.total) if self.is_open else longest

    def seconds_left(self) -> float:
        """Of budget.total."""
        return self._began + self.total - self._earlier_seconds - self._clock()

    def count_earlier(self) -> None:
        """Takes in what the runs of earlier starts took, once those are told that a kill had left open."""
        self._earlier_seconds = self._history.wall_seconds()

    def settle(self) -> None:
        """Sets budget.total where nobody has, now that a run has shown how long it takes; see above."""
        if self._config.budget.given_total is None and "total" not in self._study.user_attrs:
            self.total = self._enough()
            self._study.set_user_attr("total", self.total)

    def foresees(self, training_seconds: float, seconds: float) -> bool:
        """Takes in how long the very first run has taken so far; returns whether it is time to tell what that means.

        That is once, at the evaluation after it has taken 5 % of a given budget.total: evaluation, and other programs,
        may make a second of training take several. What happens only once, such as the first evaluation's imports, is
        left out.
        """
        is_first = not self._is_told and not self._history.has_run
        given = self._config.budget.given_total
        if given is None or self._ends_at_target or not is_first:
            return False
        if not training_seconds or seconds < TOLD_SHARE * given:
            return False
        before, self._first_look = self._first_look, self._first_look or (training_seconds, seconds)
        if before is None or training_seconds <= before[0]:
            return False
        self._is_told, self._slower = True, max(1.0, (seconds - before[1]) / (training_seconds - before[0]))
        return True

    def outlook(self) -> str:
        """What the time left is enough for, and what would be where that is no search."""
        left, each = self.seconds_left(), self._run_seconds()
        if self._ends_at_target and not self._history.has_run:
            return f"{duration(max(left, 0.0))} left; the first run to the target shows how many runs that is"
        runs = max(0, self._at_once * int((left - self._baseline_first() - self.reserve()) / each))
        most = "" if self._history.best_seconds() else "up to "  # until one has got there, each may take all
        told = f"{duration(max(left, 0.0))} left, about {counted(runs, 'run')} of {most}{duration(each)}"
        if runs + self._searched() >= FEWEST_RUNS:
            return told
        unless = "" if self._history.costs("search") else ", unless runs turn out to be shorter"
        is_known = self._history.best_seconds() or (self._is_told and not self.is_open)  # how long runs are
        first, most = ("", "should be enough") if is_known else (_FIRST_SHOWS, "if each run takes all that it may")
        return f"{told}: too little for a search{unless}; {first}budget.total={self.enough()} {most}"

    def _searched(self) -> int:
        """Runs of the search that need not be done again."""
        return len(self._history.finished("search"))

    def enough(self) -> str:
        """A budget.total that has room for a search, as people write it."""
        return f"{math.ceil(self._enough() / 60)}m"

    def _enough(self) -> float:
        searching = math.ceil(max(0, FAIR_RUNS - self._searched()) / self._at_once) * self._run_seconds()
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
        reserved = self._before_search() + self._baseline_first() + needed / MOST_RESERVED  # see `reserve`
        enough = math.ceil(max(total - self.seconds_left() + needed, reserved))
        is_known = enough <= total == self._config.budget.total
        return f"confirm.seeds={seeds}" + ("" if is_known else f" budget.total={max(enough, math.ceil(total))}s")

    def _needed(self, seeds: int) -> float:
        """Seconds for the confirmation and one more run of the search, with what runs take besides training."""
        config, longest = self._config, self.longest
        best = self._history.best_seconds() or longest
        one_baseline = min(max(LOST_FACTOR * best, CONFIRM_SHARE * config.budget.run), self._baseline_seconds())
        contenders = (seeds - 1) * config.confirm.top + self._most_contenders()
        needed = 1.2 * (seeds * one_baseline + contenders * best) + CAP_FACTOR * best
        runs = seeds + contenders + (not self._history.finished("baseline")) + 1
        beside = self._history.seconds_beside_training()
        more = max(0.0, self._history.seconds_beside_training("baseline") - beside)  # it is evaluated for longer
        needed += math.ceil(runs / self._at_once) * beside + math.ceil(seeds / self._at_once) * more
        if not self._sets_target and not self._history.finished("baseline"):
            needed += longest
        return needed

    def _baseline_seconds(self) -> float:
        """What the baseline trains on a fresh seed: as long as it did before, which no larger `total` makes longer."""
        ran = [cost for _, cost in self._history.costs("baseline")] if self._cost is SECONDS else []
        return max(ran, default=self.longest)

    def _most_contenders(self) -> int:
        """On the first fresh seed: more than are confirmed where that can tell between them."""
        confirm = self._config.confirm
        is_open = self._cost is not None and "top" not in confirm.model_fields_set and confirm.seeds > 1
        return confirm.top * (ON_FIRST_SEED if is_open else 1)

    def affordable_contenders(self) -> int:
        """How many run on the first fresh seed, as time allows; where every run takes all of budget.run, on all."""
        config, most = self._config, self._config.confirm.top
        if self._cost is not None:
            has_time = self.seconds_left() >= self._needed(config.confirm.seeds)
            return self._most_contenders() if has_time else most
        round_seconds = config.confirm.seeds * (config.budget.run + self._history.seconds_beside_training())
        rounds = self.seconds_left() // max(round_seconds, 1e-9)  # of each seed, in which all workers train once
        return next((each for each in range(most, 1, -1) if math.ceil((each + 1) / self._at_once) <= rounds), 1)


def outlook_at_start(config: Config, at_once: int, opening_seconds: float, *, has_schedule: bool) -> str:
    """What `StudyBudget.outlook` says before anything has been measured."""
    study = open_study(InMemoryStorage(), config)
    history = StudyHistory(study, cost_of(config.objective.kind))
    settled = with_run_length(config, study, has_schedule=has_schedule)
    budget = StudyBudget(settled, study, history, at_once, lambda: 0.0, opening_seconds, has_schedule=has_schedule)
    if "run" not in study.user_attrs or "run" in config.budget.model_fields_set:
        return budget.outlook()
    most = "a run takes as long as your training, if that is known, and a tenth of budget.total at the most"
    return f"{budget.outlook()}; {most}"


def with_run_length(
    config: Config, study: Study, *, has_schedule: bool, training_seconds: float | None = None
) -> Config:
    """The configuration with a budget.run that budget.total can hold, where nobody has given one and runs take all.

    They do where the learning rate follows a schedule over them, and where the best value within them counts. They are
    as long as the user's own training then, `training_seconds`, where that is known: so is the schedule. A study
    that has runs goes on with runs as long as those: its answer compares them with each other.
    """
    budget, takes_all = config.budget, has_schedule or cost_of(config.objective.kind) is None
    if takes_all and not study.get_trials(deepcopy=False):
        own = budget.run if training_seconds is None else max(training_seconds, SHORTEST_RUN)
        is_free = "run" not in budget.model_fields_set
        study.set_user_attr("run", min(own, BASELINE_SHARE * budget.total) if is_free else budget.run)
    run = study.user_attrs.get("run", budget.run if takes_all else None)
    return config if run is None else config.model_copy(update={"budget": budget.model_copy(update={"run": run})})


class ProbeInTime(Forwarder):
    """Ends the probe of a study whose budget.total has no time for the steps of a single run, whatever its size.

    Args:
        earlier: attempts of earlier starts.

    Raises:
        NothingFitsError: the fastest attempt so far has shown that, with what would be enough.
    """

    def __init__(self, config: Config, behind: Observer, earlier: Iterable[Mapping[str, object]]) -> None:
        super().__init__(behind)
        self._total = config.budget.given_total or math.inf  # which it will be set by
        known = (each.get("step_seconds") for each in earlier)
        self._fastest = min((each for each in known if isinstance(each, float)), default=math.inf)

    def attempted(self, attempt: Attempt) -> None:
        super().attempted(attempt)
        if attempt.step_seconds is None or not attempt.fits:
            return
        self._fastest = step = min(self._fastest, attempt.step_seconds)
        if FEWEST_STEPS * step <= self._total:
            return
        run, total = math.ceil(FEWEST_STEPS * step), math.ceil(STEPS_IN_TOTAL * step / 60)
        text = f"a step takes {duration(step)} at the least: budget.total ({self._total:g} s) has no"
        raise NothingFitsError(f"{text} time for a search; start again with budget.run={run}s budget.total={total}m")

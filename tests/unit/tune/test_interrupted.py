"""Runs that were interrupted or killed: what the study keeps of them, and whose time it counts."""

import copy
import itertools
from datetime import datetime, timedelta
from types import SimpleNamespace

import law
import optuna
import pytest
from fakes import FakeCrew
from optuna.trial import TrialState

from batchtune.config.schema import Budget, Confirm
from batchtune.errors import UserCodeError
from batchtune.observer import Observer
from batchtune.tune.study import trials
from batchtune.tune.study.history import INTERRUPTED, SEEN, StudyHistory, curve_attribute, to_curve, to_record
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.verdict.scores import JOULES, SECONDS

pytestmark = pytest.mark.usefixtures("few_particles")

BEGAN = datetime(2026, 11, 27, 12)  # noqa: DTZ001 - as Optuna has it
EVALUATION, POINTS, TOTAL = 5.0, 7, 3600.0  # what each evaluation takes; those before the interruption; budget.total


class Stopped(law.LawWorker):
    """Ends its first run after so many points, each of which takes a while on the wall clock of `trials`.

    `killed` is the storage as it is then, without a last word.
    """

    def __init__(self, clock, storage=None, error=KeyboardInterrupt):
        super().__init__()
        self._clock, self._storage, self._error, self.told = clock, storage, error, []

    def train(self, *, on_event, **spec):
        def tell(point):
            next(itertools.islice(self._clock, int(EVALUATION) - 1, None))
            self.told.append(point)
            go_on = on_event(point)
            if len(self.told) == POINTS:
                self.killed = copy.deepcopy(self._storage)
                raise self._error
            return go_on

        return super().train(on_event=tell, **spec)


def study(storage, worker=None):
    plan = law.plan(budget=Budget(run=60.0, total=TOTAL, trials=1), confirm=Confirm(seeds=0))
    return TuneStudy(plan, FakeCrew(worker or law.LawWorker()), storage, Observer(), lambda: 0.0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, one for each look at them."""
    seconds = itertools.count()
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    return seconds


@pytest.fixture(params=["interrupted", "killed"])
def stopped(request, clock):
    """A study that was stopped in its baseline's run: its storage, the worker, and how many points may be missing."""
    storage = optuna.storages.InMemoryStorage()
    worker = Stopped(clock, storage)
    tuned = study(storage, worker)
    with pytest.raises(KeyboardInterrupt):
        tuned.run()
    storage = storage if request.param == "interrupted" else worker.killed
    (trial,) = storage.get_all_trials(0)
    record = to_record(trial)
    assert record.state == "running"
    assert record.is_interrupted == (request.param == "interrupted")
    assert record.message == (INTERRUPTED if record.is_interrupted else None)
    return storage, worker, 0 if record.is_interrupted else int(trials.KEEPING_SECONDS // EVALUATION)


def test_a_run_that_was_stopped_keeps_its_curve_and_says_why_it_has_no_outcome(stopped):
    storage, worker, missing = stopped
    resumed = study(storage)
    resumed.run()
    first, second, *_ = resumed.records()
    assert POINTS - missing <= len(first.curve) <= POINTS
    assert first.curve == to_curve(curve_attribute(worker.told))[: len(first.curve)]
    assert (first.state, first.outcome, first.came_to, first.message) == ("fail", None, "interrupted", INTERRUPTED)
    assert (second.role, second.came_to) == ("baseline", "reached")


def test_a_run_in_which_the_users_code_raised_failed_and_was_not_interrupted(clock):
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(UserCodeError):
        study(storage, Stopped(clock, storage, UserCodeError("compute_loss raised"))).run()
    resumed = study(storage)
    resumed.run()
    first, second, *_ = resumed.records()
    assert (first.state, first.came_to, first.message) == ("fail", "user_error", "compute_loss raised")
    assert (second.role, second.came_to) == ("baseline", "reached")


def test_the_time_of_a_run_that_was_stopped_is_of_the_budget(stopped):
    storage, _, missing = stopped
    fresh, resumed = study(optuna.storages.InMemoryStorage()), study(storage)
    spent = fresh.parts.budget.seconds_left() - resumed.parts.budget.seconds_left()
    assert EVALUATION * (POINTS - missing) <= spent <= EVALUATION * POINTS + 2 * POINTS
    assert resumed.parts.history.wall_seconds("baseline") == pytest.approx(spent, abs=1e-3)
    assert resumed.parts.history.wall_seconds("search") == 0.0


def history_of(*told, cost=SECONDS):
    """The history of trials that began an hour apart: of each its state, what else it is, and its attributes."""
    study = optuna.create_study()
    for hour, (state, more, attributes) in enumerate(told):
        trial = optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=attributes, **more)
        trial.state, trial.datetime_start = state, BEGAN + timedelta(hours=hour)
        trial.datetime_complete = BEGAN + timedelta(days=1) if state.is_finished() else None  # the next start's
        study.add_trial(trial)
    return StudyHistory(study, cost)


def test_runs_that_were_stopped_count_for_as_long_as_they_were_seen_and_no_night_between():
    seen, reported = {SEEN: 100.0}, {"intermediate_values": {0: 2.0, 30_000: 1.0}}
    failed, running = TrialState.FAIL, TrialState.RUNNING
    assert history_of((failed, {}, seen), (failed, {}, seen)).wall_seconds() == 200.0
    assert history_of((failed, reported, {})).wall_seconds() == 30.0  # of an earlier version
    assert history_of((failed, reported, seen)).wall_seconds() == 100.0
    assert history_of((failed, reported, {}), cost=JOULES).wall_seconds() == 0.0  # its steps are no seconds
    assert history_of((failed, reported, {}), cost=None).wall_seconds() == 30.0
    assert history_of((running, reported, seen)).wall_seconds() == 0.0  # here, or on another machine
    assert history_of((running, {}, seen | {"message": INTERRUPTED})).wall_seconds() == 100.0
    assert not history_of((failed, {}, seen)).has_run


def test_a_run_under_way_is_not_kept_more_often_than_it_need_be(clock):
    storage = optuna.storages.InMemoryStorage()
    tuned, kept = study(storage, Stopped(clock)), []
    storage.set_trial_user_attr = lambda number, key, value: kept.append(key)
    with pytest.raises(KeyboardInterrupt):
        tuned.run()
    assert 1 < kept.count("curve") < POINTS

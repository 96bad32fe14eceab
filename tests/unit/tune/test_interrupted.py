"""Runs that were interrupted or killed: what the study keeps of them."""

import itertools
from types import SimpleNamespace

import law
import optuna
import pytest
from fakes import FakeCrew

from batchtune.config.schema import Budget, Confirm
from batchtune.observer import Observer
from batchtune.tune.study import trials
from batchtune.tune.study.history import INTERRUPTED, curve_attribute, to_curve
from batchtune.tune.study.phases import TuneStudy

pytestmark = pytest.mark.usefixtures("few_particles")

EVALUATION, POINTS, TOTAL = 5.0, 7, 3600.0  # what each evaluation takes; those before the interruption; budget.total


class Stopped(law.LawWorker):
    """Interrupts its first run after so many points, each of which takes a while on the wall clock of `trials`."""

    def __init__(self, clock):
        super().__init__()
        self._clock, self.told = clock, []

    def train(self, *, on_event, **spec):
        def tell(point):
            next(itertools.islice(self._clock, int(EVALUATION) - 1, None))
            self.told.append(point)
            go_on = on_event(point)
            if len(self.told) == POINTS:
                raise KeyboardInterrupt
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
def stopped(request, clock, monkeypatch):
    """A study that was stopped in its baseline's run: its storage, the worker, and how many points may be missing."""
    if request.param == "killed":  # nobody is left to say a last word
        monkeypatch.setattr(trials._Race, "stopped_by", lambda *_: None)
    storage, worker = optuna.storages.InMemoryStorage(), Stopped(clock)
    tuned = study(storage, worker)
    with pytest.raises(KeyboardInterrupt):
        tuned.run()
    (record,) = tuned.records()
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


def test_a_run_under_way_is_not_kept_more_often_than_it_need_be(clock):
    storage = optuna.storages.InMemoryStorage()
    tuned, kept = study(storage, Stopped(clock)), []
    storage.set_trial_user_attr = lambda number, key, value: kept.append(key)
    with pytest.raises(KeyboardInterrupt):
        tuned.run()
    assert 1 < kept.count("curve") < POINTS

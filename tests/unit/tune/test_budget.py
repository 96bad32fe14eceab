"""One budget: what it is where nobody gives one, what it is enough for, and that this is told at once."""

import contextlib
import re
from dataclasses import replace

import law
import optuna
import pytest
from fakes import FakeCrew

from batchtune.config.schema import Budget, Confirm, Objective
from batchtune.document import Attempt
from batchtune.errors import NothingFitsError
from batchtune.observer import Observer
from batchtune.tune.study.budget import ProbeInTime, outlook_at_start
from batchtune.tune.study.phases import TuneStudy

pytestmark = pytest.mark.usefixtures("few_particles")

SLOWEST = {"baseline": {"batch_size": 8, "learning_rate": 1e-3}}  # takes minutes to the target


class Told(Observer):
    """What everybody is told, each with how many runs had begun by then."""

    def __init__(self):
        self.announced, self._runs = [], 0

    def trial_started(self, trial, *, best_seconds):
        self._runs += 1

    def announce(self, text):
        self.announced.append((self._runs, text))


class Clock:
    """Goes on by what runs train."""

    now = 0.0

    def __call__(self):
        return self.now


class Worker(law.LawWorker):
    """Its runs take time, and the first evaluation of all takes `once` seconds more."""

    def __init__(self, clock, wall=1.0, once=0.0, **options):
        super().__init__(noise=0.05, **options)
        self._clock, self._wall, self._once = clock, wall, once

    def train(self, *, timeout, on_event, **spec):
        began = self._clock.now + (0.0 if self.specs else self._once)

        def told(point):
            self._clock.now = began + self._wall * point.seconds
            return on_event(point)

        return super().train(timeout=timeout, on_event=told, **spec)


def study(storage=None, wall=1.0, once=0.0, *, has_schedule=False, own=None, **keys):
    """A study of the law that takes the time that its runs do, or `wall` times as long, and whom it told what."""
    clock, told = Clock(), Told()
    plan = replace(
        law.plan(**{"confirm": Confirm(seeds=1, top=1)} | keys), has_schedule=has_schedule, training_seconds=own
    )
    storage = storage or optuna.storages.InMemoryStorage()
    return TuneStudy(plan, FakeCrew(Worker(clock, wall, once)), storage, told, clock), told, clock


def baseline_of(tuned):
    return next(trial for trial in tuned.records() if trial.role == "baseline")


def test_it_is_told_before_the_first_run_and_after_the_baseline():
    tuned, told, _ = study(budget=Budget(run=60.0, total=1800.0, trials=3))
    tuned.run()
    (first, before), (second, after) = told.announced
    assert (first, second) == (0, 1)
    assert re.fullmatch(r"29 min 59 s left, about \d+ runs of up to 60 s", before)
    left, runs, each = re.fullmatch(r"(\d+) min \d+ s left, about (\d+) runs of ([\d.]+) s", after).groups()
    assert int(runs) * float(each) < 60 * (int(left) + 1)


def test_one_that_can_hold_no_search_is_told_with_one_that_can_before_it_is_spent():
    tuned, _, clock = study(budget=Budget(run=60.0, total=100.0, trials=3))
    text = tuned.parts.budget.outlook()
    assert "too little for a search" in text
    assert clock.now == 0.0
    enough = re.search(r"budget\.total=(\d+)m", text).group(1)
    larger, _, _ = study(budget=Budget(run=60.0, total=60.0 * int(enough), trials=30))
    assert "too little" not in larger.parts.budget.outlook()
    larger.run()
    assert sum(trial.role == "search" for trial in larger.records()) >= 3


def test_one_that_nobody_gave_follows_from_the_baseline_and_is_kept():
    storage = optuna.storages.InMemoryStorage()
    tuned, told, clock = study(storage, budget=Budget(run=30.0, trials=2))
    tuned.run()
    ((_, text),) = told.announced
    assert tuned.parts.budget.outlook() != text
    total = tuned.parts.budget.total
    reached = baseline_of(tuned).time_to_target_seconds
    assert 10 * reached < total < 30 * reached + 60
    assert clock.now < total
    again, _, _ = study(storage, budget=Budget(run=30.0, trials=2))
    assert again.parts.budget.total == total
    given, _, _ = study(storage, budget=Budget(run=30.0, total=60.0, trials=2))
    assert given.parts.budget.total == 60.0


def test_a_baseline_of_which_no_length_was_asked_ends_when_its_curve_has_levelled_off():
    fast = {"baseline": {"batch_size": 64, "learning_rate": 0.02}}
    open_, _, _ = study(budget=Budget(trials=2), **fast)
    open_.run()
    whole, _, _ = study(budget=Budget(run=60.0, trials=2), **fast)
    whole.run()
    assert baseline_of(open_).training_seconds < 30 < baseline_of(whole).training_seconds
    assert baseline_of(open_).outcome == baseline_of(whole).outcome == "reached"  # the target that it set
    assert open_.target.value == pytest.approx(whole.target.value, rel=0.1)


def test_it_takes_no_more_than_a_tenth_of_a_given_budget():
    tuned, _, _ = study(budget=Budget(total=120.0, trials=2), **SLOWEST)
    tuned.run()
    assert 12.0 <= baseline_of(tuned).training_seconds < 15.0


BEST = Objective(kind="best_metric")
OWN = Objective(metric="val_loss", target=0.5)


@pytest.mark.parametrize(
    ("has_schedule", "objective", "given", "run"),
    [
        (True, Objective(), {"total": 60.0}, 6.0),
        (True, OWN, {"total": 60.0}, 6.0),
        (False, BEST, {"total": 60.0}, 6.0),
        (True, Objective(), {"total": 3600.0}, 60.0),
        (True, Objective(), {}, 60.0),
        (True, Objective(), {"total": 60.0, "run": 20.0}, 20.0),
        (False, OWN, {"total": 60.0}, 60.0),  # it ends at the target
    ],
)
def test_runs_that_take_all_of_their_time_are_as_long_as_the_budget_can_hold(has_schedule, objective, given, run):
    tuned, _, _ = study(has_schedule=has_schedule, objective=objective, budget=Budget(trials=4, **given))
    spec = tuned.parts.limits.spec(tuned.parts.space.baseline, "baseline", 0)
    assert (spec.horizon_seconds, spec.limit_seconds) == (run, run)


@pytest.mark.parametrize(
    ("own", "given", "run"),
    [
        (12.0, {"total": 600.0}, 12.0),
        (12.0, {}, 12.0),
        (100.0, {"total": 1800.0}, 100.0),  # and not the minute of who says nothing
        (100.0, {}, 60.0),
        (100.0, {"total": 300.0}, 30.0),
        (0.1, {}, 1.0),
        (12.0, {"run": 30.0}, 30.0),
    ],
)
def test_with_a_schedule_runs_are_as_long_as_the_users_own_training(own, given, run):
    tuned, _, _ = study(own=own, has_schedule=True, budget=Budget(trials=4, **given))
    assert tuned.parts.limits.spec(tuned.parts.space.baseline, "baseline", 0).horizon_seconds == run
    without, _, _ = study(own=own, objective=OWN, budget=Budget(trials=4, **given))
    assert without.parts.limits.spec(tuned.parts.space.baseline, "baseline", 0).horizon_seconds == given.get("run", 60)


def test_with_a_schedule_a_small_budget_has_room_for_the_search():
    storage, keys = optuna.storages.InMemoryStorage(), {"has_schedule": True} | SLOWEST
    tuned, told, _ = study(storage, budget=Budget(total=60.0, trials=20), **keys)
    tuned.run()
    assert sum(trial.role == "search" for trial in tuned.records()) >= 3
    assert "of up to 6 s" in told.announced[0][1]
    longer, _, _ = study(storage, budget=Budget(total=600.0, trials=20), **keys)  # it goes on, and does not mix
    assert longer.parts.plan.config.budget.run == 6.0
    given, _, _ = study(storage, budget=Budget(run=60.0, total=600.0, trials=20), **keys)  # nor where one is given
    assert given.parts.plan.config.budget.run == 6.0
    started = outlook_at_start(law.plan(budget=Budget(total=60.0)).config, 1, 3.0, has_schedule=True)
    assert "up to 6 s; a run takes as long as your training, if that is known, and a tenth of budget.total" in started


def test_a_study_that_has_no_runs_yet_has_them_as_long_as_its_new_budget_can_hold():
    storage = optuna.storages.InMemoryStorage()
    lengths = [
        study(storage, has_schedule=True, budget=Budget(total=total))[0].parts.plan.config.budget.run
        for total in (60.0, 300.0)
    ]
    assert lengths == [6.0, 30.0]


def test_a_study_of_runs_that_had_60_s_goes_on_with_60():
    storage = optuna.storages.InMemoryStorage()
    study(storage, budget=Budget(run=60.0, total=600.0))[0].trials.add_baseline()  # of a version that kept no length
    tuned, _, _ = study(storage, has_schedule=True, budget=Budget(total=60.0))
    assert tuned.parts.plan.config.budget.run == 60.0


def test_how_long_runs_to_a_target_of_the_users_are_is_not_told_before_one_has_got_there():
    tuned, told, _ = study(objective=OWN, budget=Budget(total=60.0, trials=20))
    tuned.run()
    first, after, *_ = (text for _, text in told.announced)
    assert re.fullmatch(r"5\d(\.\d)? s left; the first run to the target shows how many runs that is", first)
    assert re.search(r"left, about \d+ runs? of [\d.]+ s", after)


def test_it_is_told_again_when_5_percent_of_it_have_shown_what_a_run_takes():
    """On a machine with so much else to do that a second of training takes eight, budget.run is no run's length."""
    tuned, told, clock = study(budget=Budget(run=25.0, total=900.0, trials=30), wall=8.0, **SLOWEST)
    at = []
    told.announce = lambda text: at.append((clock.now, text))
    tuned.run()
    (_, before), (when, text) = at[:2]
    assert "too little" not in before
    assert 0.05 * 900 <= when <= 0.08 * 900
    assert "too little for a search" in text
    assert int(re.search(r"budget\.total=(\d+)m", text).group(1)) > 15


def test_what_only_the_first_evaluation_takes_is_not_taken_to_come_again():
    """As where it imports a library: a second of training beside it takes twenty, and never again."""
    tuned, told, _ = study(budget=Budget(run=60.0, total=1800.0, trials=5), once=100.0)
    tuned.run()
    assert len(told.announced) > 1
    assert not any("too little" in text for _, text in told.announced)


def test_a_baseline_on_a_busy_machine_leaves_half_of_the_rest_to_the_search():
    tuned, _, clock = study(budget=Budget(run=25.0, total=240.0, trials=30), wall=5.5, **SLOWEST)
    tuned.run()
    assert baseline_of(tuned).training_seconds >= 20
    assert sum(trial.role == "search" for trial in tuned.records()) >= 3
    assert clock.now < 240 + 60


def test_what_the_configuration_alone_tells_is_told_before_anything_is_measured():
    config = law.plan(budget=Budget(run=60.0, total=100.0)).config
    text = outlook_at_start(config, 1, 3.0, has_schedule=False)
    assert "too little for a search" in text
    assert text.startswith("97 s left")
    enough = 60.0 * int(re.search(r"budget\.total=(\d+)m", text).group(1))
    config = law.plan(budget=Budget(run=60.0, total=enough)).config
    assert "too little" not in outlook_at_start(config, 1, 3.0, has_schedule=False)


def test_too_little_is_said_with_a_doubt_until_the_search_has_shown_how_long_its_runs_are():
    tuned, told, _ = study(budget=Budget(run=25.0, total=100.0, trials=30), **SLOWEST)
    tuned.run()
    (_, by_the_baseline), *_ = [each for each in told.announced if each[0] == 1]
    assert "too little for a search, unless runs turn out to be shorter; budget.total=" in by_the_baseline
    assert tuned.parts.history.costs("search")
    assert "unless" not in tuned.parts.budget.outlook()


@pytest.mark.parametrize(
    ("steps", "earlier", "ends"),
    [
        ([10.0], [], True),
        ([0.006, 0.5, 10.0], [], False),  # the probe looks above what anybody trains
        ([10.0], [{"step_seconds": 0.006}, {"step_seconds": None}], False),
        ([None], [], False),
    ],
)
def test_a_probe_ends_where_not_even_its_fastest_step_has_time_for_a_run(steps, earlier, ends):
    config = law.plan(budget=Budget(run=6.0, total=60.0)).config
    told = ProbeInTime(config, Observer(), earlier)
    expected = pytest.raises(NothingFitsError, match=r"start again with budget.run=200s budget.total=34m")
    with expected if ends else contextlib.nullcontext():
        for number, seconds in enumerate(steps, 1):
            told.attempted(Attempt(batch_size=number, outcome="fit", seconds=1.0, step_seconds=seconds))

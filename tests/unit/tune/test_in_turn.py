"""Contender and baseline on a busy machine: their steps are timed in turn, so that a slow spell hits both alike."""

from dataclasses import replace

import law
import optuna
import pytest
from fakes import FakeCrew

from batchtune.config.schema import Baseline, Budget, Confirm, Objective
from batchtune.observer import Observer
from batchtune.processes.worker import WorkerDied
from batchtune.protocol.commands import TimeInTurn
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.verdict.scores import at_pace, comparable_paces, is_disturbed

pytestmark = pytest.mark.usefixtures("few_particles")

BASELINE = Baseline(batch_size=32, learning_rate=0.003)
FRESH_SEEDS = 1_000_000  # confirmation's are above
SLOW = 1.3  # times as long a step takes in a slow spell; what is slower still, a run's own clock finds out


class Spells(law.LawWorker):
    """While contenders run on fresh seeds others slow the machine down, and never while the baseline does.

    Attributes:
        asked: batch sizes whose steps were timed in turn.
    """

    asked = ()

    def __init__(self, slow=SLOW, error=None):
        super().__init__()
        self._slow, self._error = slow, error

    def train(self, *, timeout, on_event, **spec):
        baseline = spec["micro_batch_size"] == BASELINE.batch_size
        slow = 1.0 if baseline or spec["seed"] < FRESH_SEEDS else self._slow
        tell = lambda point: on_event(replace(point, seconds=slow * point.seconds))  # noqa: E731
        return super().train(timeout=timeout, on_event=tell, **spec)

    def step_seconds(self, spec):
        if self._error:
            raise self._error
        self.asked = *self.asked, spec.batch_size
        return 3 * super().step_seconds(spec)  # the spell goes on, for all


class Notes(Observer):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def answer(worker, **changes):
    """What a study answers that tries batches of 128 and the baseline's, and what it noted."""
    notes, budget = Notes(), Budget(run=120.0, total=3600.0, trials=10)
    known = {"baseline": BASELINE, "budget": budget, "confirm": Confirm(seeds=3, top=1)}
    plan = law.plan(sizes=(128,), **known | changes)
    tuned = TuneStudy(plan, FakeCrew(worker), optuna.storages.InMemoryStorage(), notes)
    tuned.run()
    return tuned.recommendation()[0], notes.notes


def true_gain(found):
    own = law.seconds_to_target(found.global_batch_size, found.learning_rate)
    return law.seconds_to_target(BASELINE.batch_size, BASELINE.learning_rate) / own


def test_a_slow_spell_that_hit_the_contender_alone_does_not_count_against_it():
    found, _ = answer(Spells())
    assert found.global_batch_size == 128
    assert found.speedup_over_baseline.median == pytest.approx(true_gain(found), rel=0.1)
    assert "timed in turn" in found.reason
    assert found.timed_in_turn


def test_times_are_given_as_on_the_machine_at_its_fastest():
    found, _ = answer(Spells(), objective=Objective(target=0.5))
    own = law.seconds_to_target(found.global_batch_size, found.learning_rate, target=0.5)
    assert found.time_to_target_seconds.median == pytest.approx(own, rel=0.15)


def test_on_a_quiet_machine_nothing_is_timed_in_turn():
    worker = Spells(slow=1.0)
    found, notes = answer(worker)
    assert worker.asked == ()
    assert "in turn" not in found.reason
    assert not any("busy" in note for note in notes)


@pytest.mark.parametrize("outcome", ["oom", "crash"])
def test_what_does_not_fit_beside_the_other_is_compared_by_its_runs(outcome):
    found, notes = answer(Spells(error=WorkerDied(outcome, "no room for both")))
    assert found.speedup_over_baseline.median == pytest.approx(true_gain(found) / SLOW, rel=0.1)
    assert any("no room for both" in note for note in notes)


def test_where_not_even_steps_in_turn_compare_it_is_compared_by_its_runs():
    class Shaken(Spells):
        def call(self, command, **how):
            is_in_turn = isinstance(command, TimeInTurn)
            return ((1.0, 2.0), (9.0, 1.0), (1.0, 8.0)) if is_in_turn else super().call(command, **how)

    found, notes = answer(Shaken())
    assert found.speedup_over_baseline.median == pytest.approx(true_gain(found) / SLOW, rel=0.1)
    assert not found.timed_in_turn
    assert any("too busy" in note for note in notes)


def test_a_resumed_study_does_not_time_them_again():
    worker, storage = Spells(), optuna.storages.InMemoryStorage()
    plan = law.plan(sizes=(128,), baseline=BASELINE, budget=Budget(run=120.0, total=3600.0, trials=10))
    for _ in range(2):
        TuneStudy(plan, FakeCrew(worker), storage, Observer()).run()
    assert sorted(set(worker.asked)) == [32, 128]
    assert worker.asked.count(32) == 1


class TestPaces:
    def test_a_spell_in_some_rounds_leaves_the_ratio_as_it_is(self):
        rounds = [(1.0, 2.0), (1.7, 3.4), (1.7, 2.0), (1.0, 2.0), (1.0, 3.4), (1.0, 2.0)]
        assert comparable_paces(rounds, [None, None]) == [1.0, 2.0]

    def test_rounds_that_disagree_about_the_ratio_tell_none(self):
        rounds = [(1.0, 2.0), (5.0, 1.9), (1.1, 9.0), (4.0, 2.0), (1.0, 8.0), (3.0, 2.5)]
        assert comparable_paces(rounds, [None, None]) is None

    def test_a_spell_that_lasts_is_taken_out_of_all_by_what_is_known(self):
        assert comparable_paces([(3.0, 6.0)] * 4, [1.0, None]) == [1.0, 2.0]
        assert comparable_paces([(3.0, 6.0)] * 4, [1.0, 4.0]) == [1.0, 2.0]  # the other ran in a spell
        assert comparable_paces([(1.0, 2.0)] * 4, [1.5, 3.0]) == [1.0, 2.0]  # both did

    def test_runs_of_one_configuration_whose_steps_took_unlike_long_are_disturbed(self):
        tuned = TuneStudy(
            law.plan(sizes=(128,), baseline=BASELINE, budget=Budget(run=120.0, total=3600.0, trials=2)),
            FakeCrew(law.LawWorker()),
            optuna.storages.InMemoryStorage(),
            Observer(),
        )
        tuned.run()
        found = [trial for trial in tuned.records() if trial.role != "search" and trial.batch_size == 32]
        assert not is_disturbed(found)
        pace = found[0].training_seconds / found[0].curve[-1].samples * 32
        assert not is_disturbed([at_pace(found[0], 1.04 * pace), *found])
        slow = at_pace(found[0], 1.1 * pace)
        assert is_disturbed([slow, *found])
        starting = slow.model_copy(update={"starting_seconds": 0.2 * slow.training_seconds})
        assert not is_disturbed([starting, *found[1:]])  # steps in turn would not have it

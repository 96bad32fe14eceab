import collections
import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections import defaultdict
from types import SimpleNamespace

import law
import numpy.testing  # noqa: F401 - NumPy 1 starts lscpu at its first import, which drawing would do in a test
import optuna
import pytest
from fakes import FakeCrew
from optuna.storages.journal import JournalFileBackend

from batchtune.config.schema import Baseline, Budget, Confirm, Objective
from batchtune.document import Attempt, CurvePoint, NoiseScale, Prior, RangeTest, ThroughputFit, config_of
from batchtune.errors import NothingFitsError, UsageError, UserCodeError
from batchtune.observer import Observer
from batchtune.processes.worker import NodeLost, WorkerDied
from batchtune.protocol.messages import pace_kind
from batchtune.tune.plan.space import Space
from batchtune.tune.study import trials as trials_of_study
from batchtune.tune.study.confirmation import Confirmation
from batchtune.tune.study.history import StudyHistory, curve_attribute
from batchtune.tune.study.limits import CAP_FACTOR, LOST_FACTOR, Limits
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import open_storage
from batchtune.tune.study.targets import Targets
from batchtune.tune.verdict.recommend import recommend
from batchtune.tune.verdict.scores import SECONDS

pytestmark = pytest.mark.usefixtures("few_particles")

BUDGET = Budget(run=120.0, total=3600.0, trials=14)
MEMORY = defaultdict(optuna.storages.InMemoryStorage)  # a journal costs a disk's patience for each evaluation


def study(folder, worker=None, *, storage=None, settled=None, clock=time.perf_counter, at_once=1, **changes):
    """A study on the law, the same for the same folder; `settled` is what else the plan says, the rest are keys."""
    worker = worker or law.LawWorker(noise=0.05)
    planned = dataclasses.replace(law.plan(**{"budget": BUDGET} | changes), **settled or {})
    return TuneStudy(planned, FakeCrew(worker, at_once), storage or MEMORY[folder], Observer(), clock)


@pytest.fixture(scope="module")
def ran():
    """A worker that ran a whole study; what is asked about it writes nothing."""
    return law.LawWorker(noise=0.05)


@pytest.fixture(scope="module")
def finished(ran):
    tuned = study("finished", ran)
    tuned.run()
    return tuned


@pytest.fixture(scope="module")
def unconfirmed():
    tuned = study("unconfirmed", budget=Budget(run=120.0, total=3600.0, trials=6), confirm=Confirm(seeds=0))
    tuned.run()
    return tuned


def test_a_run_is_told_how_much_of_budget_total_is_left_once_the_task_was_opened():
    told = []

    class Worker(law.LawWorker):
        def train(self, **spec):
            told.append(spec["wall_seconds"])
            return super().train(**spec)

    keys = {"budget": Budget(run=120.0, total=600.0, trials=2), "confirm": Confirm(seeds=0)}
    planned = law.plan(**keys)
    TuneStudy(planned, FakeCrew(Worker()), MEMORY["opened"], Observer(), lambda: 0.0, opening_seconds=60.0).run()
    spent = planned.probe.seconds + (planned.prior.seconds if planned.prior else 0.0)
    assert told[0] == pytest.approx(600.0 - 60.0 - spent)


def why_nothing(tuned):
    with pytest.raises(NothingFitsError) as told:
        tuned.answer()
    return str(told.value)


def test_a_study_finds_a_configuration_close_to_the_best_and_confirms_it(finished):
    tuned = finished
    found, base = recommend(tuned.records(), kind="time_to_target", goal="minimize")
    assert found.speedup_over_baseline.low > 1
    best = min(law.seconds_to_target(b, law.best_rate(b)) for b in (8, 16, 32, 64, 128, 256, 512))
    assert law.seconds_to_target(found.global_batch_size, found.learning_rate) <= 1.25 * best
    assert base.global_batch_size == 16


def test_optuna_shows_what_the_values_are_and_none_of_a_run_that_was_pruned(finished):
    trials = finished.parts.study.get_trials()
    assert finished.parts.study.metric_names == ["seconds to target"]
    pruned = [each for each in trials if each.state.name == "PRUNED"]
    assert pruned
    assert all(each.intermediate_values for each in pruned)
    assert {each.value for each in pruned} == {None}


def test_the_runs_of_a_search_share_their_luck_and_one_that_comes_again_has_its_own(finished):
    searched = [each for each in finished.records() if each.role == "search"]
    seeds = {}
    for each in searched:
        seeds.setdefault((each.batch_size, each.learning_rate), []).append(each.seed)
    assert len(seeds) > 1
    assert all(found == list(range(len(found))) for found in seeds.values())
    first = searched[0].batch_size, searched[0].learning_rate
    assert finished.trials.search_seed(finished.parts.space.of(searched[0])) == len(seeds[first])


def test_confirmation_runs_on_seeds_the_search_has_not_seen(finished):
    seeds = {role: {each.seed for each in finished.records() if each.role == role} for role in ("search", "confirm")}
    assert len(seeds["confirm"]) == 3
    assert not seeds["search"] & seeds["confirm"]


def test_no_run_of_the_search_trains_longer_than_the_cap(finished, ran):
    best = None
    for record, spec in zip(finished.records(), ran.specs, strict=True):
        if record.role == "search" and best is not None:
            assert spec["limit_seconds"] <= CAP_FACTOR * best + 1e-9
        if record.time_to_target_seconds is not None:
            best = min(best or 1e9, record.time_to_target_seconds)


def test_the_same_seed_and_a_simulated_clock_give_the_same_trials(tmp_path, finished):
    def params(tuned):
        return [(t.role, t.batch_size, t.learning_rate, t.seed, t.time_to_target_seconds) for t in tuned.records()]

    again = study(tmp_path)
    again.run()
    assert params(again) == params(finished)


@pytest.mark.parametrize("interruption", [1, 2, 5, 12])
def test_an_interrupted_study_goes_on_and_repeats_no_completed_trial(tmp_path, interruption):
    broken = study(tmp_path, law.LawWorker(noise=0.05, fail_at=[interruption]))
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    before = [trial for trial in broken.records() if trial.state in {"complete", "pruned"}]
    resumed = study(tmp_path)
    resumed.run()
    after = {trial.number: trial for trial in resumed.records()}
    assert all(after[trial.number] == trial for trial in before)
    done = [
        (t.role, t.batch_size, t.learning_rate, t.seed) for t in after.values() if t.state in {"complete", "pruned"}
    ]
    assert len(done) == len(set(done))
    confirmed = [t for t in after.values() if t.role == "confirm" and t.state in {"complete", "pruned"}]
    assert len(confirmed) == 9


def test_a_trial_cut_off_before_anything_was_chosen_for_it_is_no_record(tmp_path):
    tuned = study(tmp_path)
    tuned.parts.study.ask()
    assert tuned.records() == []
    tuned.run()
    assert all(record.learning_rate > 0 for record in tuned.records())


def test_a_finished_study_started_again_trains_nothing(tmp_path):
    first = study(tmp_path)
    first.run()
    worker = law.LawWorker()
    study(tmp_path, worker).run()
    assert worker.specs == []


def test_a_larger_budget_lets_the_search_go_on(tmp_path):
    study(tmp_path, budget=Budget(run=120.0, total=3600.0, trials=2)).run()
    worker = law.LawWorker()
    study(tmp_path, worker, budget=Budget(run=120.0, total=3600.0, trials=4)).run()
    assert len(worker.specs) >= 2


def test_batches_beyond_memory_are_accumulated(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker, baseline=Baseline(batch_size=512, learning_rate=1e-3))
    tuned.run()
    assert worker.specs[0]["micro_batch_size"] == 256
    assert worker.specs[0]["accumulation_steps"] == 2


def test_a_target_met_before_training_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="met before training"):
        study(tmp_path, objective=Objective(target=2.5)).run()


def test_a_baseline_that_never_improves_is_said_to_be_the_problem(tmp_path):
    with pytest.raises(NothingFitsError, match="did not improve val_loss"):
        study(tmp_path, baseline=Baseline(batch_size=16, learning_rate=0.9)).run()


def test_a_target_that_no_run_reaches_is_said_to_be_too_hard(tmp_path):
    tuned = study(tmp_path, objective=Objective(target=0.01), budget=Budget(run=5.0, total=3600.0, trials=2))
    tuned.run()
    assert tuned.recommendation() == (None, None)
    told, best, rest = re.split(r"; the best was ([\d.]+)\)", why_nothing(tuned))
    assert (told, 0.01 < float(best) < 2.5) == ("no run reached the target (val_loss at most 0.01", True)
    assert rest == " within budget.run (5 s); raise budget.run, or set an easier objective.target"


class Saying(law.LawWorker):
    """Trains as the law has it and says another metric of it."""

    def __init__(self, metric):
        super().__init__()
        self._metric = metric

    def train(self, *, on_event, **arguments):
        said = lambda event: on_event(dataclasses.replace(event, value=self._metric(event.seconds)))  # noqa: E731
        return super().train(on_event=said, **arguments)


SHORT = Budget(run=5.0, total=3600.0, trials=2)
SHORT_SEARCH, ROLES = Budget(run=120.0, total=3600.0, trials=8), ("baseline", "search")


@pytest.mark.parametrize("kind", ["time_to_target", "best_metric"])
def test_a_metric_that_is_no_number_before_training_is_the_users(tmp_path, kind):
    with pytest.raises(UserCodeError, match=r"val_loss is NaN or infinite before training; fix evaluate"):
        study(tmp_path, Saying(lambda _: math.nan), objective=Objective(kind=kind), budget=SHORT).run()


def test_a_metric_that_never_changes_has_no_target_to_race_for(tmp_path):
    with pytest.raises(
        NothingFitsError, match=r"the baseline did not improve val_loss \(minimize\) in [\d.]+ m?s of training"
    ):
        study(tmp_path, Saying(lambda _: 0.5), budget=SHORT).run()


def test_the_best_of_a_metric_that_never_changes_is_no_better_than_the_baseline(tmp_path):
    tuned = study(tmp_path, Saying(lambda _: 0.5), objective=Objective(kind="best_metric"), budget=SHORT)
    tuned.run()
    found, base = tuned.recommendation()
    assert (found.global_batch_size, found.value.median) == (base.global_batch_size, 0.5)
    assert found.reason == (
        "no significant improvement over the baseline; the best candidate came to 0.5 against 0.5 of the baseline, "
        "median over 3 fresh seeds each"
    )


@pytest.mark.parametrize(("total", "workers", "contenders"), [(20.0, 1, 1), (3600.0, 1, 2), (20.0, 3, 2), (26.0, 2, 2)])
def test_fewer_contenders_for_the_best_metric_are_confirmed_on_all_seeds(tmp_path, total, workers, contenders):
    """Runs of the law take no time, so that what is left when confirmation begins is about what there was."""
    budget = Budget(run=2.5, total=total, trials=8)
    tuned = study(tmp_path, objective=Objective(kind="best_metric"), budget=budget, at_once=workers)
    tuned.run()
    confirmed = {(t.batch_size, t.learning_rate) for t in tuned.records() if t.role == "confirm"}
    assert len(confirmed) == 1 + contenders


def test_the_best_metric_within_a_budget_can_be_the_objective(tmp_path):
    tuned = study(tmp_path, objective=Objective(kind="best_metric"), budget=Budget(run=5.0, total=3600.0, trials=12))
    tuned.run()
    found, base = recommend(tuned.records(), kind="best_metric", goal="minimize")
    assert found.value.median < base.value.median
    assert found.time_to_target_seconds is None


class Probing(law.LawWorker):
    """Keeps the order of roles that a study trained; runs above a rate settle early, as they do past the edge."""

    def __init__(self, settles_above=1.0):
        super().__init__(noise=0.05)
        self.settles_above = settles_above

    def train(self, *, timeout, on_event, **spec):
        if spec["learning_rate"] <= self.settles_above:
            return super().train(timeout=timeout, on_event=on_event, **spec)
        self.specs.append(spec)
        for number in range(200):
            seconds = min(spec["limit_seconds"], 0.02 * 1.07**number)
            value = 1.0 + math.exp(-8 * seconds)
            if not on_event(CurvePoint(seconds=seconds, samples=number, value=value)):
                return {"outcome": "pruned"}
        return {"outcome": "finished"}


def measured(rate, size=64):
    test = RangeTest(
        batch_size=size,
        edge_learning_rate=4 * rate,
        lowest_loss_learning_rate=2 * rate,
        highest_learning_rate=4 * rate,
        steps=40,
        seconds=1.0,
    )
    return Prior(
        batch_sizes=[8, 16, 32, 64, 128, 256, 512],
        batch_sizes_reason="for the test",
        learning_rate=rate,
        learning_rate_decades=0.3,
        learning_rate_reason="for the test",
        start_batch_size=size,
        range_tests=[test],
        noise_scale=NoiseScale(samples=128.0, batch_sizes=[16, 128], draws=4, seconds=1.0),
    )


def test_with_a_target_and_a_range_test_the_search_comes_first_and_the_baseline_after_it(tmp_path):
    tuned = study(tmp_path, settled={"prior": measured(0.01)}, objective=Objective(target=0.5))
    tuned.run()
    records = tuned.records()
    assert (records[0].role, records[0].batch_size, records[0].learning_rate) == ("search", 64, 0.01)
    roles = [trial.role for trial in records]
    assert roles.index("baseline") > max(number for number, role in enumerate(roles) if role == "search")
    found, base = tuned.recommendation()
    assert found.speedup_over_baseline.low > 1
    assert base.global_batch_size == 16


def test_no_baseline_is_run_once_the_budget_is_used_up(tmp_path):
    short = {"objective": Objective(target=0.01), "budget": Budget(run=10.0, total=30.0)}
    tuned = study(tmp_path, settled={"prior": measured(0.01)}, clock=Watch(), **short)
    tuned.run()
    assert {trial.role for trial in tuned.records()} == {"search"}
    assert why_nothing(tuned).startswith("no run reached the target (val_loss at most 0.01; the best was ")


@pytest.mark.parametrize(("workers", "baseline"), [(2, None), (4, 1)])
def test_several_workers_search_from_the_start_and_from_four_on_one_runs_the_baseline(tmp_path, workers, baseline):
    prior, target = measured(0.01), Objective(target=0.5)
    tuned = study(tmp_path, settled={"prior": prior}, objective=target, at_once=workers)
    tuned.run()
    records = tuned.records()
    assert (records[0].role, records[0].batch_size, records[0].learning_rate) == ("search", 64, 0.01)
    roles = [trial.role for trial in records]
    searched = max(number for number, role in enumerate(roles) if role == "search")
    assert roles.index("baseline") == (searched + 1 if baseline is None else baseline)
    assert roles.count("baseline") == 1
    assert roles.count("confirm") == 9


def test_two_workers_of_whose_first_runs_nothing_comes_run_the_baseline_beside_the_search(tmp_path):
    worker = Probing(settles_above=2e-3)
    tuned = study(tmp_path, worker, settled={"prior": measured(0.9)}, objective=Objective(target=0.5), at_once=2)
    tuned.run()
    assert [trial.role for trial in tuned.records()[:5]] == ["search", "search", "search", "baseline", "search"]


def test_a_first_run_that_comes_to_nothing_is_followed_by_one_at_a_lower_rate(tmp_path):
    worker = Probing(settles_above=0.05)
    tuned = study(tmp_path, worker, settled={"prior": measured(0.09)}, objective=Objective(target=0.5))
    tuned.run()
    first, second = tuned.records()[:2]
    assert (first.outcome, second.outcome) == ("pruned", "reached")
    assert second.learning_rate == pytest.approx(0.03)
    assert first.training_seconds < 0.2 * worker.specs[0]["limit_seconds"]


OUTSIDE = {"learning_rate": {"min": 1e-3, "max": 0.012345}, "baseline": Baseline(batch_size=4, learning_rate=0.03)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": Objective(kind="best_metric"), "budget": Budget(run=5.0, total=3600.0, trials=20)},
        {"space": {"momentum": {"min": 0.0, "max": 0.95}}},
    ],
)
def test_nothing_but_the_baseline_is_run_outside_of_the_users_bounds(tmp_path, changes):
    settled = {"optimizer_defaults": {"momentum": 0.9}}
    for _ in range(2):  # the second start goes on in the same study
        tuned = study(tmp_path, settled=settled, sizes=(32, 64), **OUTSIDE | changes)
        tuned.run()
    searched = [trial for trial in tuned.records() if trial.role == "search"]
    assert len(searched) >= 8
    assert {trial.batch_size for trial in searched} <= {32, 64}
    assert all(1e-3 <= trial.learning_rate <= 0.012345 for trial in searched)
    others = {(trial.batch_size, trial.learning_rate) for trial in tuned.records() if trial.role != "search"}
    assert (4, 0.03) in others
    assert others - {(4, 0.03)} <= {(trial.batch_size, trial.learning_rate) for trial in searched}


def test_the_first_runs_keep_to_the_users_rates(tmp_path):
    rates = {"min": 0.012345, "max": 0.023456}
    settled = {"prior": measured(0.09)}
    tuned = study(tmp_path, settled=settled, objective=Objective(target=0.5), learning_rate=rates)
    tuned.run()
    assert tuned.records()[0].learning_rate == 0.023456
    assert all(0.012345 <= trial.learning_rate <= 0.023456 for trial in tuned.records() if trial.role == "search")


def test_where_nothing_comes_of_the_first_runs_the_baseline_is_run_before_the_search(tmp_path):
    worker = Probing(settles_above=2e-3)
    tuned = study(tmp_path, worker, settled={"prior": measured(0.9)}, objective=Objective(target=0.5))
    tuned.run()
    assert [trial.role for trial in tuned.records()[:5]] == ["search", "search", "search", "baseline", "search"]


def test_the_baseline_is_confirmed_no_longer_than_is_needed_to_see_that_it_lost(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker, settled={"prior": measured(0.01)}, objective=Objective(target=0.5))
    tuned.run()
    records = tuned.records()
    fresh = [each for each in records if each.role == "confirm" and each.time_to_target_seconds]
    cut = [each for each in records if each.role == "confirm" and each.batch_size == 16]
    assert len(cut) == 3
    assert max(each.training_seconds for each in cut) <= 3 * max(each.time_to_target_seconds for each in fresh) + 1e-9
    found, _ = tuned.recommendation()
    assert found.speedup_over_baseline.at_least


def test_the_least_energy_can_be_the_objective(tmp_path, finished):
    tuned = study(tmp_path, objective=Objective(kind="energy_to_target"))
    tuned.run()
    found, base = recommend(tuned.records(), kind="energy_to_target", goal="minimize")
    assert found.energy_saving_over_baseline.low > 1
    assert found.energy_to_target_joules.median < base.energy_to_target_joules.median
    assert "sparingly" in found.reason
    # a sample costs the same energy in any batch, so that the least takes a smaller batch than the least time does
    fastest, _ = recommend(finished.records(), kind="time_to_target", goal="minimize")
    assert found.global_batch_size < fastest.global_batch_size


def test_no_run_of_the_search_uses_much_more_energy_than_the_best(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker, objective=Objective(kind="energy_to_target"))
    tuned.run()
    best = None
    for record, spec in zip(tuned.records(), worker.specs, strict=True):
        if record.role == "search":
            assert spec["limit_joules"] == pytest.approx(CAP_FACTOR * best)
            assert record.curve[-1].joules <= 1.1 * CAP_FACTOR * best  # looked at every 5 %
        if record.role != "confirm" and record.energy_to_target_joules is not None:
            best = min(best or 1e9, record.energy_to_target_joules)


def test_arguments_of_the_optimizer_are_searched_recorded_and_confirmed(tmp_path):
    space = {"weight_decay": {"min": 1e-3, "max": 1.0, "log": True}, "nesterov": {"choices": [True]}}
    worker = law.LawWorker(slower=lambda arguments: 1.0 if arguments["nesterov"] else 3.0)
    tuned = study(
        tmp_path,
        worker,
        space=space,
        settled={"optimizer_defaults": {"weight_decay": 0.01, "nesterov": False}},
        budget=Budget(run=120.0, total=3600.0, trials=30),
    )
    tuned.run()
    records = tuned.records()
    assert records[0].optimizer_arguments == {"weight_decay": 0.01, "nesterov": False}  # as it is run today
    for record, spec in zip(records, worker.specs, strict=True):
        assert spec["optimizer_arguments"] == record.optimizer_arguments
    found, base = recommend(records, kind="time_to_target", goal="minimize")
    assert found.optimizer_arguments["nesterov"] is True
    assert base.optimizer_arguments == records[0].optimizer_arguments
    assert tuned.parts.study.best_trial.params.keys() == {"batch_size", "learning_rate", "weight_decay", "nesterov"}
    searched = [record for record in records if record.role == "search"]
    assert all(1e-3 <= record.optimizer_arguments["weight_decay"] <= 1.0 for record in searched)
    assert len(searched) == 30  # budget.trials: what the surface expects says nothing of these


def test_an_argument_is_not_searched_beyond_the_users_bounds(tmp_path):
    space = {"momentum": {"min": 0.8, "max": 0.99}}
    tuned = study(tmp_path, space=space, settled={"optimizer_defaults": {"momentum": 0.0}}, budget=SHORT_SEARCH)
    tuned.run()
    found = {role: [t.optimizer_arguments["momentum"] for t in tuned.records() if t.role == role] for role in ROLES}
    assert set(found["baseline"]) == {0.0}
    assert len(set(found["search"])) > 5
    assert all(0.8 <= each <= 0.99 for each in found["search"])


class Raising(law.LawWorker):
    """The user's code raises in these runs of the study; the first is run 0."""

    def __init__(self, runs):
        super().__init__(noise=0.05)
        self._raising = set(runs)

    def train(self, *, on_event, **spec):
        if len(self.specs) in self._raising:
            self.specs.append(spec)
            raise UserCodeError("compute_loss raised AssertionError")
        return super().train(on_event=on_event, **spec)


def test_a_task_that_raises_again_and_again_ends_the_search_and_what_got_there_is_confirmed(tmp_path):
    tuned = study(tmp_path, Raising({2, 4, 5}))
    tuned.run()
    roles = [(trial.role, trial.outcome) for trial in tuned.records()]
    assert roles[:6].count(("search", "user_error")) == 3
    assert {role for role, _ in roles[6:]} == {"confirm"}
    assert tuned.recommendation()[0].speedup_over_baseline is not None
    again = study(tmp_path, worker := Raising(()))
    again.run()
    assert worker.specs == []


def test_a_search_in_which_nothing_but_errors_comes_ends_with_the_error_and_the_next_start_tries_again(tmp_path):
    for runs in (range(1, 40), range(40)):  # the baseline has run when it starts again
        worker = Raising(runs)
        with pytest.raises(UserCodeError, match="compute_loss raised AssertionError"):
            study(tmp_path, worker).run()
        assert len(worker.specs) == 3 + (0 not in runs)
    mended = study(tmp_path)
    mended.run()
    assert mended.recommendation()[0].speedup_over_baseline is not None


def test_errors_do_not_stop_what_another_worker_still_trains(tmp_path):
    tuned = study(tmp_path)
    tuned.trials.raised.extend([UserCodeError("compute_loss raised AssertionError")] * 3)
    tuned.trials.add(tuned.parts.space.baseline, "search", 0)
    running = tuned.parts.study.ask(tuned.parts.space.distributions)
    assert not tuned.search.is_wanted()
    tuned.parts.study.tell(running, state=optuna.trial.TrialState.FAIL)
    with pytest.raises(UserCodeError, match="compute_loss raised AssertionError"):
        tuned.search.is_wanted()


def test_a_fixed_global_batch_is_made_up_of_the_micro_batch_that_was_chosen(tmp_path):
    worker = law.LawWorker(noise=0.05)
    prior = Prior(
        batch_sizes=[512],
        batch_sizes_reason="kept",
        learning_rate=0.01,
        learning_rate_decades=0.7,
        learning_rate_reason="for the test",
        micro_batch_size=128,
    )
    settled = {"prior": prior}
    tuned = study(tmp_path, worker, settled=settled, batch_size={"global": 512}, baseline={"learning_rate": 1e-3})
    tuned.run()
    assert {(spec["micro_batch_size"], spec["accumulation_steps"]) for spec in worker.specs} == {(128, 4)}
    assert len({spec["learning_rate"] for spec in worker.specs}) > 3


def test_every_run_of_a_configuration_has_the_same_horizon_whatever_its_limit(tmp_path):
    class Scheduled(law.LawWorker):
        def train(self, **spec):
            return super().train(**spec) | {"total_steps": spec["total_steps"] or 1000 + len(self.specs)}

    worker = Scheduled(noise=0.05)
    tuned = study(tmp_path, worker)
    tuned.run()
    assert {spec["horizon_seconds"] for spec in worker.specs} == {120.0}
    horizons = {}
    for record in tuned.records():
        horizons.setdefault((record.batch_size, record.learning_rate), set()).add(record.total_steps)
    assert len(horizons) < len(worker.specs)
    assert all(len(each) == 1 for each in horizons.values())
    found, _ = recommend(tuned.records(), kind="time_to_target", goal="minimize")
    assert found.total_steps in horizons[found.global_batch_size, found.learning_rate]


class Small(law.LawWorker):
    """Has no memory for micro-batches of more than 100 samples in one precision."""

    def train(self, **spec):
        if spec["precision"] == "fp32" and spec["micro_batch_size"] > 100:
            self.specs.append(spec)
            raise WorkerDied("oom", "CUDA out of memory")
        return super().train(**spec)


def test_a_precision_that_takes_more_memory_goes_on_in_smaller_micro_batches(tmp_path):
    worker = Small(noise=0.05)
    tuned = study(tmp_path, worker, settled={"precisions": ["bf16", "fp32"]}, sizes=(16, 256))
    tuned.run()
    runs = {name: [spec for spec in worker.specs if spec["precision"] == name] for name in ("bf16", "fp32")}
    assert {spec["micro_batch_size"] for spec in runs["bf16"]} <= {16, 256}
    large = [spec["micro_batch_size"] for spec in runs["fp32"] if spec["micro_batch_size"] > 16]
    assert large == sorted(large, reverse=True)
    assert large.count(256) == large.count(128) == 1  # after which both are known to be too large
    assert set(large[2:]) == {64}
    assert all(spec["micro_batch_size"] * spec["accumulation_steps"] in {16, 256} for spec in worker.specs)


class Failing(law.LawWorker):
    """Its first run dies after a while."""

    outcome, message = "crash", "the process died by SIGKILL"

    def train(self, *, on_event, **spec):
        if self.specs:
            return super().train(on_event=on_event, **spec)
        self.specs.append(spec)
        for seconds, value in enumerate((2.0, 1.9, 1.8, 1.7)):
            on_event({"seconds": float(seconds), "samples": 100 * seconds, "value": value})
        raise WorkerDied(self.outcome, self.message)


def test_a_baseline_that_dies_sets_no_target(tmp_path):
    with pytest.raises(NothingFitsError, match="the baseline could not be trained: the process died by SIGKILL"):
        study(tmp_path, Failing()).run()
    again = study(tmp_path)
    assert again.target.value is None
    again.run()
    assert again.target.value < 1.0


def test_a_baseline_that_runs_out_of_memory_is_told_with_what_helps(tmp_path):
    worker = Failing()
    worker.outcome, worker.message = "oom", "could not create a primitive"
    told = (
        "the baseline ran out of memory: could not create a primitive; make baseline.batch_size smaller, or memory.lim"
    )
    with pytest.raises(NothingFitsError, match=told):
        study(tmp_path, worker).run()


def test_a_baseline_cut_off_by_the_budget_sets_no_target_and_runs_again_with_a_larger_one(tmp_path):
    with pytest.raises(NothingFitsError, match=r"budget.total \(30 s\) was used up before the baseline had shown"):
        study(tmp_path, budget=Budget(run=10.0, total=30.0, trials=4), clock=Watch()).run()
    again = study(tmp_path, budget=Budget(run=10.0, total=1e6, trials=4))
    again.run()
    assert again.target.value is not None
    assert [trial.state for trial in again.records() if trial.role == "baseline"] == ["fail", "complete"]


def test_a_baseline_that_is_cut_off_runs_again_where_a_run_is_judged_by_how_far_it_gets(tmp_path):
    changes = {"objective": Objective(kind="best_metric"), "confirm": Confirm(seeds=0)}
    with contextlib.suppress(NothingFitsError):
        study(tmp_path, budget=Budget(run=10.0, total=30.0, trials=1), clock=Watch(), **changes).run()
    again = study(tmp_path, budget=Budget(run=10.0, total=1e6, trials=1), **changes)
    again.run()
    assert [each.state for each in again.records() if each.role == "baseline"] == ["fail", "complete"]


def test_a_fresh_run_that_was_interrupted_puts_no_contender_aside(tmp_path):
    changes, worker = {"confirm": Confirm(seeds=3, top=1)}, law.LawWorker(noise=0.0)
    worker.fail_at = {12}
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, worker, budget=Budget(run=60.0, total=3000.0, trials=10), **changes).run()
    again = study(tmp_path, law.LawWorker(noise=0.0), budget=Budget(run=60.0, total=4000.0, trials=10), **changes)
    again.run()
    (lost,) = [each for each in again.records() if each.role == "confirm" and each.state == "fail"]
    found, _ = again.recommendation()
    assert (found.global_batch_size, found.learning_rate) == (lost.batch_size, lost.learning_rate)


def test_a_search_whose_first_run_got_there_is_not_opened_again_when_it_is_gone_on_with(tmp_path):
    given = {"settled": {"prior": measured(0.02)}, "objective": Objective(target=0.5), "confirm": Confirm(seeds=0)}
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, law.LawWorker(noise=0.05, fail_at=[2]), **given).run()
    again = study(tmp_path, **given)
    again.run()
    rates = [each.learning_rate for each in again.records() if each.role == "search"]
    assert rates[0] == 0.02
    assert not [
        rate for rate in rates if rate == pytest.approx(0.02 / 3, rel=0.01) or rate == pytest.approx(0.02 / 9, rel=0.01)
    ]


@pytest.mark.parametrize("trials", [1, 2])
def test_first_runs_that_come_to_nothing_are_no_more_than_were_asked_for(tmp_path, trials):
    settled = {"prior": measured(1.0)}
    tuned = study(tmp_path, settled=settled, objective=Objective(target=0.5), budget=Budget(run=120.0, trials=trials))
    tuned.run()
    assert [each.role for each in tuned.records()].count("search") == trials


class Watch:
    """A clock: every look at it takes a second."""

    def __init__(self):
        self.looks = itertools.count()

    def __call__(self):
        return float(next(self.looks))


@pytest.mark.parametrize("total", [10.0, 60.0, 150.0, 400.0, 900.0])
def test_no_more_than_a_rung_is_trained_once_the_budget_is_used_up(tmp_path, total):
    watch = Watch()
    tuned = study(tmp_path, budget=Budget(run=10.0, total=total, trials=100), clock=watch)
    with contextlib.suppress(NothingFitsError):  # too short for a target
        tuned.run()
    assert next(watch.looks) <= total + 8  # an evaluation, and what is looked at around it
    cut = [trial for trial in tuned.records() if trial.role == "confirm" and trial.state == "fail"]
    assert all(trial.message == "budget.total was used up" for trial in cut)


def test_a_confirmation_cut_off_by_the_budget_is_made_up_for_with_a_larger_one(tmp_path, monkeypatch):
    changes = {"budget": Budget(run=10.0, total=400.0, trials=4), "confirm": Confirm(seeds=3, top=2)}
    tuned = study(tmp_path, clock=Watch(), **changes)
    monkeypatch.setattr(tuned.parts.budget, "reserve", lambda: 0.0)
    tuned.run()
    assert 0 < sum(1 for trial in tuned.records() if trial.role == "confirm" and trial.state == "complete") < 9
    study(tmp_path, budget=Budget(run=10.0, total=1e6, trials=4), confirm=Confirm(seeds=3, top=2)).run()
    again = study(tmp_path, budget=Budget(run=10.0, total=1e6, trials=4), confirm=Confirm(seeds=3, top=2))
    confirmed = [
        trial for trial in again.records() if trial.role == "confirm" and trial.state in {"complete", "pruned"}
    ]
    assert len(confirmed) >= 9


class Timed(law.LawWorker):
    """Training moves a clock."""

    now = 0.0

    def train(self, *, timeout, on_event, **spec):
        points = []

        def told(point):
            points.append(point)
            return on_event(point)

        end = super().train(timeout=timeout, on_event=told, **spec)
        self.now += points[-1].seconds
        return end


@pytest.mark.parametrize(("share", "seeds_of_the_other"), [(1.05, 3), (0.9, 1)])
def test_where_time_runs_short_the_best_contender_is_confirmed_alone(tmp_path, monkeypatch, share, seeds_of_the_other):
    def run(total):
        worker = Timed(noise=0.05)
        changes = {"budget": Budget(run=10.0, total=total, trials=4), "confirm": Confirm(seeds=3, top=2)}
        tuned = study(tmp_path / str(total), worker, clock=lambda: worker.now, **changes)
        monkeypatch.setattr(tuned.parts.budget, "reserve", lambda: 0.0)
        tuned.run()
        return tuned

    took = {True: 0.0, False: law.plan().probe.seconds + law.plan().prior.seconds}
    for each in run(1e6).records():
        took[each.role == "confirm"] += each.training_seconds
    tuned = run(took[False] + share * took[True])
    groups = collections.Counter(
        (each.batch_size, each.learning_rate) for each in tuned.records() if each.role == "confirm"
    )
    assert sorted(groups.values()) == [seeds_of_the_other, 3, 3]
    found, base = tuned.recommendation()
    assert groups[found.global_batch_size, found.learning_rate] == 3
    assert found.seeds_to_confirm is None
    assert found.speedup_over_baseline.low > 1
    assert base.global_batch_size == 16


class Evaluated(Timed):
    """So does each evaluation."""

    def train(self, *, on_event, **spec):
        began = self.now
        looks = itertools.count(1)

        def told(point):
            self.now = began + point.seconds + 0.3 * next(looks)
            return on_event(point)

        return law.LawWorker.train(self, on_event=told, **spec)


@pytest.fixture
def by_its_clock(monkeypatch):
    """Runs a study, budget.run open, on the law five times as slow; its clock is what all of it goes by."""
    monkeypatch.setattr(law, "ALPHA", 5 * law.ALPHA)
    monkeypatch.setattr(law, "BETA", 5 * law.BETA)
    took = "wall_seconds"
    spent = lambda self, role=None: sum(each.user_attrs.get(took, 0.0) for each in self._trials(role))  # noqa: E731
    monkeypatch.setattr(StudyHistory, "wall_seconds", spent)

    def run(folder, total, confirm):
        worker, told = Evaluated(noise=0.5), []
        clock = SimpleNamespace(perf_counter=lambda: worker.now)
        monkeypatch.setattr(trials_of_study, "time", clock)
        changes = {"budget": Budget(total=total), "confirm": confirm}
        tuned = study(folder, worker, clock=clock.perf_counter, **changes)
        monkeypatch.setattr(tuned.parts.observer, "announce", told.append)
        tuned.run()
        return tuned, told

    return run


@pytest.mark.parametrize("total", [30.0, 60.0])
def test_what_is_told_to_confirm_a_study_whose_time_was_short_is_enough_though_it_searches_on(
    tmp_path, by_its_clock, total
):
    brief, told = by_its_clock(tmp_path, total, Confirm())
    assert re.search(
        r"the first run shows what is enough, budget.total=\d+m if each run takes all that it may$", told[1]
    )
    assert told[2].endswith(" should be enough")
    seeds = brief.recommendation()[0].seeds_to_confirm
    changes = dict(each.split("=") for each in brief.parts.budget.to_confirm(seeds).split())
    enough, seeds = float(changes["budget.total"].removesuffix("s")), int(changes["confirm.seeds"])
    more, told = by_its_clock(tmp_path, enough, Confirm(seeds=seeds))
    assert more.recommendation()[0].seeds_to_confirm is None
    assert more.parts.budget.seconds_left() < 0.5 * enough
    _, told = by_its_clock(tmp_path, enough + 60, Confirm(seeds=seeds))
    assert not any("too little for a search" in each for each in told)  # which has been, by then


def test_a_baseline_that_takes_all_of_the_longest_run_leaves_time_to_search(tmp_path):
    tuned = study(tmp_path, budget=Budget(run=60.0, total=600.0), confirm=Confirm(), clock=Watch())  # the defaults
    assert tuned.parts.budget.reserve() < 600 - 60 - 10  # once probe and baseline are paid for


def test_slow_evaluation_is_counted_in_what_confirmation_needs(tmp_path):
    tuned = study(tmp_path, budget=Budget(run=10.0, total=1e6, trials=4), confirm=Confirm(seeds=3, top=2))
    tuned.run()
    before = tuned.parts.budget.reserve()
    for trial in tuned.parts.study.get_trials(deepcopy=False):
        trial.user_attrs["wall_seconds"] = trial.user_attrs["training_seconds"] + 7.0
    assert tuned.parts.budget.reserve() == pytest.approx(before + 7.0 * (3 * (1 + 2) + 1))


class Wild(law.LawWorker):
    """Every run comes apart after its first evaluation."""

    def train(self, *, timeout, on_event, **spec):
        for seconds, value in ((0.0, 2.0), (0.1, None)):
            on_event({"seconds": seconds, "samples": 10, "value": value})
        return {"outcome": "diverged"}


def test_a_study_in_which_every_run_diverges_says_so(tmp_path):
    tuned = study(tmp_path / "a", Wild(), objective=Objective(target=0.5), budget=Budget(trials=2))
    tuned.run()
    assert {trial.outcome for trial in tuned.records()} == {"diverged"}
    assert why_nothing(tuned) == "every run diverged; lower learning_rate.min and max, and baseline.learning_rate"


def test_a_baseline_that_diverges_sets_no_target_and_is_said_to(tmp_path):
    with pytest.raises(NothingFitsError, match="the baseline diverged, so there is no target; lower baseline"):
        study(tmp_path, Wild()).run()


def test_a_study_whose_time_went_before_its_search_says_so(tmp_path):
    tuned = study(tmp_path, objective=Objective(target=0.01), budget=Budget(run=5.0, total=3600.0, trials=2))
    tuned.trials.add(tuned.parts.space.baseline, "baseline", 0)
    tuned.trials.drain()
    assert why_nothing(tuned).startswith("probe and baseline used up budget.total (3600 s) before anything else")


def test_a_study_whose_time_went_in_its_first_run_says_so_and_what_is_enough(tmp_path):
    budget = Budget(run=2.0, total=3.0, trials=2)
    tuned = study(tmp_path, objective=Objective(target=0.01), budget=budget, clock=Watch())
    tuned.trials.add(tuned.parts.space.baseline, "search", 0)
    tuned.trials.drain()
    assert [trial.outcome for trial in tuned.records()] == ["capped"]
    told = r"budget.total \(3 s\) was used up before a run had shown anything; start again with budget.total=\d+m"
    assert re.fullmatch(told, why_nothing(tuned))


def test_a_study_all_of_whose_runs_failed_points_to_them(tmp_path):
    tuned = study(tmp_path, Failing(), objective=Objective(target=0.01))
    tuned.trials.add(tuned.parts.space.baseline, "search", 0)
    tuned.trials.drain()
    assert why_nothing(tuned) == "no trial was usable; see the messages of the trials"


def test_an_interruption_confirms_nothing_more_and_what_is_known_is_recommended(tmp_path):
    worker = law.LawWorker(noise=0.05, fail_at=[5])
    tuned = study(tmp_path, worker)
    with pytest.raises(KeyboardInterrupt):
        tuned.run()
    assert len(worker.specs) == 5
    assert {trial.role for trial in tuned.records()} == {"baseline", "search"}
    found, base = recommend(tuned.records(), kind="time_to_target", goal="minimize")
    assert "not confirmed" in found.reason
    assert base is None


@pytest.mark.parametrize("total", [3600.0, 200.0])
def test_a_study_says_with_what_changes_it_would_be_confirmed_and_is_by_them(tmp_path, total):
    brief = study(tmp_path, budget=Budget(run=60.0, total=total, trials=4), confirm=Confirm(seeds=1, top=1))
    brief.run()
    found, _ = brief.recommendation()
    assert found.speedup_over_baseline is None
    changes = dict(each.split("=") for each in brief.parts.budget.to_confirm(found.seeds_to_confirm).split())
    assert ("budget.total" in changes) == (total < 3600)
    enough = float(changes.get("budget.total", f"{total}s").removesuffix("s"))
    seeds = int(changes["confirm.seeds"])
    more = study(tmp_path, budget=Budget(run=60.0, total=enough, trials=4), confirm=Confirm(seeds=seeds, top=1))
    more.run()
    confirmed, _ = more.recommendation()
    assert confirmed.seeds_to_confirm is None
    assert confirmed.speedup_over_baseline.low > 1


def test_every_trial_says_of_itself_what_ran_and_how(finished):
    for trial in finished.parts.study.trials:
        told = trial.user_attrs
        assert told["micro_batch_size"] * told["gradient_accumulation_steps"] == trial.params["batch_size"]
        assert {"role", "seed", "precision", "outcome", "curve", "training_seconds", "wall_seconds"} <= told.keys()
        assert trial.params["learning_rate"] > 0
        if told["outcome"] == "reached":
            assert told["samples_to_target"] > 0
            assert trial.value == told["time_to_target_seconds"]
        seconds, samples = (told["curve"][-1][index] for index in (0, 1))
        assert trial.last_step == pytest.approx(1000 * seconds, abs=1)
        assert samples > 0


@pytest.mark.parametrize(
    "name", ["history", "param_importances", "parallel_coordinate", "slice", "contour", "intermediate"]
)
def test_the_study_can_be_drawn_by_optuna(unconfirmed, name):
    from optuna import visualization

    plots = {"history": "optimization_history", "intermediate": "intermediate_values"}
    figure = getattr(visualization, f"plot_{plots.get(name, name)}")(unconfirmed.parts.study)
    assert any(len(trace.x if trace.x is not None else trace.dimensions) for trace in figure.data)


def test_the_study_opens_as_any_optuna_study(tmp_path):
    brief = {"budget": Budget(run=120.0, total=3600.0, trials=2), "confirm": Confirm(seeds=0)}
    study(tmp_path, storage=open_storage(None, tmp_path), **brief).run()
    opened = optuna.load_study(study_name="law", storage=open_storage(None, tmp_path))
    assert opened.best_value == min(trial.value for trial in opened.trials if trial.state.name == "COMPLETE")
    assert {"curve", "seed", "outcome", "role", "micro_batch_size"} <= opened.best_trial.user_attrs.keys()


@pytest.mark.parametrize("tail", [b'{"op_code": 4, "wor', b"\x00\xff garbage\n", b'{"half": \n'])
def test_a_journal_cut_off_in_its_last_line_is_mended(tmp_path, tail):
    brief = {"budget": Budget(run=120.0, total=3600.0, trials=1), "confirm": Confirm(seeds=0)}
    study(tmp_path, storage=open_storage(None, tmp_path), **brief).run()
    journal = tmp_path / "study.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail)
    (tmp_path / "study.log.lock").symlink_to(journal)
    (tmp_path / "study.log.lock1234.rename").symlink_to(journal)
    study(tmp_path, storage=open_storage(None, tmp_path))
    assert not [*tmp_path.glob("study.log.*")]
    assert journal.read_bytes().startswith(whole)
    assert tail not in journal.read_bytes()


def test_an_interruption_while_the_journal_is_read_costs_nothing_of_it(tmp_path, monkeypatch):
    brief = {"budget": Budget(run=120.0, total=3600.0, trials=2), "confirm": Confirm(seeds=0)}
    opened = open_storage(None, tmp_path)
    study(tmp_path, storage=open_storage(None, tmp_path), **brief).run()

    read = JournalFileBackend.read_logs

    def interrupted(backend, log_number_from):
        yield from itertools.islice(read(backend, log_number_from), 9)
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        now.setattr(JournalFileBackend, "read_logs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opened.get_all_studies()
    assert opened.get_all_trials(0) == open_storage(None, tmp_path).get_all_trials(0) != []


def test_a_study_of_time_leaves_a_landscape_of_all_its_runs(tmp_path, finished):
    assert study(tmp_path).belief.landscape() is None
    found = finished.belief.landscape()
    assert found.runs == len([trial for trial in finished.records() if trial.state in {"complete", "pruned"}])
    assert found.batch_sizes == [8, 16, 32, 64, 128, 256, 512]
    assert study(tmp_path / "metric", objective=Objective(kind="best_metric")).belief.landscape() is None


def test_a_baseline_that_takes_a_large_part_of_the_budget_leaves_room_to_search(tmp_path):
    tuned = study(tmp_path, budget=Budget(run=120.0, total=600.0))
    tuned.run()
    (baseline,) = (trial for trial in tuned.records() if trial.role == "baseline")
    assert 12 * baseline.time_to_target_seconds > 600  # what whole runs in a confirmation might take, with a reserve
    assert sum(trial.role == "search" for trial in tuned.records()) >= 4


class Homeless(law.LawWorker):
    """Loses its place in these calls."""

    def __init__(self, lost_in):
        super().__init__()
        self.lost_in, self.calls = set(lost_in), 0

    def train(self, **spec):
        self.calls += 1
        if self.calls in self.lost_in:
            raise NodeLost("its node is gone")
        return super().train(**spec)


def test_a_run_whose_place_is_lost_is_done_again_as_it_was(tmp_path):
    tuned = study(tmp_path, Homeless({1, 4}), budget=SHORT_SEARCH)
    tuned.run()
    records, stored = tuned.records(), tuned.parts.study.get_trials()
    lost = {record.number for record in records if record.message == "its node is gone"}
    again = {trial.user_attrs["retry_of"]: trial.number for trial in stored if "retry_of" in trial.user_attrs}
    assert lost == set(again)
    assert len(lost) == 2
    for number, retry in again.items():
        assert (records[number].state, records[number].outcome) == ("fail", None)
        assert records[retry].state in {"complete", "pruned"}
        assert all(
            getattr(records[retry], key) == getattr(records[number], key)
            for key in ("role", "batch_size", "learning_rate", "seed")
        )
    assert sum(record.role == "search" for record in records if record.number not in lost) == SHORT_SEARCH.trials


def test_a_run_that_loses_one_place_after_the_other_is_told_as_a_crash(tmp_path):
    tuned = study(tmp_path, Homeless({2, 3, 4}))
    tuned.run()
    lost = [record for record in tuned.records() if record.message == "its node is gone"]
    assert [record.outcome for record in lost] == [None, None, "crash"]


class TestPace:
    """What a run's steps are expected to take, by what ran before it."""

    FIT = ThroughputFit(alpha_seconds=1e-3, beta_seconds_per_sample=1e-6, saturation_batch_size=1000.0)

    @pytest.fixture
    def history(self):
        self.study = optuna.create_study()
        return StudyHistory(self.study, SECONDS)

    def ran(self, history, micro, step_seconds, *, precision="bf16", steps=1, **arguments):
        sizes = {
            "batch_size": optuna.distributions.IntDistribution(1, 10**6),
            "learning_rate": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True),
        }
        batch_size = micro * steps
        sizes |= {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in arguments}
        self.study.enqueue_trial({"batch_size": batch_size, "learning_rate": 0.1} | arguments)
        trial = self.study.ask(sizes)
        start = CurvePoint(seconds=0.0, samples=0, value=2.0)
        curve = [start, CurvePoint(seconds=100 * step_seconds, samples=100 * batch_size, value=1.0)]
        made_up = {"micro_batch_size": micro, "gradient_accumulation_steps": steps, "precision": precision}
        for key, value in (made_up | {"curve": curve_attribute(curve), "outcome": "reached"}).items():
            trial.set_user_attr(key, value)
        self.study.tell(trial, 1.0)

    def spec(self, micro, *, precision="bf16", steps=1, **arguments):
        planned, history = law.plan(), StudyHistory(optuna.create_study(), SECONDS)
        limits = Limits(planned, Space(planned), history, Targets(self.study, planned.config, history))
        made_up = {"micro_batch_size": micro, "accumulation_steps": steps, "precision": precision}
        asked = limits.spec({"batch_size": micro, "learning_rate": 0.1}, "search", 0)
        return dataclasses.replace(asked, **made_up, optimizer_arguments=arguments)

    def test_runs_with_another_kind_of_optimizer_tell_nothing_and_other_numbers_do(self, history):
        self.ran(history, 64, 1e-3, decay=0.01)
        assert history.most_step_seconds(self.spec(64, decay=0.5), self.FIT) == pytest.approx(1.33e-3)
        assert history.most_step_seconds(self.spec(64, kind="shampoo"), self.FIT) is None
        assert pace_kind({"kind": "sgd"}) != pace_kind({"kind": "shampoo"}) != pace_kind({"foreach": True})

    def test_runs_of_another_precision_tell_nothing(self, history):
        self.ran(history, 64, 1e-3)
        assert history.most_step_seconds(self.spec(64, precision="fp32"), self.FIT) is None
        assert history.most_step_seconds(self.spec(64), self.FIT) == pytest.approx(1.33e-3)

    def test_a_larger_batch_is_never_foretold_to_take_less_than_loading_it_may(self, history):
        load = 1e-5  # seconds of a sample, which the fit does not know
        self.ran(history, 32, 1e-3 + 32 * (1e-6 + load))
        assert history.most_step_seconds(self.spec(4096), self.FIT) >= 2 * (1e-3 + 4096 * (1e-6 + load))
        self.ran(history, 1024, 1e-3 + 1024 * (1e-6 + load))
        assert history.most_step_seconds(self.spec(4096), self.FIT) == pytest.approx(8 * (1e-3 + 1024 * (1e-6 + load)))

    def test_a_smaller_batch_is_foretold_by_the_fit_as_it_holds_here(self, history):
        self.ran(history, 1000, 4e-3)  # twice what the fit says
        assert history.most_step_seconds(self.spec(100), self.FIT) == pytest.approx(2 * 2 * (1e-3 + 1e-4))

    def test_one_slow_run_of_a_size_does_not_make_its_steps_slow(self, history):
        for step_seconds in (2e-3, 1e-3, 3e-3, 1.02e-3):
            self.ran(history, 64, step_seconds)
        paces = history.paces("bf16")
        assert paces == {(64, 1): pytest.approx(1.01e-3)}
        shares = history.shares(paces)
        assert shares == {0: pytest.approx(0.505), 1: 1.0, 2: pytest.approx(1.01 / 3), 3: pytest.approx(1.01 / 1.02)}

    def test_another_split_of_the_same_batch_has_a_pace_of_its_own(self, history):
        self.ran(history, 256, 1e-3 + 256e-6)
        assert history.most_step_seconds(self.spec(16, steps=16), self.FIT) == pytest.approx(2 * 16 * (1e-3 + 16e-6))


def test_a_missing_piece_of_memory_where_larger_batches_came_through_shrinks_nothing(tmp_path):
    class Crowded(law.LawWorker):
        """Another program has the memory in the fifth run."""

        def train(self, **spec):
            if len(self.specs) == 4:
                self.specs.append(spec)
                raise WorkerDied("oom", "CUDA out of memory")
            return super().train(**spec)

    worker = Crowded(noise=0.05)
    study(tmp_path, worker, sizes=(16, 64), baseline=Baseline(batch_size=64, learning_rate=1e-3)).run()
    assert all(spec["accumulation_steps"] == 1 for spec in worker.specs)


def failing_on_fresh_seeds(tmp_path, outcome):
    """A study whose best contender fails on every fresh seed, and the runs that its second start makes."""
    target = {"objective": Objective(target=0.5), "confirm": Confirm(seeds=3, top=1)}

    class Fragile(law.LawWorker):
        def train(self, **spec):
            if spec["seed"] > 1_000_000 and spec["learning_rate"] != 1e-3:
                self.specs.append(spec)
                raise outcome
            return super().train(**spec)

    first = study(tmp_path, Fragile(noise=0.05), **target)
    first.run()
    again = Fragile(noise=0.05)
    second = study(tmp_path, again, **target)
    second.run()
    return first, second, again


@pytest.mark.parametrize("outcome", [WorkerDied("crash", "SIGSEGV"), UserCodeError("evaluate raised")])
def test_a_contender_that_fails_on_fresh_seeds_is_no_answer_and_is_not_run_again(tmp_path, outcome):
    first, second, again = failing_on_fresh_seeds(tmp_path, outcome)
    failed = [config_of(trial) for trial in first.records() if trial.role == "confirm" and trial.state == "fail"]
    assert set(collections.Counter(failed).values()) == {3}
    found, _ = first.recommendation()
    assert found.global_batch_size == 16
    assert found.reason == "no other configuration came to a result on most of its fresh seeds"
    assert again.specs == []
    assert second.recommendation() == first.recommendation()


class Lucky(law.LawWorker):
    """High rates reach the target on the seed of the search, and on no other."""

    def train(self, **spec):
        if spec["learning_rate"] < 0.01 or spec["seed"] == 0:
            return super().train(**spec)
        return super().train(**spec | {"learning_rate": 1e-4})


def test_what_fresh_seeds_refute_is_searched_for_again_while_there_is_time(tmp_path):
    worker = Lucky(noise=0.05)
    tuned = study(tmp_path, worker, budget=Budget(run=120.0, total=3600.0, trials=30))
    tuned.run()
    records = tuned.records()
    first = next(trial.number for trial in records if trial.role == "confirm")
    refuted = {trial.learning_rate for trial in records if trial.outcome == "capped" and trial.role == "confirm"}
    assert max(refuted) >= 0.01
    assert any(trial.role == "search" for trial in records[first:])
    found, _ = tuned.recommendation()
    assert 1e-3 < found.learning_rate < 0.01
    assert found.speedup_over_baseline.low > 1
    again = Lucky(noise=0.05)
    study(tmp_path, again, budget=Budget(run=120.0, total=3600.0, trials=30)).run()
    assert again.specs == []


def test_of_several_machines_none_queues_a_fresh_seed_that_another_has_queued(tmp_path):
    """What is queued says of its clipping no more than its parameter."""
    clipping = {"norm": {"choices": [0, 1.0]}}
    tuned = study(tmp_path, gradient_clipping=clipping, confirm=Confirm(seeds=0, top=2))
    tuned.run()
    tuned.parts.machines.several = True
    queueing = SimpleNamespace(add=tuned.trials.add, drain=lambda awaited: None)
    counts = []
    for _ in range(2):  # two machines, the second of which is a moment later
        Confirmation(tuned.parts, queueing, tuned.belief).run(1)
        counts.append(len(tuned.parts.study.get_trials(states=(optuna.trial.TrialState.WAITING,))))
    assert counts == [3, 3]


class Unlucky(Lucky):
    """The baseline, too, reaches the target on the seed of the search alone."""

    def train(self, *, on_event, **spec):
        if spec["learning_rate"] != 1e-3 or spec["seed"] == 0:
            return super().train(on_event=on_event, **spec)
        on_event({"seconds": 0.0, "samples": 0, "value": 2.0})
        return {"outcome": "diverged"}


@pytest.mark.parametrize("trials", [10, 30])
def test_where_fresh_seeds_refute_all_the_search_goes_on_and_the_command_told_confirms_others(tmp_path, trials):
    keys = {"budget": Budget(run=120.0, total=3600.0, trials=trials), "confirm": Confirm(seeds=3, top=1)}
    tuned = study(tmp_path, Unlucky(noise=0.05), **keys)
    tuned.run()
    first = next(trial.number for trial in tuned.records() if trial.role == "confirm")
    assert any(trial.role == "search" for trial in tuned.records()[first:]) == (trials == 30)
    while (seeds := tuned.recommendation()[0].seeds_to_confirm) is not None:
        assert tuned.parts.budget.to_confirm(seeds) == "confirm.seeds=3"
        worker = Unlucky(noise=0.05)
        study(tmp_path, worker, **keys).run()
        assert worker.specs
    reason = "the baseline diverged or failed on fresh seeds, so there is no speed-up to give"
    assert tuned.recommendation()[0].reason == reason


def test_the_baseline_has_time_on_fresh_seeds_where_contenders_come_to_nothing(tmp_path):
    worker = Lucky(noise=0.05)
    tuned = study(tmp_path, worker, budget=Budget(run=120.0, total=3600.0, trials=10))
    tuned.run()
    fresh = [trial for trial in tuned.records() if trial.role == "confirm" and trial.learning_rate == 1e-3]
    assert len(fresh) == 3
    assert all(trial.outcome == "reached" for trial in fresh)


def fresh_seeds(tmp_path, confirm):
    """On how many seeds each configuration was confirmed where three leave it open, and what is recommended then."""
    near = Baseline(batch_size=16, learning_rate=5e-3)
    tuned = study(tmp_path, law.LawWorker(noise=0.3), confirm=confirm, baseline=near)
    tuned.run()
    confirmed = [config_of(trial) for trial in tuned.records() if trial.role == "confirm"]
    return set(collections.Counter(confirmed).values()), tuned.recommendation()[0]


def test_where_three_seeds_leave_it_open_more_are_run_while_there_is_time(tmp_path):
    counts, found = fresh_seeds(tmp_path / "more", Confirm(top=2))
    assert len(counts) == 1
    assert 3 < min(counts) <= 12
    assert found.speedup_over_baseline.low > 1


def test_contenders_that_come_later_run_on_as_many_seeds_as_the_baseline_has(tmp_path):
    (count,), _ = fresh_seeds(tmp_path, Confirm(top=2))
    before = study(tmp_path, confirm=Confirm(top=2), baseline=Baseline(batch_size=16, learning_rate=5e-3)).records()
    counts, _ = fresh_seeds(tmp_path, Confirm(top=4))
    assert counts == {count}
    tuned = study(tmp_path, confirm=Confirm(top=4), baseline=Baseline(batch_size=16, learning_rate=5e-3))
    assert len(tuned.records()) >= len(before) + count


def on_fresh_seeds(records):
    """How many fresh seeds each contender has run on, the most first."""
    confirmed = [trial for trial in records if trial.role == "confirm" and trial.state != "fail"]
    ran = [config_of(trial) for trial in confirmed if trial.learning_rate != 1e-3]
    return sorted(collections.Counter(ran).values(), reverse=True)


def test_the_first_fresh_seed_chooses_two_of_four_contenders_unless_their_number_is_set_or_time_is_short(tmp_path):
    tuned = study(tmp_path / "open", confirm=Confirm(seeds=3))
    tuned.run()
    assert on_fresh_seeds(tuned.records()) == [3, 3, 1, 1]
    found, _ = tuned.recommendation()
    confirmed = [trial for trial in tuned.records() if trial.role == "confirm"]
    assert sum(config_of(trial)[:2] == (found.global_batch_size, found.learning_rate) for trial in confirmed) == 3
    again = law.LawWorker(noise=0.05)
    study(tmp_path / "open", again, confirm=Confirm(seeds=3)).run()
    assert again.specs == []
    brief = Budget(run=120.0, total=200.0, trials=14)
    for name, changes in {"set": {"confirm": Confirm(seeds=3, top=2)}, "short": {"budget": brief}}.items():
        other = study(tmp_path / name, **{"confirm": Confirm(seeds=3)} | changes)
        other.run()
        assert on_fresh_seeds(other.records()) == [3, 3]


@pytest.mark.parametrize("stopped_after", [1, 3, 5, 6])
def test_a_choice_by_the_first_fresh_seed_that_was_interrupted_goes_on_as_it_was(tmp_path, stopped_after):
    whole = study(tmp_path / "whole", confirm=Confirm(seeds=3))
    whole.run()
    first = next(trial.number for trial in whole.records() if trial.role == "confirm")
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, law.LawWorker(noise=0.05, fail_at=[first + stopped_after]), confirm=Confirm(seeds=3)).run()
    resumed = study(tmp_path, confirm=Confirm(seeds=3))
    resumed.run()
    assert on_fresh_seeds(resumed.records()) == on_fresh_seeds(whole.records())
    assert resumed.recommendation() == whole.recommendation()


class OnceUnlucky(law.LawWorker):
    """The baseline diverges on the second fresh seed."""

    def train(self, *, on_event, **spec):
        if spec["learning_rate"] != 1e-3 or spec["seed"] != 1_000_004:
            return super().train(on_event=on_event, **spec)
        on_event({"seconds": 0.0, "samples": 0, "value": 2.0})
        return {"outcome": "diverged"}


def test_a_baseline_that_lacks_a_result_which_contenders_have_goes_before_their_further_seeds(tmp_path):
    keys = {"budget": Budget(run=120.0, total=3600.0, trials=6)}
    tuned = study(tmp_path, OnceUnlucky(noise=0.05), confirm=Confirm(seeds=3, top=2), **keys)
    tuned.run()
    seeds = tuned.recommendation()[0].seeds_to_confirm
    assert seeds == 4
    more = OnceUnlucky(noise=0.05)
    study(tmp_path, more, confirm=Confirm(seeds=seeds, top=2), **keys).run()
    assert [spec["learning_rate"] == 1e-3 for spec in more.specs] == [True, False, False]


def test_who_sets_the_number_of_seeds_has_so_many(tmp_path):
    counts, found = fresh_seeds(tmp_path / "set", Confirm(seeds=3, top=2))
    assert counts == {3}
    assert found.seeds_to_confirm > 3


class Breaking(law.LawWorker):
    """The baseline diverges after two seconds; its metric is `last` then."""

    last = None

    def train(self, *, on_event, **spec):
        if self.specs or spec["learning_rate"] != 1e-3:
            return super().train(on_event=on_event, **spec)
        self.specs.append(spec)
        for seconds, value in ((0.0, 2.0), (1.0, 1.5), (2.0, 1.0), (2.1, self.last)):
            on_event({"seconds": seconds, "samples": int(100 * seconds), "value": value})
        return {"outcome": "diverged"}


@pytest.mark.parametrize("last", [None, 1e6])
def test_a_baseline_that_breaks_sets_a_target_of_which_that_is_said(tmp_path, last):
    worker = Breaking(noise=0.05)
    worker.last = last
    tuned = study(tmp_path, worker)
    tuned.run()
    assert tuned.target.reason.endswith("that the baseline reached in its budget, where it diverged after 2.1 s")


def contenders_limits(tuned, worker):
    pairs = zip(tuned.records(), worker.specs, strict=True)
    return [spec["limit_seconds"] for trial, spec in pairs if trial.role == "confirm" and trial.learning_rate != 1e-3]


def test_a_contender_has_the_baselines_time_on_fresh_seeds(finished, ran):
    assert min(contenders_limits(finished, ran)) >= finished.records()[0].time_to_target_seconds


def test_a_fresh_seed_has_a_tenth_of_the_longest_run_however_lucky_the_search_was(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker, budget=Budget(run=1200.0, total=36000.0, trials=14))
    tuned.run()
    pairs = zip(tuned.records(), worker.specs, strict=True)
    pairs = [(trial, spec) for trial, spec in pairs if trial.learning_rate != 1e-3]
    limits = {trial.role: spec["limit_seconds"] for trial, spec in pairs}
    assert limits["confirm"] == 120.0
    assert limits["search"] < 120.0
    own = {(t.batch_size, t.learning_rate): t.time_to_target_seconds for t, _ in pairs if t.role == "search"}
    looked = [
        (spec["expected_seconds"], own[t.batch_size, t.learning_rate]) for t, spec in pairs if t.role == "confirm"
    ]
    assert looked
    assert all(expected <= LOST_FACTOR * seconds for expected, seconds in looked), "it is looked at too seldom"


def test_it_has_as_much_where_the_baseline_did_not_get_there(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker, objective=Objective(target=0.3), budget=Budget(run=20.0, total=3600.0, trials=30))
    tuned.run()
    assert tuned.records()[0].outcome == "finished"
    assert min(contenders_limits(tuned, worker)) >= 20.0


@pytest.mark.parametrize(("target", "words"), [("auto", "as the baseline sets it"), (0.5, "set a harder one")])
def test_a_target_that_another_seed_meets_before_training_is_refused(tmp_path, target, words):
    class Lucky(law.LawWorker):
        """One run of the search starts where others end."""

        def train(self, *, on_event, **spec):
            if len(self.specs) == 3:
                self.specs.append(spec)
                on_event({"seconds": 0.0, "samples": 0, "value": 0.11})
                return {"outcome": "reached"}
            return super().train(on_event=on_event, **spec)

    worker = Lucky(noise=0.05)
    with pytest.raises(UsageError, match=r"objective.target.* is met before training .val_loss starts at 0.11") as told:
        study(tmp_path, worker, objective=Objective(target=target)).run()
    assert words in str(told.value)
    assert len(worker.specs) == 4


def test_where_a_target_is_met_before_training_nothing_is_recommended(tmp_path):
    tuned = study(tmp_path, objective=Objective(target=2.5))
    with pytest.raises(UsageError, match="met before training"):
        tuned.run()
    assert tuned.recommendation() == (None, None)


@pytest.mark.parametrize(("largest", "evaluated", "expected"), [(256, None, 256), (5000, None, 1024), (256, 32, 32)])
def test_a_run_evaluates_as_many_samples_at_a_time_as_fitted_in_the_final_check(largest, evaluated, expected):
    checks = [
        Attempt(batch_size=largest, outcome="fit", purpose="verify", evaluation_batch_size=evaluated),
        Attempt(batch_size=largest // 2, outcome="fit", purpose="verify", evaluation_batch_size=2),
    ]
    made = law.plan()
    probe = made.probe.model_copy(update={"max_batch_size": largest, "attempts": checks})
    plan = dataclasses.replace(made, probe=probe)
    study = optuna.create_study()
    history = StudyHistory(study, SECONDS)
    limits = Limits(plan, Space(plan), history, Targets(study, plan.config, history))
    spec = limits.spec({"batch_size": 16, "learning_rate": 1e-3}, "search", 0)
    assert spec.evaluation_batch_size == expected

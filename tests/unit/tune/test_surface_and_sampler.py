import functools
import itertools
import math

import law
import numpy as np
import optuna
import pytest

from batchtune.tune.optuna_parts import surface
from batchtune.tune.optuna_parts.sampler import LOWER_BOUND, RoundingSampler, TimeToTargetSampler
from batchtune.tune.optuna_parts.surface import Run, Surface, SurfacePrior

PRIOR = SurfacePrior(
    saturation_batch_size=law.ALPHA / law.BETA, saturation_spread=0.3, anchor_batch_size=16, anchor_learning_rate=2e-3
)
SIZES = (8, 16, 32, 64, 128, 256, 512)
SPACE = {
    "batch_size": optuna.distributions.CategoricalDistribution(SIZES),
    "learning_rate": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True),
}

few_particles = pytest.mark.usefixtures("coarse")


@pytest.fixture
def coarse(monkeypatch):
    """The surface from an eighth of its particles, little moved, for tests that do not ask how well it guesses."""
    monkeypatch.setattr(surface, "PARTICLES", surface.PARTICLES // 8)
    monkeypatch.setattr(surface, "TEMPERATURES", 4)
    monkeypatch.setattr(surface, "MOVES", 1)


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def oracle():
    rates = np.logspace(-5, 0, 201)
    return min(law.seconds_to_target(batch, rate) for batch in SIZES for rate in rates)


def run_study(sampler, trials, *, noise=0.05, cap=None):
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({"batch_size": 16, "learning_rate": 1e-3})
    for _ in range(trials):
        trial = study.ask(SPACE)
        seconds = law.seconds_to_target(
            trial.params["batch_size"], trial.params["learning_rate"], noise=noise, seed=trial.number
        )
        best = min((each.value for each in study.trials if each.state.name == "COMPLETE"), default=math.inf)
        limit = min(200.0, 1.2 * best) if cap else 200.0
        if seconds <= limit:
            study.tell(trial, seconds)
        else:
            trial.set_user_attr(LOWER_BOUND, limit)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return study


def test_a_configuration_that_ran_often_is_believed_by_its_own_runs_and_one_that_ran_once_by_all():
    runs = [
        Run(batch, rate, law.seconds_to_target(batch, rate), censored=False)
        for batch in (16, 64, 256)
        for rate in (3e-3, 1e-2, 3e-2)
    ]
    lucky = Run(64, 2e-2, 0.7 * law.seconds_to_target(64, 2e-2), censored=False)

    def believed(times):
        logs = Surface(PRIOR, [*runs, *[lucky] * times], seed=0).log_seconds_of_runs()
        return math.exp(logs[-1]) / lucky.seconds

    assert 1 < believed(5) < believed(1)


def test_the_surface_finds_where_a_law_of_its_own_form_is_lowest():
    runs = [
        Run(batch, rate, law.seconds_to_target(batch, rate), censored=False)
        for batch in (16, 64, 256)
        for rate in (3e-3, 1e-2, 3e-2)
    ]
    surface = Surface(PRIOR, runs, seed=0)
    rates = np.linspace(-4, 0, 81)
    sizes, grid = (axis.ravel() for axis in np.meshgrid(np.array(SIZES, float), rates, indexing="ij"))
    lowest = int(np.argmin(surface.predict(sizes, grid).mean(axis=0)))
    found = law.seconds_to_target(int(sizes[lowest]), 10 ** grid[lowest])
    assert found <= 1.15 * oracle()


def test_a_censored_run_pushes_the_surface_up_and_never_down():
    seen = [Run(16, 1e-3, 50.0, censored=False)]
    point = (np.array([64.0]), np.array([-2.0]))
    before = Surface(PRIOR, seen, seed=1).predict(*point).mean()
    after = Surface(PRIOR, [*seen, Run(64, 1e-2, 100.0, censored=True)], seed=1).predict(*point).mean()
    assert after > before + 0.3


@pytest.mark.parametrize("seed", range(5))
def test_rates_that_all_take_as_long_are_left_for_much_lower_ones(seed):
    study = optuna.create_study(sampler=TimeToTargetSampler(seed=seed))
    for rate in (0.2, 0.4, 0.8):
        study.add_trial(
            optuna.trial.create_trial(params={"batch_size": 64, "learning_rate": rate}, distributions=SPACE, value=3.2)
        )
    proposed = []
    for _ in range(3):
        trial = study.ask(SPACE)
        proposed.append(trial.params["learning_rate"])
        study.tell(trial, 3.2)
    assert min(proposed) < 0.1


def test_one_outlier_does_not_bend_the_surface():
    runs = [Run(b, r, law.seconds_to_target(b, r), censored=False) for b in (16, 64, 256) for r in (3e-3, 1e-2, 3e-2)]
    point = (np.array([64.0]), np.array([math.log10(law.best_rate(64))]))
    clean = Surface(PRIOR, runs, seed=2).predict(*point).mean()
    odd = Run(64, 1e-2, 10 * law.seconds_to_target(64, 1e-2), censored=False)
    assert abs(Surface(PRIOR, [*runs, odd], seed=2).predict(*point).mean() - clean) < 0.15


@functools.cache
def seconds_after_ten_trials(make, seed):
    """What the best of ten trials takes, over the least that there is."""
    best = run_study(make(seed), 10, cap=True).best_trial.params
    return law.seconds_to_target(best["batch_size"], best["learning_rate"]) / oracle()


def ours(seed):
    return TimeToTargetSampler(PRIOR, seed=seed)


def at_random(seed):
    return optuna.samplers.RandomSampler(seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_ten_trials_come_within_a_quarter_of_the_best_there_is(seed):
    assert seconds_after_ten_trials(ours, seed) <= 1.25


def test_it_beats_random_search_on_the_same_number_of_trials():
    def mean_log_regret(make):
        return sum(math.log(seconds_after_ten_trials(make, seed)) for seed in range(5)) / 5

    assert mean_log_regret(ours) < 0.25 * mean_log_regret(at_random)


def test_expected_improvement_falls_as_the_optimum_is_found():
    sampler = TimeToTargetSampler(PRIOR, seed=0)
    run_study(sampler, 3)
    early = sampler.last_expected_improvement
    run_study(sampler := TimeToTargetSampler(PRIOR, seed=0), 14)
    assert sampler.last_expected_improvement < 0.3 * early


@few_particles
def test_where_nothing_promises_more_the_best_of_what_was_not_tried_is_next():
    def objective(trial):
        batch = trial.suggest_categorical("batch_size", [8, 32, 128])
        rate = trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
        return (1 + 45 / batch) * (1 + batch / 128) * 10 ** abs(math.log10(rate / 0.03))

    study = optuna.create_study(sampler=TimeToTargetSampler(seed=0))
    study.optimize(objective, n_trials=40)
    places = [(trial.params["batch_size"], trial.params["learning_rate"]) for trial in study.trials[10:]]
    assert len(set(places)) == len(places)
    assert all(1e-3 < rate < 0.9 for _, rate in places)


@few_particles
def test_workers_that_ask_at_the_same_time_are_sent_to_different_places():
    study = run_study(TimeToTargetSampler(PRIOR, seed=1), 4)
    asked = [study.ask(SPACE).params for _ in range(3)]
    for number, params in enumerate(asked):
        for other in asked[:number]:
            apart = abs(math.log10(params["learning_rate"] / other["learning_rate"]))
            assert params["batch_size"] != other["batch_size"] or apart > 0.2


@few_particles
def test_a_study_of_which_nothing_has_ended_yet_is_searched_around_what_is_believed():
    study = optuna.create_study(sampler=TimeToTargetSampler(PRIOR, seed=1))
    study.enqueue_trial({"batch_size": 16, "learning_rate": 2e-3})
    asked = [study.ask(SPACE).params for _ in range(6)]
    assert asked[0] == {"batch_size": 16, "learning_rate": 2e-3}
    assert len({tuple(params.values()) for params in asked}) == 6
    assert all(2e-4 <= params["learning_rate"] <= 2e-1 for params in asked[1:])  # the prior is 0.7 decades wide


def test_where_a_run_is_under_way_there_is_nothing_more_to_gain_and_elsewhere_no_more_than_before():
    runs = [Run(16, 1e-3, 30.0, censored=False), Run(64, 1e-3, 25.0, censored=False)]
    surface = Surface(PRIOR, runs, seed=0)
    sizes, rates = np.array([16.0, 64.0, 64.0, 256.0]), np.array([-2.0, -2.0, -1.0, -1.5])
    alone = surface.expected_improvement(sizes, rates)
    beside = surface.expected_improvement(sizes, rates, [Run(64, 1e-2, 1.0, censored=False)])
    assert beside[1] == 0 < alone[1]
    assert (beside <= alone).all()
    assert beside[3] > 0


@few_particles
def test_the_same_seed_gives_the_same_trials():
    first = run_study(TimeToTargetSampler(PRIOR, seed=7), 6)
    second = run_study(TimeToTargetSampler(PRIOR, seed=7), 6)
    assert [trial.params for trial in first.trials] == [trial.params for trial in second.trials]


def test_any_optuna_user_can_take_it_with_an_int_batch_size_and_parameters_of_their_own():
    def objective(trial):
        batch = trial.suggest_int("batch_size", 8, 512, log=True)
        rate = trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
        decay = trial.suggest_float("weight_decay", 0.0, 0.1)
        return law.seconds_to_target(batch, min(rate, 5 * law.best_rate(batch))) * (1 + decay)

    study = optuna.create_study(sampler=TimeToTargetSampler(seed=3))
    study.optimize(objective, n_trials=12)
    assert all(0 <= trial.params["weight_decay"] <= 0.1 for trial in study.trials)
    assert study.best_value <= 1.5 * oracle()


def test_a_pruned_trial_without_a_bound_counts_by_its_last_step_in_milliseconds():
    study = optuna.create_study(sampler=TimeToTargetSampler(PRIOR, seed=0))
    trial = study.ask(SPACE)
    trial.report(1.0, step=2500)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    ((_, run),) = study.sampler.runs(study)
    assert run.seconds == 2.5
    assert run.censored


def asked(study, space=SPACE):
    """A proposal after one finished trial."""
    study.enqueue_trial({name: getattr(each, "choices", [getattr(each, "low", 1)])[0] for name, each in space.items()})
    trial = study.ask(space)
    study.tell(trial, [1.0] * len(study.directions))
    return study.ask(space)


@pytest.mark.parametrize("directions", [["maximize"], ["minimize", "minimize"]])
def test_a_study_that_does_not_minimise_one_time_is_refused(directions):
    study = optuna.create_study(sampler=TimeToTargetSampler(PRIOR), directions=directions)
    with pytest.raises(ValueError, match=r'create_study\(direction="minimize"\)'):
        asked(study)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": optuna.distributions.IntDistribution(1, 9)}, "learning_rate is no learning rate"),
        ({"learning_rate": optuna.distributions.FloatDistribution(0.0, 1.0)}, "learning_rate is no learning rate"),
        ({"batch_size": optuna.distributions.FloatDistribution(1, 9)}, "batch_size is no batch size"),
        ({"batch_size": optuna.distributions.CategoricalDistribution(["a", "b"])}, "batch_size is no batch size"),
        ({"batch_size": optuna.distributions.IntDistribution(0, 9)}, "at least 1"),
    ],
)
def test_parameters_of_another_kind_are_refused_with_what_they_should_be(changes, message):
    with pytest.raises(ValueError, match=message):
        asked(optuna.create_study(sampler=TimeToTargetSampler(PRIOR)), SPACE | changes)


@few_particles
@pytest.mark.parametrize(
    "suggest",
    [
        lambda trial: trial.suggest_int("batch_size", 8, 512),  # one is missing
        lambda trial: (trial.suggest_int("batch", 8, 512), trial.suggest_float("lr", 1e-3, 1.0)),  # other names
        lambda trial: (  # no range of all
            trial.suggest_int("batch_size", 8, 512),
            trial.suggest_float("learning_rate", 1e-3, 1.0 + trial.number % 2),
        ),
    ],
)
def test_a_study_in_which_it_cannot_choose_is_told_so_once(suggest):
    study = optuna.create_study(sampler=TimeToTargetSampler(seed=0))
    with pytest.warns(UserWarning, match="TimeToTargetSampler leaves all to RandomSampler") as told:
        study.optimize(lambda trial: 1.0 + 0 * bool(suggest(trial)), n_trials=5)
    assert len(told) == 1


def test_a_learning_rate_that_is_none_is_refused_in_the_first_trial():
    study = optuna.create_study(sampler=TimeToTargetSampler(seed=0))
    with pytest.raises(ValueError, match="learning_rate is no learning rate"):
        study.ask().suggest_categorical("learning_rate", [1e-3, 1e-2])


def test_an_objective_may_say_infinity_where_training_came_apart():
    study = optuna.create_study(sampler=TimeToTargetSampler(PRIOR, seed=1))
    for rate, seconds in ((1e-3, 30.0), (0.9, math.inf), (3e-3, 20.0)):
        study.enqueue_trial({"batch_size": 16, "learning_rate": rate})
        study.tell(study.ask(SPACE), seconds)
    (apart,) = (run for _, run in study.sampler.runs(study) if run.learning_rate == 0.9)
    assert apart.censored
    assert apart.seconds > 30.0
    assert study.ask(SPACE).params["learning_rate"] < 0.5


@few_particles
def test_a_place_where_a_run_crashed_is_not_tried_again():
    def proposals(outcome):
        study = optuna.create_study(sampler=TimeToTargetSampler(PRIOR, seed=1))
        study.enqueue_trial({"batch_size": 16, "learning_rate": 1e-3})
        study.tell(study.ask(SPACE), 30.0)
        found = []
        for _ in range(4):
            trial = study.ask(SPACE)
            found.append((trial.params["batch_size"], round(math.log10(trial.params["learning_rate"]), 2)))
            if outcome is not None:
                trial.set_user_attr("outcome", outcome)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return found

    apart = proposals("crash")
    for index, (size, rate) in enumerate(apart):
        assert all(size != other or abs(rate - at) >= 0.3 for other, at in apart[:index])
    again = proposals("oom")  # it is asked for with a smaller micro-batch
    assert min(math.dist(first, second) for first, second in itertools.pairwise(again)) < 0.5


def test_numbers_that_are_written_into_configurations_are_short_and_stay_in_their_range():
    space = {
        "weight_decay": optuna.distributions.FloatDistribution(1.23456e-4, 0.1, log=True),
        "dropout": optuna.distributions.FloatDistribution(0.0, 0.987654),
        "layers": optuna.distributions.IntDistribution(1, 100_000),
        "edge": optuna.distributions.FloatDistribution(1.23456, 1.23457),
        "beta2": optuna.distributions.FloatDistribution(0.99, 0.9999),
    }
    study = optuna.create_study(sampler=RoundingSampler(seed=1, n_startup_trials=3))
    for number in range(8):
        trial = study.ask(space)
        study.tell(trial, float(number))
    for trial in study.trials:
        for name, value in (
            ("weight_decay", f"{trial.params['weight_decay']:.3g}"),
            ("dropout", f"{trial.params['dropout']:.4f}"),
        ):
            assert trial.params[name] == float(value)
            assert space[name].low <= trial.params[name] <= space[name].high
        assert 1.23456 <= trial.params["edge"] <= 1.23457
    assert (
        len({trial.params["beta2"] for trial in study.trials})
        == len({trial.params["edge"] for trial in study.trials})
        == 8
    )
    assert any(trial.params["layers"] > 1000 and trial.params["layers"] % 10 for trial in study.trials)


WIDE = SPACE | {"learning_rate": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)}
WITHIN = {
    "batch_size": optuna.distributions.CategoricalDistribution((64, 128)),
    "learning_rate": optuna.distributions.FloatDistribution(0.12345, 0.23456, log=True),
}


def proposals(sampler, space=WIDE, trials=14, cost=lambda params: law.seconds_to_target(params["batch_size"], 1e-3)):
    """What is asked for after a queued run far from it, which is the best of all."""
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({"batch_size": 8, "learning_rate": 1e-3})
    found = []
    for _ in range(trials):
        trial = study.ask(space)
        found.append(trial.params)
        study.tell(trial, cost(trial.params) + 100 * math.log(trial.params["learning_rate"] / 1e-3))
    assert found[0] == {"batch_size": 8, "learning_rate": 1e-3}
    return found[1:]


@few_particles
@pytest.mark.parametrize("make", [TimeToTargetSampler, RoundingSampler])
def test_what_may_be_proposed_can_be_narrower_than_the_study(make):
    found = proposals(make(seed=1, within=WITHIN))
    assert {params["batch_size"] for params in found} <= {64, 128}
    assert all(0.12345 <= params["learning_rate"] <= 0.23456 for params in found)


@few_particles
@pytest.mark.parametrize("make", [TimeToTargetSampler, RoundingSampler])
def test_a_single_point_may_be_all_there_is_to_propose(make):
    point = {
        "batch_size": optuna.distributions.CategoricalDistribution((64,)),
        "learning_rate": optuna.distributions.FloatDistribution(0.012345, 0.012345, log=True),
    }
    assert {tuple(each.values()) for each in proposals(make(seed=1, within=point))} == {(64, 0.012345)}


@few_particles
@pytest.mark.parametrize("make", [TimeToTargetSampler, RoundingSampler])
def test_bounds_as_wide_as_the_study_change_no_proposal(make):
    assert proposals(make(seed=3, within=SPACE), SPACE) == proposals(make(seed=3), SPACE)


@few_particles
def test_the_first_proposals_keep_to_what_may_be_proposed_too():
    study = optuna.create_study(sampler=TimeToTargetSampler(PRIOR, seed=1, within=WITHIN))
    for _ in range(10):
        params = study.ask(WIDE).params
        assert params["batch_size"] in {64, 128}
        assert 0.12345 <= params["learning_rate"] <= 0.23456

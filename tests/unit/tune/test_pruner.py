import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.tune.optuna_parts.pruner import TimeToValuePruner


def study_with_best(curve, seconds, goal="minimize", **settings):
    study = optuna.create_study(pruner=TimeToValuePruner(goal, **settings))
    study.add_trial(
        optuna.trial.create_trial(value=seconds, intermediate_values={int(s * 1000): v for s, v in curve.items()})
    )
    return study


BEST = {0: 2.0, 1: 1.0, 2: 0.7, 4: 0.5, 10: 0.3}


def pruned(study, reports):
    trial = study.ask()
    for seconds, value in reports.items():
        trial.report(value, int(seconds * 1000))
    return trial.should_prune()


def test_a_run_that_takes_three_times_as_long_for_the_same_loss_is_pruned():
    assert pruned(study_with_best(BEST, 10.0), {0: 2.0, 6: 0.8})


def test_a_run_that_keeps_up_goes_on():
    assert not pruned(study_with_best(BEST, 10.0), {0: 2.0, 3: 0.7})


@pytest.mark.parametrize(("seconds", "ends"), [(14.9, False), (15.1, True)])
def test_a_run_without_a_limit_of_its_own_ends_once_it_is_too_late_to_be_the_answer(seconds, ends):
    assert pruned(study_with_best(BEST, 10.0, cap=1.5), {0: 2.0, seconds: 0.31}) is ends
    assert not pruned(study_with_best(BEST, 10.0), {0: 2.0, seconds: 0.31})


def test_nothing_is_judged_before_a_third_of_the_best_time():
    assert not pruned(study_with_best(BEST, 10.0), {0: 2.0, 2.5: 1.9})


def first_run(values, target=None, longest=None):
    study = optuna.create_study(pruner=TimeToValuePruner("minimize", target=target, longest=longest))
    return pruned(study, {0.1 * 1.1**n: value for n, value in enumerate(values)})


def test_a_first_run_that_still_gets_further_goes_on():
    assert not first_run([2.0 - 0.04 * n for n in range(30)])
    assert not first_run([2.0] * 11)  # too few looks to tell


def test_a_first_run_that_settles_before_the_target_ends():
    assert first_run([2.0, 1.6, 1.2, 1.0] + [0.9 + 0.01 * (n % 3) for n in range(26)])


# 1.6 seconds, of which the second half has brought the loss from 0.1910 to 0.1875
LEVELLING_OFF = [2.0, 1.0, 0.5, 0.3, *(0.2 - 0.0005 * n for n in range(26))]


@pytest.mark.parametrize(
    ("target", "longest", "ends"),
    [(0.18, 10.0, False), (0.18, 3.0, True), (0.1, 10.0, True), (0.18, None, True), (None, 10.0, True)],
)
def test_a_first_run_that_levels_off_goes_on_where_its_pace_would_bring_it_to_the_target(target, longest, ends):
    assert first_run(LEVELLING_OFF, target, longest) is ends


def test_a_first_run_is_not_judged_before_a_tenth_of_the_longest_nor_while_its_loss_has_risen():
    level = [2.0] + [1.99] * 29
    assert first_run(level, 0.1, 10.0)
    assert not first_run(level, 0.1, 100.0)  # 1.6 seconds of training
    assert not first_run([2.0] + [30.0 - look for look in range(27)], 0.1, 10.0)
    assert first_run([2.0, 30.0, 20.0, *(1.9 for _ in range(30))], 0.1, 10.0)


@pytest.mark.parametrize("stuck", [2.0, 2.05], ids=["where it began", "a little above"])
def test_a_first_run_that_is_stuck_ends_though_it_is_no_better_than_before_training(stuck):
    assert first_run([2.0, 2.1, *(stuck for _ in range(28))], 0.1, 10.0)
    assert not first_run([2.0, *(2.0 + look for look in range(1, 29))], 0.1, 10.0)  # it is not known how far it rises


def test_a_run_ahead_of_the_best_is_not_pruned_whatever_it_reaches():
    assert not pruned(study_with_best(BEST, 10.0), {0: 2.0, 9: 0.1})


@pytest.mark.parametrize(("value", "expected"), [(0.2, True), (0.8, False)])
def test_metrics_that_are_maximized_are_read_upwards(value, expected):
    study = study_with_best({0: 0.1, 1: 0.5, 4: 0.8, 8: 0.9}, 8.0, goal="maximize")
    assert pruned(study, {0: 0.1, 6: value}) is expected


# of a ResNet: the running statistics of its BatchNorm trail the weights at first
RISING_FIRST = {0: 3.5, 0.7: 39.0, 2.2: 114.8, 3.3: 24.1, 4.2: 17.2, 5.2: 66.6, 6: 5.0, 7: 0.2, 9: 0.02}


def test_a_run_whose_loss_rises_first_as_that_of_the_best_did_goes_on():
    study = study_with_best(RISING_FIRST, 9.0)
    assert not pruned(study, {0: 3.5, 0.7: 5.7, 2.1: 36.4, 2.9: 53.5})
    assert not pruned(study, {0: 3.6, 3: 4.0})
    assert pruned(study, {0: 3.5, 8.5: 80000.0})


def test_what_the_best_lost_again_is_not_held_against_others():
    dipping = {0: 3.5, 0.7: 3.05, 1.4: 4.9, 2.3: 43.7, 4: 20.0, 6: 2.0, 8.5: 0.03}
    assert not pruned(study_with_best(dipping, 8.5), {0: 3.5, 0.7: 3.85, 1.4: 3.6, 2.8: 13.9})
    assert pruned(study_with_best(dipping, 8.5), {0: 3.5, 17: 3.1})


def test_a_single_bad_look_of_the_best_or_its_noise_is_no_excuse():
    spiking = {**{0.1 * look: 2.0 - 0.017 * look for look in range(100)}, 9.5: 3.0, 10: 0.3}
    assert pruned(study_with_best(spiking, 10.0), {0: 2.0, 4: 1.9})
    noisy = {look / 10: (1 - 0.009 * look) * (1.2 if look % 2 else 1) for look in range(100)}
    assert pruned(study_with_best(noisy, 10.0), {0: 1.0, 3: 0.97})


@given(
    st.dictionaries(st.integers(0, 99), st.floats(-1e6, 1e6), min_size=1).map(
        lambda curve: {second / 10: value for second, value in sorted(curve.items())}
    ),
    st.floats(0.1, 1.0),
)
def test_a_run_like_the_best_one_goes_on_whatever_its_curve(curve, share):
    last = max(curve)
    study = study_with_best(curve, max(last, 0.1))
    assert not pruned(study, {second: value for second, value in curve.items() if second <= share * last})

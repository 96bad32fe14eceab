from dataclasses import replace
from types import SimpleNamespace

import law
import pytest

from batchtune.config.schema import Budget, Objective
from batchtune.document import CurvePoint, Target
from batchtune.tune.findings import target_warnings
from batchtune.tune.study.targets import Targets, automatic_target, levelled_off, measured


def curve(*values):
    return [CurvePoint(seconds=float(n), samples=n * 10, value=value) for n, value in enumerate(values)]


def test_a_falling_curve_sets_the_value_it_held_at_80_percent_of_the_time():
    target, _ = automatic_target(curve(10, 6, 4, 2, 1, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0), "minimize")
    assert target == 0.2


def test_a_curve_that_was_looked_at_twice_still_sets_a_hard_target():
    target, _ = automatic_target(curve(10, 9, 0), "minimize")
    assert target == pytest.approx(0.5)


def test_a_level_curve_sets_its_best_less_one_percent_of_the_improvement():
    target, _ = automatic_target(curve(10, 1, 0.5, 0.02, 0.01, 0.005, 0.004, 0.003, 0.002, 0.0), "minimize")
    assert target == pytest.approx(0.1)


def test_accuracy_sets_a_target_from_above():
    target, reason = automatic_target(curve(0.1, 0.5, 0.9, 0.95, 0.96, 0.96), "maximize")
    assert 0.9 <= target < 0.96
    assert "0.1 to 0.96" in reason


@pytest.mark.parametrize("values", [(2.0,), (2.0, 2.0, 2.0), (2.0, 3.0, None)])
def test_a_run_that_never_improves_sets_no_target(values):
    assert automatic_target(curve(*values), "minimize") is None


@pytest.mark.parametrize(
    ("values", "told"), [((2.33, 2.3, 2.294), 1), ((2.33, 1.0, 0.5), 0), ((), 0), ((0.0, -1.0, -2.0), 0)]
)
def test_a_baseline_that_hardly_learns_is_warned_of(values, told):
    ran = SimpleNamespace(role="baseline", curve=curve(*values))
    target = Target(metric="val_loss", goal="minimize", value=min(values, default=1.0))
    warned = target_warnings(target, [ran])
    assert [each.startswith("the target is only 1.5% below where training starts") for each in warned] == [True] * told


def test_a_target_that_a_diverging_baseline_has_set_is_warned_of():
    whole = Target(metric="val_loss", goal="minimize", value=0.5, reason="99% of the way, the baseline's best")
    assert target_warnings(whole) == []
    (told,) = target_warnings(whole.model_copy(update={"baseline_diverged_after_seconds": 0.2}))
    assert "the baseline diverged" in told


def test_a_run_whose_second_half_hardly_gained_has_levelled_off():
    falls = [10.0 * 0.5**n for n in range(20)]
    assert [levelled_off(curve(*falls[:n]), "minimize") for n in (9, 10, 20)] == [False, False, True]
    assert levelled_off(curve(*(-value for value in falls)), "maximize")


def test_a_run_that_goes_on_falling_or_never_has_does_not_level_off():
    assert not levelled_off(curve(*range(100, 60, -1)), "minimize")
    assert not levelled_off(curve(*[1.0] * 40), "minimize")
    assert not levelled_off(curve(), "minimize")


def test_a_run_of_a_moment_does_not_level_off():
    brief = [replace(point, seconds=point.seconds / 10) for point in curve(10, *[1.0] * 40)]
    assert levelled_off(curve(10, *[1.0] * 40), "minimize")
    assert not levelled_off(brief, "minimize")


@pytest.mark.parametrize(("joules", "told"), [(0.0, None), (2.0, 2.0)])
def test_energy_below_what_the_counter_shows_is_no_measurement(joules, told):
    reached = CurvePoint(seconds=1.0, samples=8, value=0.1, joules=joules)
    found = measured([reached], "finished", Target(metric="val_loss", goal="minimize", value=0.5, reason="set"))
    assert (found["outcome"], found.get("energy_to_target_joules")) == ("reached", told)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (60.0, "within budget.run (60 s); raise budget.run, or set"),
        (
            29.0,
            "in 29 s of training, what budget.total (70 s) had room for; start again with budget.total=9m, or set",
        ),
    ],
)
def test_a_target_that_no_run_has_reached_is_told_with_what_ended_them(seconds, told):
    ran = SimpleNamespace(outcome="capped", role="search", curve=[CurvePoint(seconds=seconds, samples=9, value=1.0)])
    pruned = SimpleNamespace(outcome="pruned", role="search", curve=ran.curve[:1])
    config = law.plan(objective=Objective(target=0.01), budget=Budget(run=60.0, total=70.0)).config
    targets = Targets(SimpleNamespace(user_attrs={}), config, SimpleNamespace(records=lambda: [ran, pruned]))
    assert (
        targets.unmet("9m")
        == f"no run reached the target (val_loss at most 0.01; the best was 1) {told} an easier objective.target"
    )


@pytest.mark.parametrize(("target", "value", "told"), [(60.0, 0.7, True), (60.0, 7.0, False), (0.9, 0.7, False)])
def test_a_target_in_percent_of_a_metric_that_is_a_share_of_one_is_told(target, value, told):
    ran = SimpleNamespace(outcome="finished", role="search", curve=[CurvePoint(seconds=60.0, samples=9, value=value)])
    objective = Objective(metric="accuracy", goal="maximize", target=target)
    config = law.plan(objective=objective, budget=Budget(run=60.0, total=70.0)).config
    found = Targets(SimpleNamespace(user_attrs={}), config, SimpleNamespace(records=lambda: [ran])).unmet("9m")
    assert ("the best was 0.7, and none is above 1: is 0.6 meant?" in found) == told

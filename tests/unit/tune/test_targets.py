import pytest

from batchtune.document import CurvePoint, Target
from batchtune.tune.objective.targets import automatic_target
from batchtune.tune.verdict.warnings import target_warnings


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


def test_a_target_that_a_diverging_baseline_has_set_is_warned_of():
    whole = Target(metric="val_loss", goal="minimize", value=0.5, reason="99% of the way, the baseline's best")
    assert target_warnings(whole) == target_warnings(None) == []
    (told,) = target_warnings(whole.model_copy(update={"baseline_diverged_after_seconds": 0.2}))
    assert "the baseline diverged" in told

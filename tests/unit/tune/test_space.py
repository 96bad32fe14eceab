import law
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from batchtune.config.schema import Baseline, Config
from batchtune.config.space import LearningRate, Parameter
from batchtune.document import NO_CLIPPING, GradientClipping, ProbeResult, Trial
from batchtune.errors import UsageError
from batchtune.tune.plan.space import Plan, Space


def space(
    *, precisions=("fp32",), defaults=None, sizes=(32, 48, 64), rates=None, clipping=None, own=NO_CLIPPING, **parameters
):
    config = Config(
        task="model.py",
        space={name: Parameter(**each) for name, each in parameters.items()},
        baseline=Baseline(batch_size=48, learning_rate=2.0),
        learning_rate=LearningRate(**rates or {}),
        gradient_clipping=clipping,
    )
    plan = Plan(
        config=config,
        probe=ProbeResult(precision="fp32", max_batch_size=64),
        prior=law.prior(config, sizes),
        precisions=list(precisions),
        optimizer_defaults=defaults or {},
        gradient_clipping=own,
    )
    return Space(plan)


def test_the_range_of_learning_rates_holds_that_of_the_baseline():
    found = space()
    rates = found.distributions["learning_rate"]
    assert (rates.low, rates.high, rates.log) == (1e-5, 2.0, True)
    assert found.learning_rates == (1e-5, 2.0)
    assert all(found.searched[name] == found.distributions[name] for name in ("batch_size", "learning_rate"))


@pytest.mark.parametrize(
    ("rates", "searched", "holds"),
    [
        ({"min": 1e-6, "max": 1e-4}, (1e-6, 1e-4), (1e-6, 2.0)),
        ({"max": 0.5}, (1e-5, 0.5), (1e-5, 2.0)),
        ({"min": 0.1}, (0.1, 2.0), (0.1, 2.0)),  # the largest is open
        ({"min": 3.0, "max": 5.0}, (3.0, 5.0), (2.0, 5.0)),
    ],
)
def test_what_is_searched_keeps_to_the_users_rates_and_the_study_holds_that_of_the_baseline(rates, searched, holds):
    found = space(rates=rates)
    assert found.learning_rates == searched
    assert found.searched["learning_rate"] == FloatDistribution(*searched, log=True)
    assert found.distributions["learning_rate"] == FloatDistribution(*holds, log=True)


def test_the_study_holds_a_baseline_batch_that_is_not_searched():
    found = space(sizes=(64, 128))
    assert found.searched["batch_size"] == CategoricalDistribution((64, 128))
    assert found.distributions["batch_size"] == CategoricalDistribution((48, 64, 128))


def test_precision_is_searched_where_there_is_a_choice_and_the_first_is_the_baselines():
    both = space(precisions=("bf16", "fp32"))
    assert both.distributions["precision"].choices == ("bf16", "fp32")
    assert both.baseline["precision"] == "bf16"
    assert both.precision({"precision": "fp32"}) == "fp32"
    assert "precision" not in space().distributions
    assert space().precision({}) == "fp32"


def test_the_baseline_has_the_defaults_of_the_users_optimizer():
    found = space(defaults={"momentum": 0.9}, momentum={"min": 0.0, "max": 0.95})
    assert found.baseline == {"batch_size": 48, "learning_rate": 2.0, "momentum": 0.9}
    assert found.optimizer_arguments(found.baseline) == {"momentum": 0.9}


def test_a_range_is_widened_to_hold_the_baseline():
    found = space(defaults={"decay": 0.5}, decay={"min": 1e-4, "max": 0.1, "log": True})
    assert found.distributions["decay"] == FloatDistribution(1e-4, 0.5, log=True)
    assert found.searched["decay"] == FloatDistribution(1e-4, 0.1, log=True)  # and not searched beyond


@pytest.mark.parametrize(
    ("choices", "default", "expected"),
    [(["a", "b"], "b", ("a", "b")), (["a", "b"], "c", ("c", "a", "b")), ([1, 2], True, (True, 1, 2))],
)
def test_the_baselines_value_is_one_of_the_choices(choices, default, expected):
    found = space(defaults={"kind": default}, kind={"choices": choices})
    assert found.distributions["kind"] == CategoricalDistribution(expected)


@pytest.mark.parametrize(
    ("default", "parameter", "told"),
    [
        (0.0, {"min": 1e-4, "max": 0.1, "log": True}, "default 0, what you run today, has no logarithm"),
        (True, {"min": 0.0, "max": 1.0}, "default True is in no range; write choices"),
        (float("inf"), {"min": 0.0, "max": 1.0}, "default is inf; give it one that is a finite number"),
        (float("nan"), {"choices": [0.1, 0.2]}, "default is nan; give it one that is a finite number"),
        ("adam", {"min": 0.0, "max": 1.0}, "default 'adam' is in no range; write choices"),
    ],
)
def test_a_range_that_cannot_hold_the_baseline_is_refused(default, parameter, told):
    with pytest.raises(UsageError, match=f"space.decay: .*{told}"):
        space(defaults={"decay": default}, decay=parameter)


def test_a_trial_gives_its_parameters_back():
    found = space(precisions=("bf16", "fp32"), defaults={"momentum": 0.9}, momentum={"min": 0.0, "max": 0.95})
    trial = Trial(
        number=3,
        state="complete",
        batch_size=64,
        learning_rate=0.1,
        precision="fp32",
        optimizer_arguments={"momentum": 0.5},
        seed=0,
    )
    assert found.of(trial) == {"batch_size": 64, "learning_rate": 0.1, "precision": "fp32", "momentum": 0.5}


def test_gradients_are_clipped_as_the_task_does_where_that_is_not_searched():
    own = GradientClipping(norm=1.0)
    found = space(own=own)
    assert "gradient_clipping" not in found.distributions
    assert found.gradient_clipping(found.baseline) == own


def test_clipping_is_searched_around_what_the_baseline_does():
    searched = {"norm": {"min": 0.1, "max": 10.0, "log": True}}
    found = space(clipping=searched, own=GradientClipping(norm=20.0))
    assert found.distributions["gradient_clipping"] == FloatDistribution(0.1, 20.0, log=True)
    assert found.searched["gradient_clipping"] == FloatDistribution(0.1, 10.0, log=True)
    assert found.gradient_clipping(found.baseline) == GradientClipping(norm=20.0)
    assert found.optimizer_arguments(found.baseline) == {}


def test_one_of_the_choices_of_clipping_is_none():
    found = space(clipping={"value": {"choices": [0, 1, 0.5]}})
    assert found.distributions["gradient_clipping"] == CategoricalDistribution((0.0, 1.0, 0.5))
    assert found.gradient_clipping(found.baseline) == NO_CLIPPING
    assert found.gradient_clipping({"gradient_clipping": 0.5}) == GradientClipping(value=0.5)


def test_a_trial_gives_its_clipping_back():
    found = space(clipping={"norm": {"choices": [0, 1]}})
    usual = {"number": 3, "state": "complete", "batch_size": 64, "learning_rate": 0.1, "precision": "fp32", "seed": 0}
    assert found.of(Trial(**usual, gradient_clipping=GradientClipping(norm=1.0)))["gradient_clipping"] == 1.0
    assert found.of(Trial(**usual, gradient_clipping=NO_CLIPPING))["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("clipping", "own", "told"),
    [
        ({"norm": {"min": 0.1, "max": 1.0}}, NO_CLIPPING, "norm: a range has no place for what you run today"),
        ({"norm": {"choices": [1, 2]}}, GradientClipping(value=0.5), "norm: the task clips by the other of norm and"),
    ],
)
def test_clipping_that_cannot_be_searched_is_refused(clipping, own, told):
    with pytest.raises(UsageError, match=f"gradient_clipping.{told}"):
        space(clipping=clipping, own=own)

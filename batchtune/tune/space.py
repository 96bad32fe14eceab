"""The search space of a study as Optuna has it, and the point of it that the user runs today."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from batchtune.config import Config, Parameter
from batchtune.errors import UsageError
from batchtune.results import Trial, Value
from batchtune.tune.plan import Plan


class Space:
    """Batch size and learning rate, precision where there is a choice, and the user's own arguments of the optimizer.

    The baseline is a point of it: ranges are widened to hold what the user runs today.

    Attributes:
        distributions: by the name of the parameter.
        learning_rates: the smallest and the largest.
        baseline: the parameters of what the user runs today.
    """

    def __init__(self, plan: Plan) -> None:
        rates, base = plan.config.learning_rate, plan.config.baseline
        self.learning_rates = min(rates.min, base.learning_rate), max(rates.max, base.learning_rate)
        self.distributions: dict[str, BaseDistribution] = {
            "batch_size": CategoricalDistribution(plan.candidates.batch_sizes),
            "learning_rate": FloatDistribution(*self.learning_rates, log=True),
        }
        self.baseline: dict[str, Any] = {"batch_size": base.batch_size, "learning_rate": base.learning_rate}
        if len(plan.precisions) > 1:
            self.distributions["precision"] = CategoricalDistribution(plan.precisions)
            self.baseline["precision"] = plan.precisions[0]
        self._first_precision = plan.precisions[0]
        self._arguments = argument_distributions(plan.config, plan.optimizer_defaults)
        self.distributions |= self._arguments
        self.baseline |= {name: plan.optimizer_defaults[name] for name in self._arguments}

    @property
    def has_other_parameters(self) -> bool:
        """Whether more than batch size and learning rate is searched: of that the response surface knows nothing."""
        return self.distributions.keys() != {"batch_size", "learning_rate"}

    def of(self, trial: Trial) -> dict[str, Any]:
        """The parameters of a trial."""
        values = trial.model_dump() | trial.optimizer_arguments
        return {name: values[name] for name in self.distributions if name in values}

    def precision(self, params: Mapping[str, Any]) -> str:
        """The precision that parameters stand for."""
        return str(params.get("precision", self._first_precision))

    def optimizer_arguments(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """Those of the parameters that are for the user's build_optimizer."""
        return {name: params[name] for name in self._arguments if name in params}


def argument_distributions(config: Config, defaults: Mapping[str, Value]) -> dict[str, BaseDistribution]:
    """What is searched of each argument under `space`, today's value included.

    Raises:
        UsageError: today's value is no number although a range is asked for, has no logarithm, or is infinite.
    """
    return {name: _distribution(name, parameter, defaults[name]) for name, parameter in config.space.items()}


def _distribution(name: str, parameter: Parameter, today: Value) -> BaseDistribution:
    if isinstance(today, float) and not math.isfinite(today):
        raise UsageError(f"space.{name}: build_optimizer's default is {today}; give it one that is a finite number")
    if parameter.choices is not None:
        known = any(choice == today and type(choice) is type(today) for choice in parameter.choices)
        return CategoricalDistribution(parameter.choices if known else [today, *parameter.choices])
    if isinstance(today, bool | str):
        raise UsageError(f"space.{name}: build_optimizer's default {today!r} is in no range; write choices: [...]")
    if parameter.log and today <= 0:
        raise UsageError(
            f"space.{name}: build_optimizer's default {today:g}, what you run today, has no logarithm; leave out log, "
            "or raise the default"
        )
    assert parameter.min is not None and parameter.max is not None  # noqa: PT018, S101 - the configuration is checked
    return FloatDistribution(min(parameter.min, today), max(parameter.max, today), log=parameter.log)

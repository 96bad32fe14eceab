"""The search space of a study as Optuna has it, and the point of it that the user runs today."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from batchtune.config.schema import Config, Parameter
from batchtune.document import GradientClipping, Trial, Value
from batchtune.errors import UsageError
from batchtune.tune.plan.plan import Plan

CLIPPING = "gradient_clipping"  # the parameter's name in the study


class Space:
    """Batch size and learning rate, precision where there is a choice, and the user's own arguments of the optimizer.

    The baseline is a point of it: distributions are widened to hold what the user runs today, which may be outside of
    the bounds of what is searched.

    Attributes:
        distributions: by the name of the parameter.
        searched: what of a parameter's values may be searched, where that may be less.
        learning_rates: the smallest and the largest to search.
        baseline: the parameters of what the user runs today.
    """

    def __init__(self, plan: Plan) -> None:
        base, sizes = plan.config.baseline, plan.candidates.batch_sizes
        self.learning_rates = lowest, highest = rates_to_search(plan.config)
        self.searched: dict[str, BaseDistribution] = {
            "batch_size": CategoricalDistribution(sizes),
            "learning_rate": FloatDistribution(lowest, highest, log=True),
        }
        rates = min(lowest, base.learning_rate), max(highest, base.learning_rate)
        self.distributions: dict[str, BaseDistribution] = {
            "batch_size": CategoricalDistribution(sorted({*sizes, base.batch_size})),
            "learning_rate": FloatDistribution(*rates, log=True),
        }
        self.baseline: dict[str, Any] = {"batch_size": base.batch_size, "learning_rate": base.learning_rate}
        if len(plan.precisions) > 1:
            self.distributions["precision"] = CategoricalDistribution(plan.precisions)
            self.baseline["precision"] = plan.precisions[0]
        self._first_precision = plan.precisions[0]
        self._arguments = argument_distributions(plan.config, plan.optimizer_defaults)
        self.distributions |= self._arguments
        self.baseline |= {name: plan.optimizer_defaults[name] for name in self._arguments}
        self._clipping = plan.gradient_clipping
        searched = dict(plan.config.space)
        if (clipping := plan.config.gradient_clipping) is not None and clipping.searched is not None:
            searched[CLIPPING] = clipping.searched
            self.distributions[CLIPPING] = clipping_distribution(plan.config, plan.gradient_clipping)
            self.baseline[CLIPPING] = clipping_today(plan.config, plan.gradient_clipping)
        self._clipping_of = clipping.of if clipping is not None else None
        for name, each in searched.items():
            if each.min is not None and each.max is not None:
                self.searched[name] = FloatDistribution(each.min, each.max, log=each.log)
                self.baseline[name] = float(self.baseline[name])  # 0 is written 0.0 there

    @property
    def has_other_parameters(self) -> bool:
        """Whether more than batch size and learning rate is searched: of that the response surface knows nothing."""
        return self.distributions.keys() != {"batch_size", "learning_rate"}

    def of(self, trial: Trial) -> dict[str, Any]:
        """The parameters of a trial."""
        values = trial.model_dump() | trial.optimizer_arguments | {CLIPPING: _number_of(trial.gradient_clipping)}
        return {name: values[name] for name in self.distributions if name in values}

    def precision(self, params: Mapping[str, Any]) -> str:
        """The precision that parameters stand for."""
        return str(params.get("precision", self._first_precision))

    def gradient_clipping(self, params: Mapping[str, Any]) -> GradientClipping:
        """What parameters stand for; where it is not searched, what every run does."""
        if CLIPPING not in params or self._clipping_of is None:
            return self._clipping
        return self._clipping_of(params[CLIPPING])

    def optimizer_arguments(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """Those of the parameters that are for the user's build_optimizer."""
        return {name: params[name] for name in self._arguments if name in params}


def rates_to_search(config: Config) -> tuple[float, float]:
    """The smallest and the largest learning rate to search: a bound that the user has not set gives way to today's."""
    rates, today = config.learning_rate, config.baseline.learning_rate
    lowest = rates.min if "min" in rates.model_fields_set else min(rates.min, today)
    return lowest, rates.max if "max" in rates.model_fields_set else max(rates.max, today)


def argument_distributions(config: Config, defaults: Mapping[str, Value]) -> dict[str, BaseDistribution]:
    """What is searched of each argument under `space`, today's value included.

    Raises:
        UsageError: today's value is no number although a range is asked for, has no logarithm, or is infinite.
    """
    return {name: _distribution(name, parameter, defaults[name]) for name, parameter in config.space.items()}


def clipping_today(config: Config, own: GradientClipping) -> float:
    """The norm or value to which gradients are clipped today, 0 for none."""
    given = config.baseline.gradient_clipping
    return _number_of(own) if given is None else given


def clipping_distribution(config: Config, own: GradientClipping) -> BaseDistribution:
    """What is searched of gradient clipping, today's included.

    Args:
        config: a configuration that searches it.
        own: what the task does by itself.

    Raises:
        UsageError: today's is of the other kind, or there is none although a range is asked for.
    """
    clipping, today = config.gradient_clipping, clipping_today(config, own)
    assert clipping is not None and clipping.searched is not None  # noqa: PT018, S101 - the caller looked
    key, searched = f"gradient_clipping.{clipping.kind}", clipping.searched
    if config.baseline.gradient_clipping is None and today and getattr(own, clipping.kind) is None:
        raise UsageError(f"{key}: the task clips by the other of norm and value; search that one")
    if searched.choices is None and not today:
        raise UsageError(
            f"{key}: a range has no place for what you run today, which clips nothing; write choices with a 0 in them, "
            "such as {choices: [0, 0.5, 1.0, 5.0]}, or baseline: {gradient_clipping: 1.0}"
        )
    choices = searched.choices or []
    if any(isinstance(each, bool | str) or each < 0 for each in choices):
        raise UsageError(f"{key}: choices are numbers from 0 (none) up")
    if searched.min is not None and searched.min <= 0:
        raise UsageError(f"{key}: min {searched.min:g} clips everything away; raise it")
    numbers = searched.model_copy(update={"choices": [float(each) for each in choices] or None})
    return _distribution(key, numbers, today)


def _number_of(clipping: GradientClipping | None) -> float:
    return (clipping.norm or clipping.value or 0.0) if clipping else 0.0


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

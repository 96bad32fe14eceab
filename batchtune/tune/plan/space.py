"""What a study works with once the probe is done: its plan, and the search space as Optuna has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from batchtune.config.schema import Config
from batchtune.config.space import CLIPS_NOTHING, Parameter
from batchtune.document import NO_CLIPPING, GradientClipping, Prior, ProbeResult, Trial, Value
from batchtune.errors import UsageError
from batchtune.tune.plan.tokens import TokenBatches
from batchtune.vocabulary import Variant

CLIPPING, VARIANT = "gradient_clipping", "trained by"  # the parameters' names in the study


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Configuration and measurements before the study.

    Attributes:
        config: the configuration.
        probe: the largest micro-batch and the step times, loading data included as far as it is known.
        prior: the global batch sizes to choose from, and what the search starts from.
        precisions: to choose from; the first is the baseline's.
        gradient_clipping: of every run, unless it is searched: what is asked for, or what the task does by itself.
        optimizer_defaults: the baseline's values of the arguments under `space`.
        has_schedule: learning rates change over the steps of a run.
        training_seconds: that the user's own training takes today, where its object says how long it is.
        tokens: what batches are made of where all sizes here count tokens; None: they count samples.
    """

    config: Config
    probe: ProbeResult
    prior: Prior
    precisions: list[str]
    gradient_clipping: GradientClipping = NO_CLIPPING
    optimizer_defaults: Mapping[str, Value] = field(default_factory=dict)
    has_schedule: bool = False
    training_seconds: float | None = None
    tokens: TokenBatches | None = None

    @property
    def variants(self) -> list[Variant]:
        """What runs may be trained by, as far as anything fits so; the first is the baseline's."""
        first, *others = self.config.variants
        known = self.probe.other_variants or {}
        return [first, *(each for each in others if known.get(each.name))]

    def max_batch_size(self, variant: Variant) -> int:
        """What fits at once, on all ranks together."""
        return (self.probe.other_variants or {}).get(variant.name) or self.probe.max_batch_size or 1

    def micro_batch_size(self, variant: Variant) -> int | None:
        """What a fixed global batch is made of; None: whatever fits, as no other variant than the first was timed."""
        return self.prior.micro_batch_size if variant == self.variants[0] else None


class Space:
    """Batch size and learning rate, precision where there is a choice, and the user's own arguments of the optimizer.

    The baseline is a point of it: distributions are widened to hold it, which may be outside of the bounds of what is
    searched.

    Attributes:
        distributions: by the name of the parameter.
        searched: what of a parameter's values may be searched, where that may be less.
        learning_rates: the smallest and the largest to search.
        baseline: its parameters.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, base, sizes = plan, plan.config.baseline, plan.prior.batch_sizes
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
        self.baseline: dict[str, Value] = {"batch_size": base.batch_size, "learning_rate": base.learning_rate}
        for name, choices in (("precision", plan.precisions), (VARIANT, [each.name for each in plan.variants])):
            if len(choices) > 1:
                self.distributions[name] = CategoricalDistribution(choices)
                self.baseline[name] = choices[0]
        self.distributions |= argument_distributions(plan.config, plan.optimizer_defaults)
        self.baseline |= {name: plan.optimizer_defaults[name] for name in plan.config.space}
        searched = dict(plan.config.space)
        if (clipping := plan.config.gradient_clipping) is not None and clipping.searched is not None:
            searched[CLIPPING] = clipping.searched
            self.distributions[CLIPPING] = clipping_distribution(plan.config, plan.gradient_clipping)
            self.baseline[CLIPPING] = baseline_clipping(plan.config, plan.gradient_clipping)
        for name, each in searched.items():
            if each.min is not None and each.max is not None:
                self.searched[name] = FloatDistribution(each.min, each.max, log=each.log)
                self.baseline[name] = float(self.baseline[name])  # 0 is written 0.0 there

    @property
    def has_other_parameters(self) -> bool:
        """Whether more than batch size and learning rate is searched: of that the response surface knows nothing."""
        return self.distributions.keys() != {"batch_size", "learning_rate"}

    def of(self, trial: Trial) -> dict[str, Value]:
        """The parameters of a trial."""
        values = trial.model_dump() | trial.optimizer_arguments | {CLIPPING: _number_of(trial.gradient_clipping)}
        values[VARIANT] = trial.variant.name
        return {name: values[name] for name in self.distributions if name in values}

    def precision(self, params: Mapping[str, Value]) -> str:
        """The precision that parameters stand for."""
        return str(params.get("precision", self._plan.precisions[0]))

    def variant(self, params: Mapping[str, Value]) -> Variant:
        """The variant that parameters stand for."""
        return Variant.named(params[VARIANT]) if VARIANT in params else self._plan.variants[0]

    def gradient_clipping(self, params: Mapping[str, Value]) -> GradientClipping:
        """What parameters stand for; where it is not searched, what every run does."""
        clipping = self._plan.config.gradient_clipping
        return clipping.of(float(params[CLIPPING])) if clipping and CLIPPING in params else self._plan.gradient_clipping

    def optimizer_arguments(self, params: Mapping[str, Value]) -> dict[str, Value]:
        """Those of the parameters that are for the user's build_optimizer."""
        return {name: params[name] for name in self._plan.config.space if name in params}


def rates_to_search(config: Config) -> tuple[float, float]:
    """The rates to search: a bound that the user has not set gives way to the baseline's."""
    rates, baseline = config.learning_rate, config.baseline.learning_rate
    lowest = rates.min if "min" in rates.model_fields_set else min(rates.min, baseline)
    return lowest, rates.max if "max" in rates.model_fields_set else max(rates.max, baseline)


def argument_distributions(config: Config, defaults: Mapping[str, Value]) -> dict[str, BaseDistribution]:
    """What is searched of each argument under `space`, the baseline's value included.

    Raises:
        UsageError: that value is no number although a range is asked for, has no logarithm, or is infinite.
    """
    return {name: _distribution(name, parameter, defaults[name]) for name, parameter in config.space.items()}


def baseline_clipping(config: Config, own: GradientClipping) -> float:
    """The norm or value to which the baseline's gradients are clipped, 0 for none."""
    given = config.baseline.gradient_clipping
    return _number_of(own) if given is None else given


def clipping_distribution(config: Config, own: GradientClipping) -> BaseDistribution:
    """What is searched of gradient clipping, the baseline's included; `own` is what the task does by itself.

    Raises:
        UsageError: the baseline's is of the other kind, or there is none although a range is asked for.
    """
    clipping, baseline = config.gradient_clipping, baseline_clipping(config, own)
    assert clipping is not None and clipping.searched is not None  # noqa: PT018, S101 - the caller looked
    key, searched = f"gradient_clipping.{clipping.kind}", clipping.searched
    if config.baseline.gradient_clipping is None and baseline and getattr(own, clipping.kind) is None:
        raise UsageError(f"{key}: the task clips by the other of norm and value; search that one")
    if searched.choices is None and not baseline:
        raise UsageError(f"{key}: {CLIPS_NOTHING}")
    numbers = searched.model_copy(update={"choices": [float(each) for each in searched.choices or []] or None})
    return _distribution(key, numbers, baseline)


def _number_of(clipping: GradientClipping | None) -> float:
    return (clipping.norm or clipping.value or 0.0) if clipping else 0.0


def _distribution(name: str, parameter: Parameter, baseline: Value) -> BaseDistribution:
    if isinstance(baseline, float) and not math.isfinite(baseline):
        raise UsageError(f"space.{name}: build_optimizer's default is {baseline}; give it one that is a finite number")
    if parameter.choices is not None:
        known = any(choice == baseline and type(choice) is type(baseline) for choice in parameter.choices)
        return CategoricalDistribution(parameter.choices if known else [baseline, *parameter.choices])
    if isinstance(baseline, bool | str):
        raise UsageError(f"space.{name}: build_optimizer's default {baseline!r} is in no range; write choices: [...]")
    if parameter.log and baseline <= 0:
        raise UsageError(
            f"space.{name}: build_optimizer's default {baseline:g}, what you run today, has no logarithm; "
            "leave out log, or raise the default"
        )
    assert parameter.min is not None and parameter.max is not None  # noqa: PT018, S101 - the configuration is checked
    return FloatDistribution(min(parameter.min, baseline), max(parameter.max, baseline), log=parameter.log)

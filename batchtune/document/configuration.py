"""What makes two trials the same configuration."""

from __future__ import annotations

from collections.abc import Iterable

from batchtune.document.probe import Value
from batchtune.document.study import GradientClipping, Recommendation, ScalingPoint, Trial
from batchtune.vocabulary import Variant

Configuration = tuple[int, float, str, tuple[tuple[str, Value], ...], GradientClipping | None, Variant]


def config_of(found: Trial | Recommendation | ScalingPoint) -> Configuration:
    """What makes two of them the same configuration, whatever their seed and how a batch is made up."""
    size = found.batch_size if isinstance(found, Trial) else found.global_batch_size
    arguments = tuple(sorted(found.optimizer_arguments.items()))
    return size, found.learning_rate or 0.0, found.precision, arguments, found.gradient_clipping, found.variant


def by_configuration(trials: Iterable[Trial]) -> dict[Configuration, list[Trial]]:
    """The runs of each configuration, both in their order."""
    found: dict[Configuration, list[Trial]] = {}
    for trial in trials:
        found.setdefault(config_of(trial), []).append(trial)
    return found


def is_of(trial: Trial, configuration: Recommendation | None) -> bool:
    """Whether a trial ran with exactly this configuration."""
    return configuration is not None and config_of(trial) == config_of(configuration)

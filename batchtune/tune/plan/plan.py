"""What a study works with once the probe is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchtune.config.schema import Config
from batchtune.document import NO_CLIPPING, GradientClipping, Prior, ProbeResult, Value
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.prior import Candidates
from batchtune.tune.plan.steps import with_loading


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Configuration and measurements before the study.

    Attributes:
        config: the configuration.
        probe: the largest micro-batch and the step times, loading data included as far as it is known.
        candidates: the global batch sizes to choose from.
        precisions: to choose from; the first is the baseline's.
        optimizer: the class of the user's optimizer.
        gradient_clipping: of every run, unless it is searched: what is asked for, or what the task does by itself.
        optimizer_defaults: what the arguments under `space` are today.
        prior: what the search starts from; None: what the baseline tells.
    """

    config: Config
    probe: ProbeResult
    candidates: Candidates
    precisions: list[str]
    optimizer: str
    gradient_clipping: GradientClipping = NO_CLIPPING
    optimizer_defaults: Mapping[str, Value] = field(default_factory=dict)
    prior: Prior | None = None


def make_plan(config: Config, opened: Opened, probe: ProbeResult, prior: Prior) -> Plan:
    """The plan of a study whose task was opened, probed and measured; `Plan` says what is what."""
    return Plan(
        config=config,
        probe=with_loading(probe, prior.loader_seconds_per_sample, opened.device),
        candidates=Candidates(tuple(prior.batch_sizes), prior.batch_sizes_reason),
        precisions=[name for name, _ in opened.precision],
        optimizer=opened.optimizer,
        gradient_clipping=opened.gradient_clipping,
        optimizer_defaults=opened.optimizer_defaults,
        prior=prior,
    )

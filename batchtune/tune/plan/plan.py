"""What a study works with once the probe is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batchtune.config.schema import Config
from batchtune.document import Prior, ProbeResult, Value
from batchtune.tune.plan.prior import Candidates


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Configuration and measurements before the study.

    Attributes:
        config: the configuration.
        probe: the largest micro-batch and the step times, loading data included as far as it is known.
        candidates: the global batch sizes to choose from.
        precisions: to choose from; the first is the baseline's.
        optimizer: the class of the user's optimizer.
        optimizer_defaults: what the arguments under `space` are today.
        prior: what the search starts from; None: what the baseline tells.
        checkpoints: the folder in which stopped runs are kept; None: they are not.
    """

    config: Config
    probe: ProbeResult
    candidates: Candidates
    precisions: list[str]
    optimizer: str
    optimizer_defaults: Mapping[str, Value] = field(default_factory=dict)
    prior: Prior | None = None
    checkpoints: Path | None = None

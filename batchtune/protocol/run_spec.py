"""What a training run is asked for: the one form in which the study, the line to the child and the loop know it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchtune.document import NO_CLIPPING, GradientClipping
from batchtune.vocabulary import Goal


def pace_kind(optimizer_arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What of the optimizer's arguments may change how long a step takes: names, switches, counts; no other number."""
    return tuple(sorted((name, each) for name, each in optimizer_arguments.items() if not isinstance(each, float)))


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One configuration and how long it may train.

    Attributes:
        limit_seconds: training time after which the run ends.
        target: metric value at which the run ends; None runs to the limit.
        evaluate_every: training seconds between evaluations; None for the automatic pace.
        evaluation_batch_size: samples in one forward pass of the default evaluation.
        expected_step_seconds: an optimizer step as predicted from other runs; None where there were none.
        optimizer_arguments: what else is handed to the user's build_optimizer, by name.
        gradient_clipping: before the optimizers' steps.
        limit_joules: energy in training after which the run ends; None for no such limit.
        horizon_seconds: training time that the user's scheduler is laid out for; None for `limit_seconds`.
        total_steps: the same in steps, where an earlier run of the configuration has settled it.
        wall_seconds: on the clock on the wall after which it is to ask whether to go on; None: there is no hurry.
    """

    micro_batch_size: int
    accumulation_steps: int
    learning_rate: float
    precision: str
    seed: int
    metric: str
    goal: Goal
    target: float | None
    limit_seconds: float
    evaluate_every: float | None
    evaluation_batch_size: int
    expected_step_seconds: float | None = None
    optimizer_arguments: dict[str, Any] = field(default_factory=dict)
    gradient_clipping: GradientClipping = NO_CLIPPING
    limit_joules: float | None = None
    horizon_seconds: float | None = None
    total_steps: int | None = None
    wall_seconds: float | None = None

    @property
    def batch_size(self) -> int:
        """Global batch size."""
        return self.micro_batch_size * self.accumulation_steps

    def reached(self, value: float) -> bool:
        """Whether a metric value meets the target."""
        if self.target is None or not math.isfinite(value):
            return False
        return value <= self.target if self.goal == "minimize" else value >= self.target


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        outcome: `reached`, `finished`, `pruned` or `diverged`.
        total_steps: the horizon that the user's scheduler was given; None without one.
        evaluation_seconds: what its evaluations took.
        optimizer: its class, where arguments of build_optimizer may have chosen it.
    """

    outcome: str
    total_steps: int | None = None
    evaluation_seconds: float | None = None
    optimizer: str | None = None

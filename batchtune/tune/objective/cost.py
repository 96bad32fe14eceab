"""What a study with a target counts until it is met: seconds of training or joules, and under which names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchtune.document import CurvePoint, Trial
from batchtune.vocabulary import Kind


@dataclass(frozen=True, slots=True)
class Cost:
    """A quantity that grows along a run, of which a study wants the least until the target.

    Attributes:
        field: of a curve's point.
        attribute: of a trial that reached the target: what it took.
        adverb: how something that costs less gets to the target.
        gain: of a recommendation: how much less it costs than the baseline.
        step: what one of the whole-numbered steps is worth at which a trial reports to Optuna.
    """

    field: Literal["seconds", "joules"]
    attribute: Literal["time_to_target_seconds", "energy_to_target_joules"]
    adverb: str
    gain: Literal["speedup_over_baseline", "energy_saving_over_baseline"]
    step: float

    def at(self, point: CurvePoint) -> float:
        """What the run had cost at a point of its curve."""
        value: float | None = getattr(point, self.field)
        return value or 0.0

    def of(self, trial: Trial) -> float | None:
        """What the target cost a trial; None where it did not get there."""
        value: float | None = getattr(trial, self.attribute)
        return value

    def spent(self, trial: Trial) -> float | None:
        """What a trial cost in all."""
        return self.at(trial.curve[-1]) if trial.curve else None if self.field == "joules" else trial.training_seconds


SECONDS = Cost(
    field="seconds", attribute="time_to_target_seconds", adverb="fast", gain="speedup_over_baseline", step=1e-3
)
JOULES = Cost(
    field="joules",
    attribute="energy_to_target_joules",
    adverb="sparingly, in joules,",
    gain="energy_saving_over_baseline",
    step=1.0,
)


def cost_of(kind: Kind) -> Cost | None:
    """What an objective counts; None for the best metric, which has no target."""
    return {"time_to_target": SECONDS, "energy_to_target": JOULES, "best_metric": None}[kind]

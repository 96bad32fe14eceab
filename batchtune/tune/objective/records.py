"""How a trial of the study and a trial of the result document are the same thing: attributes there, fields here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from optuna.trial import FrozenTrial, TrialState

from batchtune.document import CurvePoint, Target, Trial, Value
from batchtune.tune.objective.cost import JOULES, SECONDS

_STATES: dict[TrialState, Literal["complete", "pruned", "fail", "running", "waiting"]] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "fail",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}

_OURS = {"batch_size", "learning_rate", "precision", "gradient_clipping"}
_KEPT = (  # attributes that have a field's name
    *("role", "outcome", "micro_batch_size", "gradient_accumulation_steps", "time_to_target_seconds"),
    *("samples_to_target", "energy_to_target_joules", "training_seconds", "measured_training_seconds"),
    *("evaluation_seconds", "total_steps", "optimizer", "gradient_clipping", "message"),
)
FAILED = {"oom", "crash", "timeout", "user_error"}
FAILED_FOR_GOOD = FAILED - {"oom"}  # which is run again, in smaller micro-batches
CUT_OFF = {"cut_off": True, "message": "budget.total was used up"}
"""Attributes of a run that the end of the budget cut off: nothing that counts, so that it is to run again."""


def is_cut_off(attributes: Mapping[str, Any]) -> bool:
    """Whether a trial has the attributes of a run that the end of the budget cut off."""
    return bool(attributes.get("cut_off"))


def is_settled(trial: FrozenTrial) -> bool:
    """Whether it is known what the trial tries; one that is cut off while the sampler proposes has no parameters."""
    return {"batch_size", "learning_rate"} <= _params(trial).keys()


def _params(trial: FrozenTrial) -> dict[str, Any]:
    return dict(trial.system_attrs.get("fixed_params", {}) | trial.params)


def to_record(trial: FrozenTrial) -> Trial:
    """The result document's view of a trial of the study that is settled."""
    attributes: dict[str, Any] = trial.user_attrs
    params = _params(trial)
    arguments: dict[str, Value] = {name: value for name, value in params.items() if name not in _OURS}
    kept = {name: attributes[name] for name in _KEPT if name in attributes}  # a study has many: none of what is absent
    return Trial(
        number=trial.number,
        state=_STATES[trial.state],
        batch_size=int(params["batch_size"]),
        learning_rate=float(params["learning_rate"]),
        precision=str(params.get("precision", attributes.get("precision", "fp32"))),
        optimizer_arguments=arguments,
        seed=int(attributes.get("seed", 0)),
        value=attributes.get("best_value"),
        curve=to_curve(attributes.get("curve", [])),
        **kept,
    )


def curve_attribute(curve: list[CurvePoint]) -> list[tuple[float | int | None, ...]]:
    """A curve as a trial's attribute keeps it: (seconds, samples, value), and joules and measured seconds if any."""
    rows = [(round(at.seconds, 6), at.samples, at.value, at.joules, at.measured_seconds) for at in curve]
    return [row if row[4] is not None else row[:4] if row[3] is not None else row[:3] for row in rows]


def to_curve(rows: list[tuple[Any, ...]]) -> list[CurvePoint]:
    """The curve that `curve_attribute` made rows of."""
    names = ("seconds", "samples", "value", "joules", "measured_seconds")
    return [CurvePoint(**dict(zip(names, row, strict=False))) for row in rows]


def measured(curve: list[CurvePoint], outcome: str, target: Target) -> dict[str, Any]:
    """A trial's attributes that follow from its curve; a curve that meets the target has reached it.

    Args:
        curve: its evaluations.
        outcome: how the run ended.
        target: the metric's direction and, where there is one, the value to meet.
    """
    values = [point.value for point in curve if point.value is not None]
    attributes: dict[str, Any] = {"training_seconds": curve[-1].seconds} if curve else {}
    if curve and curve[-1].measured_seconds is not None:
        attributes["measured_training_seconds"] = curve[-1].measured_seconds
    if values:
        attributes["best_value"] = min(values) if target.goal == "minimize" else max(values)
    for point in curve if outcome not in FAILED else []:
        if meets(point.value, target):
            attributes |= {SECONDS.attribute: point.seconds, "samples_to_target": point.samples}
            if point.joules is not None:
                attributes[JOULES.attribute] = point.joules
            return attributes | {"outcome": "reached"}
    return attributes | {"outcome": outcome}


def meets(value: float | None, target: Target) -> bool:
    """Whether a value of the metric is as good as the target; never where there is none."""
    if value is None or target.value is None or not math.isfinite(value):
        return False
    return value <= target.value if target.goal == "minimize" else value >= target.value

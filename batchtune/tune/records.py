"""How a trial of the study and a trial of the result document are the same thing: attributes there, fields here."""

from __future__ import annotations

from typing import Any, Literal

from optuna.trial import FrozenTrial, TrialState

from batchtune.results import CurvePoint, Trial

_STATES: dict[TrialState, Literal["complete", "pruned", "fail", "running", "waiting"]] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "fail",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def to_record(trial: FrozenTrial) -> Trial:
    """The result document's view of a trial of the study."""
    attributes: dict[str, Any] = trial.user_attrs
    params = trial.params or trial.system_attrs.get("fixed_params", {})
    return Trial(
        number=trial.number,
        state=_STATES[trial.state],
        role=attributes.get("role", "search"),
        outcome=attributes.get("outcome"),
        batch_size=int(params.get("batch_size", 0)),
        micro_batch_size=attributes.get("micro_batch_size"),
        gradient_accumulation_steps=attributes.get("gradient_accumulation_steps"),
        learning_rate=float(params.get("learning_rate", 0.0)),
        precision=str(params.get("precision", attributes.get("precision", "fp32"))),
        seed=int(attributes.get("seed", 0)),
        time_to_target_seconds=attributes.get("time_to_target_seconds"),
        samples_to_target=attributes.get("samples_to_target"),
        training_seconds=attributes.get("training_seconds"),
        measured_training_seconds=attributes.get("measured_training_seconds"),
        value=attributes.get("best_value"),
        curve=[CurvePoint(seconds=s, samples=n, value=v) for s, n, v in attributes.get("curve", [])],
        message=attributes.get("message"),
    )


def curve_attribute(curve: list[CurvePoint]) -> list[tuple[float, int, float | None]]:
    """A curve as a trial's attribute keeps it: (seconds, samples, value)."""
    return [(round(point.seconds, 6), point.samples, point.value) for point in curve]

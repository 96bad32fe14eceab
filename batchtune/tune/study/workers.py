"""Running one trial on a worker: a configuration goes in, its curve and outcome come out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from batchtune.document import CurvePoint
from batchtune.errors import UserCodeError
from batchtune.processes.worker import LONG_SILENCE_SECONDS, Worker, WorkerDied
from batchtune.protocol.commands import Train
from batchtune.protocol.run_spec import RunSpec

Outcome = Literal["reached", "capped", "pruned", "diverged", "finished", "oom", "crash", "timeout", "user_error"]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What one trial came to. `wall_seconds` counts evaluation, too; `error`: the user's code's; else see `RunEnd`."""

    outcome: Outcome
    curve: list[CurvePoint]
    wall_seconds: float
    message: str | None = None
    total_steps: int | None = None
    evaluation_seconds: float | None = None
    optimizer: str | None = None
    error: UserCodeError | None = None

    @property
    def training_seconds(self) -> float:
        """Training time used."""
        return self.curve[-1].seconds if self.curve else 0.0


def run_trial(
    worker: Worker, spec: RunSpec, on_point: Callable[[CurvePoint], bool], *, tolerant: bool = False
) -> TrialRun:
    """Trains one configuration; `on_point` is told of each evaluation and answers whether to go on.

    A child that dies or runs out of memory is an outcome of the trial, not an error of the study; where `tolerant`, so
    is an exception of the user's code.
    """
    curve: list[CurvePoint] = []
    started = time.perf_counter()

    def on_event(point: CurvePoint) -> bool:
        curve.append(point)
        return on_point(point)

    timeout = max(LONG_SILENCE_SECONDS, 2 * spec.limit_seconds)
    message: str | None = None
    raised: UserCodeError | None = None
    end: dict[str, Any] = {}
    try:
        end = vars(worker.call(Train(spec=spec), timeout=timeout, on_event=on_event)).copy()
        outcome = end.pop("outcome")
    except WorkerDied as lost:
        outcome, message = lost.outcome, str(lost)
    except UserCodeError as error:
        if not tolerant:
            raise
        outcome, message, raised = "user_error", str(error), error
    return TrialRun(outcome, curve, time.perf_counter() - started, message, error=raised, **end)

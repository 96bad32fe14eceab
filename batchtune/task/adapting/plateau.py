"""Schedules that are stepped with a metric at the end of an epoch, whoever made them."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch.optim.lr_scheduler import ReduceLROnPlateau

_PLAIN = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps")  # of one's arguments


class OnPlateau:
    """A ReduceLROnPlateau that is stepped at the end of an epoch, with a metric: the study's, or one of its own.

    Args:
        scheduler: that of the user.
        metric: the last value of its own; None: it waits for the study's.
        every: so many epochs.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, metric: Callable[[], float] | None = None, every: int = 1) -> None:
        self.scheduler, self._metric, self._every, self._epochs = scheduler, metric, every, 0
        self.names = [type(scheduler).__name__]

    def arguments(self, metric: str) -> dict[str, str]:
        """The TrainingArguments of a Hugging Face Trainer that make and step the same, with the study's metric."""
        made = vars(self.scheduler)
        kinds = {name: made[name] for name in _PLAIN if name in made}
        floors = {*made.get("min_lrs", ())}
        return {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": json.dumps(kinds | ({"min_lr": floors.pop()} if len(floors) == 1 else {})),
            "eval_strategy": "epoch",
            "metric_for_best_model": "eval_loss" if metric == "val_loss" else metric,  # as evaluate() calls it there
        }

    def step(self) -> None:
        """Called after each optimizer step, which it does not wait for."""

    def watched(self, value: float) -> float:
        """The metric that it waits for; `value` is the study's."""
        return value if self._metric is None else self._metric()

    def end_epoch(self, watched: float) -> None:
        """Called at the end of each epoch, with the metric."""
        self._epochs += 1
        if self._epochs % self._every == 0:
            self.scheduler.step(watched)

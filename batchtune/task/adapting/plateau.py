"""Schedules that are stepped with a metric at the end of an epoch, whoever made them."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.lr_scheduler import ReduceLROnPlateau


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

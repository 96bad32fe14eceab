"""What a run of `tune` tells on the way, kept in its folder as it comes."""

from __future__ import annotations

from batchtune.document import Attempt, ThroughputPoint, Trial
from batchtune.observer import Forwarder, Observer
from batchtune.tune.progress import Progress
from batchtune.units import counted, duration


class Recorder(Forwarder):
    """Keeps attempts and results in the run folder as they come, and hands everything on."""

    def __init__(self, progress: Progress, behind: Observer) -> None:
        super().__init__(behind)
        self._progress = progress
        self._stage, self._done = "", ""

    def stage(self, title: str) -> None:
        super().stage(title)
        self._stage = title

    def attempted(self, attempt: Attempt) -> None:
        self._progress.keep(attempt)
        super().attempted(attempt)
        self._show()

    def throughput(self, point: ThroughputPoint) -> None:
        super().throughput(point)
        self._show()

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        super().trial_started(trial, best_seconds=best_seconds)
        self._show()

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        self._progress.save_now_and_then()
        super().trial_ended(trial, done=done, seconds_left=seconds_left)
        self._done = f": {counted(done, 'run')} done, at most {duration(max(0.0, seconds_left))} left"
        self._show()

    def _show(self) -> None:
        """Redraws the page of the run; never while a run waits to go on, whose time is measured."""
        self._progress.show(self._stage + self._done)

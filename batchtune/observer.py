"""What a long run tells about itself on the way; the command line draws it, a library user may ignore it."""

from __future__ import annotations

import threading
from functools import partialmethod

from batchtune.document import Attempt, CurvePoint, ThroughputPoint, Trial


class Observer:
    """Receives what happens; every method does nothing unless overridden."""

    def stage(self, title: str) -> None:
        """A new part of the work has begun."""

    def note(self, text: str) -> None:
        """One line worth knowing (`-v` shows them)."""

    def announce(self, text: str) -> None:
        """One line that everybody must see at once."""

    def progress(self, share: float, seconds: float, limit_seconds: float) -> None:
        """What share of this part is done, after how long, and when it is given up."""

    def attempting(self, batch_size: int, reason: str) -> None:
        """An attempt starts, and why at this size."""

    def attempted(self, attempt: Attempt) -> None:
        """An attempt has ended."""

    def throughput(self, point: ThroughputPoint) -> None:
        """A size was timed."""

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        """A training run starts."""

    def trial_evaluated(self, trial: Trial, point: CurvePoint) -> None:
        """A training run was evaluated."""

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        """A training run has ended; how many there are, and what is left of the budget."""

    def printed(self, line: str) -> None:
        """The user's code printed a line."""


class Forwarder(Observer):
    """Hands everything on to another observer, one thing at a time; a subclass adds what it is there for."""

    def __init__(self, behind: Observer) -> None:
        self._behind = behind
        self._lock = threading.RLock()  # several threads may have something to tell

    def _hand_on(self, method: str, *args: object, **kwargs: object) -> None:
        with self._lock:
            getattr(self._behind, method)(*args, **kwargs)


for _method in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Forwarder, _method, partialmethod(Forwarder._hand_on, _method))  # noqa: SLF001 - its own

"""Training time and energy, and what of it was the machine's fault rather than the configuration's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

SLOWED = 1.5  # a stretch this much slower than the usual pace was held up by something else on the machine
_EXPECTATION_ERROR = 1.33  # how far off a step time predicted from other batch sizes may be
_REMEMBERED = 200  # stretches of one shape
_paces: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))


class StepClock:
    """Adds up training seconds; stretches that something else slowed down count at the usual pace.

    The usual pace of a shape is the lower quartile of all stretches of it that this process has timed, the runs before
    included, or what the caller expects where that is less.

    Args:
        shape: what has a pace of its own: see `RunSpec.shape`.
        expected_step_seconds: seconds of an optimizer step as predicted from other sizes; None: nothing is.
    """

    def __init__(self, shape: Hashable, expected_step_seconds: float | None = None) -> None:
        self.seconds = 0.0
        self.measured_seconds = 0.0
        self.joules: float | None = None
        self._paces = _paces[shape]
        self._expected = expected_step_seconds

    @property
    def knows_pace(self) -> bool:
        """Whether this process has timed steps of this shape before."""
        return bool(self._paces)

    @property
    def step_seconds(self) -> float:
        """The usual pace: seconds of an optimizer step."""
        paces = sorted(self._paces)
        usual = paces[len(paces) // 4] if paces else float("inf")
        return min(usual, self._expected * _EXPECTATION_ERROR) if self._expected else usual

    def see(self, steps: int, seconds: float) -> None:
        """Learns from a stretch that is not counted, such as warm-up."""
        self._paces.append(seconds / steps)

    def add_energy(self, before_joules: float | None, after_joules: float | None) -> None:
        """Counts the energy between two readings of the device's counter; None where it has none."""
        if self.joules is not None and before_joules is not None and after_joules is not None:
            self.joules += after_joules - before_joules

    def add(self, steps: int, seconds: float) -> None:
        """Counts a stretch of so many optimizer steps that took so long."""
        self.see(steps, seconds)
        self.measured_seconds += seconds
        self.seconds += min(seconds, steps * SLOWED * self.step_seconds)

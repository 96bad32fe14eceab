"""Training time and energy, and what of it was the machine's fault rather than the configuration's."""

from __future__ import annotations

from collections import deque

SLOWED = 1.5  # a stretch this much slower than the usual pace was held up by something else on the machine
_EXPECTATION_ERROR = 1.33  # how far off a step time predicted from other batch sizes may be
_REMEMBERED = 200  # stretches


class StepClock:
    """Adds up training seconds; stretches that something else slowed down count at the usual pace.

    The usual pace is the lower quartile of the latest stretches, or what the caller expects where that is less.

    Args:
        expected_step_seconds: seconds of an optimizer step as other runs had it; None: there were none.
    """

    def __init__(self, expected_step_seconds: float | None = None) -> None:
        self.seconds = 0.0
        self.measured_seconds = 0.0
        self.joules: float | None = None
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)
        self._expected = expected_step_seconds

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

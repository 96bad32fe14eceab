"""Energy of training between evaluations, by a counter that moves ten times a second."""

import pytest

from batchtune.device import nvml


class Device:
    """A clock and the counter of a device, which has drawn some watts since the last move of it."""

    def __init__(self, moves_every=0.1):
        self.now, self._drawn, self._shown, self._every, self._next = 0.0, 0.0, 0.0, moves_every, moves_every

    def perf_counter(self):
        return self.now

    def joules(self):
        return self._shown

    def draw(self, watts, seconds):
        end = self.now + seconds
        while self._next <= end:
            self._drawn += watts * (self._next - self.now)
            self.now, self._shown, self._next = self._next, self._drawn, self._next + self._every
        self._drawn, self.now = self._drawn + watts * (end - self.now), end


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(nvml, "time", device)
    return device


def measured(device, work, pause, seconds):
    """Joules of so many seconds of work, by what they were truly."""
    found, worked, steps = nvml.Energy(device.joules), 0.0, []
    while worked < seconds:
        with found.of_work():
            device.draw(*work)
        worked += work[1]
        steps.append(found.joules)
        device.draw(*pause)
    assert steps == sorted(steps)
    return found.joules / (work[0] * worked)


@pytest.mark.parametrize(
    ("work", "pause", "seconds", "least"),
    [
        ((300, 0.02), (300, 0.02), 0.5, 0.85),  # seconds that were counted up to the last move alone
        ((300, 0.02), (300, 0.02), 6.0, 0.98),
        ((300, 0.02), (300, 0.5), 6.0, 0.8),
        ((600, 1.01), (100, 10.0), 6.0, 0.93),
        ((600, 0.9), (100, 1.0), 6.0, 0.9),
    ],
)
def test_it_is_that_of_the_work(device, work, pause, seconds, least):
    assert least <= measured(device, work, pause, seconds) <= 1.1


def test_pauses_that_the_counter_cannot_tell_from_work_have_their_share(device):
    assert measured(device, (600, 0.02), (300, 0.02), 6.0) == pytest.approx(0.75, abs=0.02)


def test_a_device_without_a_counter_has_no_figure(device):
    found = nvml.Energy(lambda: None)
    with found.of_work():
        device.draw(100, 1.0)
    assert found.joules is None

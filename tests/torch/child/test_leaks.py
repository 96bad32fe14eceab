"""Which series of peaks is a leak: steady growth from step to step, and nothing that comes to rest."""

from itertools import accumulate

import pytest

from batchtune.device._base import Peaks, PeakTracker

MIB = 2**20


class Scripted:
    """A device whose peaks are told beforehand."""

    def __init__(self, peaks):
        self._peaks = iter(peaks)

    def reset_peaks(self):
        pass

    def peaks(self):
        return Peaks(None, next(self._peaks))


def growth(*peaks):
    tracker = PeakTracker(Scripted(peak * MIB for peak in peaks))
    for _ in peaks:
        tracker.end_phase(forward_backward=True)
    return tracker.growth_bytes_per_step()


def test_what_grows_by_the_same_with_every_step_is_a_leak():
    assert growth(100, 300, 350, 400, 450, 500, 550) == 50 * MIB


def test_a_leak_is_seen_among_steps_that_find_room_which_earlier_ones_left():
    rises = (20, 28, 20, 20, 11, 29, 29, 17, 32, 8, 32, 20, 20, 20, 8, 32, 12)  # seen of 20 MiB a step on a CPU
    assert growth(100, 300, *accumulate(rises, initial=340)) == 20 * MIB


@pytest.mark.parametrize(
    "peaks",
    [
        (100, 300, 300, 300, 300, 300, 300),
        (100, 300, 310, 320, 320, 320, 320),
        (100, 300, 301, 340, 341, 380, 381),
        (100, 300, 299, 301, 300, 302, 301),
        (100, 300, 350, 400),
        (100, *range(300, 460, 10), *[450] * 5),
    ],
    ids=["flat", "comes to rest", "by fits and starts", "up and down", "too short to tell", "comes to rest late"],
)
def test_no_leak_is_seen_where_memory_is(peaks):
    assert growth(*peaks) is None

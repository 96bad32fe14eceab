"""What a group's step times say about its communication."""

import pytest
from fakes import FakeChild, opened

from batchtune.document import Attempt, ThroughputPoint
from batchtune.errors import UserCodeError
from batchtune.observer import Observer
from batchtune.probe.timing.steps import data_parallel, measure_times
from batchtune.processes.worker import WorkerDied
from batchtune.protocol.commands import TimeSteps

GROUP = opened(world_size=4, strategy="ddp", backend="gloo")
TIMES = {"together": 0.5, "apart": 0.4, "alone": 0.3}


class Clockwork(FakeChild):
    """A group whose steps take what is written down, or raise it."""

    def __init__(self, together, apart, alone, group=GROUP):
        self._group, self.asked = group, 0
        self._seconds = {"together": together, "apart": apart, "alone": alone}

    def start(self):
        return self._group

    def answer(self, command, *, ranks="together", batch_size, **_):
        self.asked += 1
        found = self._seconds[ranks]
        if isinstance(found, Exception):
            raise found
        return ThroughputPoint(batch_size=batch_size, samples_per_second=1.0, step_seconds=found).model_dump()


def timed(group):
    return measure_times(group, Observer(), TimeSteps(batch_size=8, precision="fp32", seconds=1.0), 60.0)


def measured(*seconds):
    return timed(Clockwork(*seconds))


def test_times_are_those_of_the_group_of_all_apart_and_of_one_alone():
    assert measured(0.5, 0.4, 0.3) == TIMES


@pytest.mark.parametrize("error", [WorkerDied("oom", "no memory left"), UserCodeError("no")])
def test_what_cannot_be_measured_is_absent(error):
    assert measured(0.5, error, 0.3) == TIMES | {"apart": None}


@pytest.mark.parametrize(("fits_alone", "asked"), [(False, 1), (True, 3)])
def test_no_rank_is_asked_to_hold_weights_and_gradients_for_which_it_has_no_room(fits_alone, asked):
    group = Clockwork(0.5, 0.4, 0.3, GROUP.model_copy(update={"strategy": "fsdp", "fits_alone": fits_alone}))
    assert timed(group)["together"] == 0.5
    assert group.asked == asked


def test_communication_is_what_a_step_takes_longer_with_it():
    found = data_parallel(GROUP, 8, 2, None, TIMES)
    assert (found.global_batch_size, found.world_size) == (64, 4)
    assert found.communication_seconds == pytest.approx(0.1)
    assert found.communication_share == pytest.approx(0.2)
    assert found.scaling_efficiency == pytest.approx(0.6)
    assert found.samples_per_second == pytest.approx(128)


def test_a_difference_that_is_lost_in_the_noise_is_no_figure():
    found = data_parallel(GROUP, 8, 1, None, TIMES | {"apart": 0.6})
    assert found.communication_seconds is None
    assert found.step_seconds_without_communication == 0.6


def test_the_rank_that_failed_above_the_answer_is_the_one_that_limits():
    failure = Attempt(batch_size=9, outcome="oom", limiting_rank=3)
    assert data_parallel(GROUP, 8, 1, failure, {}).limiting_rank == 3


def test_a_child_alone_is_no_group():
    assert data_parallel(opened(), 8, 1, None, {}) is None

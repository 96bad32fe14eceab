"""What counts as training time, when the machine may hold a stretch of it up. Times are made up; sums are exact."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.child.training.clock import SLOWED, StepClock

shapes = itertools.count()  # paces outlive a clock, so every test has a shape of its own


@pytest.fixture
def shape():
    return next(shapes)


def test_steps_at_the_usual_pace_count_in_full(shape):
    clock = StepClock(shape)
    for steps, seconds in ((4, 2.0), (2, 1.0), (8, 4.0)):
        clock.add(steps, seconds)
    assert (clock.seconds, clock.measured_seconds, clock.step_seconds) == (7.0, 7.0, 0.5)


def test_a_stretch_that_was_held_up_counts_at_the_usual_pace_and_is_measured_in_full(shape):
    clock = StepClock(shape)
    for seconds in (1.0, 1.0, 1.0, 60.0):
        clock.add(1, seconds)
    assert clock.seconds == 3.0 + SLOWED
    assert clock.measured_seconds == 63.0


def test_a_pace_that_differs_as_steps_do_is_not_held_up(shape):
    clock = StepClock(shape)
    for seconds in (1.0, 1.4, 1.1, 1.4, 1.0):
        clock.add(1, seconds)
    assert clock.seconds == clock.measured_seconds


def test_warm_up_teaches_the_pace_and_is_not_counted(shape):
    clock = StepClock(shape)
    for _ in range(4):
        clock.see(2, 1.0)
    assert (clock.seconds, clock.measured_seconds, clock.step_seconds) == (0.0, 0.0, 0.5)
    clock.add(1, 60.0)
    assert clock.seconds == SLOWED * 0.5


def test_a_run_knows_the_pace_of_the_runs_before_it(shape):
    for _ in range(4):
        StepClock(shape).add(1, 1.0)
    later = StepClock(shape)
    later.add(1, 60.0)
    assert later.seconds == SLOWED


def test_every_shape_has_a_pace_of_its_own(shape):
    for _ in range(4):
        StepClock(shape).add(1, 1.0)
    other = StepClock(next(shapes))
    other.add(1, 60.0)
    assert (other.seconds, other.step_seconds) == (60.0, 60.0)


def test_a_machine_that_is_slow_from_the_first_step_on_is_found_out_by_what_was_expected(shape):
    clock = StepClock(shape, expected_step_seconds=1.0)
    clock.add(1, 60.0)
    assert clock.seconds < 60.0 / 20
    assert clock.measured_seconds == 60.0


def test_steps_somewhat_slower_than_foretold_count_in_full(shape):
    clock = StepClock(shape, expected_step_seconds=1.0)
    clock.add(10, 13.0)
    assert clock.seconds == 13.0


def test_an_expectation_that_was_too_high_forgives_nothing(shape):
    clock = StepClock(shape, expected_step_seconds=100.0)
    for seconds in (1.0, 1.0, 1.0, 60.0):
        clock.add(1, seconds)
    assert clock.seconds == 3.0 + SLOWED


def test_a_machine_that_stays_slower_has_a_new_usual_pace(shape):
    clock = StepClock(shape)
    for seconds in (1.0, 3.0):
        for _ in range(200):
            clock.add(1, seconds)
    assert clock.step_seconds == 3.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1e-4, 1e4)), min_size=1))
def test_no_more_is_counted_than_was_measured_and_never_nothing(stretches):
    clock = StepClock(next(shapes))
    for steps, seconds in stretches:
        before = clock.seconds
        clock.add(steps, seconds)
        assert before < clock.seconds
    assert clock.seconds <= clock.measured_seconds

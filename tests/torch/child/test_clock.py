"""What counts as training time, when the machine may hold a stretch of it up. Times are made up; sums are exact."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.child.timing import SLOWED, StepClock


def test_steps_at_the_usual_pace_count_in_full():
    clock = StepClock()
    for steps, seconds in ((4, 2.0), (2, 1.0), (8, 4.0)):
        clock.add(steps, seconds)
    assert (clock.seconds, clock.measured_seconds, clock.step_seconds) == (7.0, 7.0, 0.5)


def test_a_stretch_that_was_held_up_counts_at_the_usual_pace_and_is_measured_in_full():
    clock = StepClock()
    for seconds in (1.0, 1.0, 1.0, 60.0):
        clock.add(1, seconds)
    assert clock.seconds == 3.0 + SLOWED
    assert clock.measured_seconds == 63.0


def test_the_start_of_an_epoch_is_the_loaders_own_and_counts_in_full():
    clock = StepClock()
    for seconds, starting in ((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (9.0, 8.0), (69.0, 8.0)):
        clock.add(1, seconds, starting_seconds=starting)
    assert clock.seconds == 3.0 + 9.0 + (SLOWED + 8.0)
    assert clock.measured_seconds == 81.0


def test_a_pace_that_differs_as_steps_do_is_not_held_up():
    clock = StepClock()
    for seconds in (1.0, 1.4, 1.1, 1.4, 1.0):
        clock.add(1, seconds)
    assert clock.seconds == clock.measured_seconds


def test_warm_up_teaches_the_pace_and_is_not_counted():
    clock = StepClock()
    for _ in range(4):
        clock.see(2, 1.0)
    assert (clock.seconds, clock.measured_seconds, clock.step_seconds) == (0.0, 0.0, 0.5)
    clock.add(1, 60.0)
    assert clock.seconds == SLOWED * 0.5


def test_a_machine_that_is_slow_from_the_first_step_on_is_found_out_by_what_was_expected():
    clock = StepClock(most_step_seconds=1.0)
    clock.add(1, 60.0)
    assert clock.seconds == SLOWED
    assert clock.measured_seconds == 60.0


def test_what_the_thread_waited_for_a_processor_is_not_counted():
    clock = StepClock()
    for waited in (0.0, 1.0, 9.0):
        clock.add(2, 2.0 + waited, waited)
    assert clock.step_seconds == 1.0
    assert (clock.seconds, clock.measured_seconds) == (6.0, 16.0)


def test_a_stretch_in_which_the_thread_waited_counts_at_the_usual_pace_at_most():
    clock = StepClock()
    for _ in range(3):
        clock.add(1, 1.0)
    clock.add(1, 1.4)  # as steps differ
    clock.add(1, 1.9, 0.5)  # another of its threads waited, too
    assert clock.seconds == 3.0 + 1.4 + 1.0


def test_steps_somewhat_slower_than_foretold_count_in_full():
    clock = StepClock(most_step_seconds=1.0)
    clock.add(10, 13.0)
    assert clock.seconds == 13.0


def test_an_expectation_that_was_too_high_forgives_nothing():
    clock = StepClock(most_step_seconds=100.0)
    for seconds in (1.0, 1.0, 1.0, 60.0):
        clock.add(1, seconds)
    assert clock.seconds == 3.0 + SLOWED


def test_a_machine_that_stays_slower_has_a_new_usual_pace():
    clock = StepClock()
    for seconds in (1.0, 3.0):
        for _ in range(200):
            clock.add(1, seconds)
    assert clock.step_seconds == 3.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1e-4, 1e4), st.floats(0, 1e4)), min_size=1))
def test_no_more_is_counted_than_was_measured_and_never_nothing(stretches):
    clock = StepClock()
    for steps, seconds, waited in stretches:
        before = clock.seconds
        clock.add(steps, seconds, waited)
        assert before < clock.seconds
    assert clock.seconds <= clock.measured_seconds

"""Which sizes are timed, and the step-time line through what was timed."""

import math
import random
from statistics import median

import pytest
from fakes import FakeChild
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.document import ThroughputPoint
from batchtune.errors import UserCodeError
from batchtune.observer import Observer
from batchtune.probe.timing.steps import (
    MAX_POINTS,
    fit_step_time,
    measure_curve,
    most_to_time,
    sizes_to_time,
    step_line,
)
from batchtune.protocol.commands import TimeSteps


def timed(steps):
    """Points of a mapping from batch size to seconds of a step."""
    return [
        ThroughputPoint(batch_size=size, step_seconds=seconds, samples_per_second=size / seconds)
        for size, seconds in steps.items()
    ]


def on_a_line(alpha, beta, sizes=(1, 2, 4, 8, 16, 32)):
    return {size: alpha + beta * size for size in sizes}


class TestSizes:
    def test_powers_of_two_lead_up_to_the_largest_batch(self):
        assert sizes_to_time(20) == [1, 2, 4, 8, 16, 20]

    def test_a_largest_batch_that_is_a_power_is_timed_once(self):
        assert sizes_to_time(16) == [1, 2, 4, 8, 16]

    def test_a_power_next_to_the_largest_batch_would_tell_the_same(self):
        assert sizes_to_time(17) == [1, 2, 4, 8, 17]

    def test_of_many_the_largest_are_timed(self):
        assert sizes_to_time(100_000) == [2, 2048, 4096, 8192, 16384, 32768, 65536, 100_000]

    def test_of_fewer_the_ends_and_what_is_next_to_the_largest(self):
        assert sizes_to_time(97, most=3) == [2, 64, 97]

    @pytest.mark.parametrize(
        ("within", "step", "most"), [(None, 9.0, 8), (9.0, None, 8), (9.0, 0.1, 8), (9.0, 2.0, 3), (9.0, 0.6, 5)]
    )
    def test_where_steps_are_slow_fewer_are_timed(self, within, step, most):
        assert most_to_time(within, step) == most

    def test_what_must_be_a_multiple_is_one(self):
        assert sizes_to_time(120, multiple_of=24) == [24, 48, 96, 120]

    def test_nothing_below_the_minimum_is_timed(self):
        assert sizes_to_time(20, minimum=5) == [8, 16, 20]
        assert sizes_to_time(20, minimum=20) == [20]

    @settings(deadline=None)
    @given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 10_000))
    def test_only_sizes_that_a_probe_may_try_are_timed(self, units, unit, minimum):
        maximum = units * unit
        sizes = sizes_to_time(maximum, minimum=min(minimum, maximum), multiple_of=unit)
        assert sizes[-1] == maximum
        assert sizes == sorted(set(sizes))
        assert 1 <= len(sizes) <= MAX_POINTS
        assert all(size % unit == 0 and min(minimum, maximum) <= size for size in sizes)


class BusyMachine(FakeChild, Observer):
    """A child whose steps take 0.01 s and 0.001 s a sample, times what other programs make of it, call by call."""

    def __init__(self, *slower):
        self.slower, self.asked, self.notes, self.told = list(slower), [], [], []

    def answer(self, command, *, timeout, batch_size, **_):
        self.asked.append(batch_size)
        slower = self.slower.pop(0) if self.slower else 1.0
        if slower is None:
            raise UserCodeError("no")
        seconds = slower * (0.01 + 0.001 * batch_size)
        others = min(1.0, (slower - 1) / 2)
        return timed({batch_size: seconds})[0].model_dump() | {"processors_used_by_others": others}

    def note(self, text):
        self.notes.append(text)

    def throughput(self, point):
        self.told.append((point.batch_size, round(point.step_seconds, 6)))

    def curve(self, sizes=(8, 32, 128), within=None):
        points = []
        command = TimeSteps(batch_size=1, precision="fp32", seconds=0.1)
        measure_curve(self, points, sizes, self, command, 9.0, within)
        return {point.batch_size: round(point.step_seconds, 6) for point in points}


class TestTiming:
    QUIET = {8: 0.018, 32: 0.042, 128: 0.138}  # noqa: RUF012 - read only

    def test_on_a_quiet_machine_every_size_is_timed_once(self):
        machine = BusyMachine()
        assert machine.curve() == self.QUIET
        assert machine.asked == [8, 32, 128]
        assert machine.told == list(self.QUIET.items())

    def test_sizes_that_others_disturbed_are_timed_again_in_turn_and_the_least_time_counts(self):
        machine = BusyMachine(2.0, 1.0, 3.0, 1.5, 1.0)
        assert machine.curve() == self.QUIET
        assert machine.asked == [8, 32, 128, 8, 128, 8]
        assert not machine.notes
        assert machine.told == [(8, 0.036), (32, 0.042), (128, 0.414), (8, 0.018), (128, 0.138)]

    def test_two_least_times_that_agree_are_enough(self):
        machine = BusyMachine(1.6, 1.0, 1.0, 1.62)
        assert machine.curve()[8] == pytest.approx(1.6 * 0.018)
        assert machine.asked == [8, 32, 128, 8]

    def test_a_step_that_takes_longer_than_one_of_more_samples_is_timed_again_however_often_it_does(self):
        machine = BusyMachine(30.0, 1.0, 1.0, 30.5)
        assert machine.curve() == self.QUIET
        assert machine.asked == [8, 32, 128, 8, 8]

    def test_a_machine_that_is_never_quiet_is_told_of(self):
        machine = BusyMachine(*(2.0 + 0.5 * number for number in range(24)))
        assert machine.curve()[8] == pytest.approx(2 * 0.018)
        assert len(machine.asked) == 24
        assert machine.notes == ["other programs kept the machine busy: step times at [8, 32, 128] may be too long"]

    def test_what_has_no_time_left_is_timed_once_and_told_of(self):
        machine = BusyMachine(2.0, 2.5, 3.0)
        assert machine.curve(within=0.0) == {
            size: pytest.approx(slower * self.QUIET[size])
            for size, slower in zip((8, 32, 128), (2.0, 2.5, 3.0), strict=True)
        }
        assert machine.asked == [8, 32, 128]
        assert machine.notes

    def test_a_size_that_cannot_be_timed_is_left_out_and_asked_for_once(self):
        machine = BusyMachine(1.0, None, 2.0)
        assert machine.curve() == {8: 0.018, 128: 0.138}
        assert machine.asked == [8, 32, 128, 128]


class TestDoubt:
    """What the times of steps leave open about the saturation batch size."""

    SIZES = (32, 64, 128, 256, 512)

    def line(self, alpha, beta, error):
        return step_line([(size, alpha + beta * size, error) for size in self.SIZES])

    def test_it_grows_with_the_error_of_the_times(self):
        exact, rough = (self.line(0.05, 0.001, error) for error in (0.01, 0.1))
        assert exact.saturation_batch_size == pytest.approx(50) == rough.saturation_batch_size
        assert exact.spread < 0.1
        assert rough.spread == pytest.approx(10 * exact.spread)

    def test_a_step_without_fixed_time_may_have_what_its_error_hides(self):
        line = self.line(0.0, 1e-5, 0.2)
        assert line.alpha_seconds == 0
        assert 1 < line.saturation_batch_size < 32
        assert line.spread >= 1

    def test_samples_that_cost_nothing_may_cost_what_the_error_hides(self):
        line = self.line(0.01, 0.0, 0.1)
        assert 512 < line.saturation_batch_size < 1e5
        assert line.spread >= 1

    @settings(deadline=None)
    @given(st.floats(32, 512), st.floats(0.01, 0.2), st.integers(0, 1000))
    def test_it_covers_what_noise_makes_of_the_answer(self, saturation, error, seed):
        noise = random.Random(seed)
        times = [(size, (saturation + size) * (1 + noise.uniform(-error, error)), error) for size in self.SIZES]
        line = step_line(times)
        assert abs(math.log(line.saturation_batch_size / saturation)) < 3 * line.spread


class TestLine:
    def test_a_step_that_took_no_time_is_left_out(self):
        untimed = ThroughputPoint(batch_size=1, step_seconds=0.0, samples_per_second=0.0)
        points = timed(on_a_line(0.01, 0.001, (2, 4, 8)))
        assert fit_step_time([untimed, *points]) == fit_step_time(points)
        assert fit_step_time([untimed, untimed.model_copy(update={"batch_size": 2})]) is None

    def test_steps_that_larger_batches_undercut_say_nothing(self):
        quiet = on_a_line(0.0003, 4e-7, (16, 32, 512, 1500))
        assert fit_step_time(timed(quiet | {64: 0.08, 128: 0.079})) == fit_step_time(timed(quiet))

    @pytest.mark.parametrize("disturbed", [{8: 0.2}, {8: 0.2, 4: 0.3}, {8: 0.9, 4: 0.9, 2: 0.3}])
    @pytest.mark.parametrize("least", [0.1, *(0.1 - 0.001 * step for step in range(1, 30))])
    def test_where_one_size_was_left_alone_the_smaller_ones_take_as_long_at_the_most(self, disturbed, least):
        fit = fit_step_time(timed(disturbed | {16: least}))
        assert (fit.alpha_seconds, fit.beta_seconds_per_sample) == (pytest.approx(least), 0)
        assert (fit.holds, fit.saturation_batch_size, fit.batch_size_within_5_percent) == (False, None, 16)

    @settings(deadline=None)
    @given(st.floats(1e-5, 1.0), st.floats(1e-7, 1e-1))
    def test_a_line_is_found_again(self, alpha, beta):
        fit = fit_step_time(timed(on_a_line(alpha, beta)))
        assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-3, abs=1e-6 * beta)
        assert fit.beta_seconds_per_sample == pytest.approx(beta, rel=1e-3, abs=1e-6 * alpha)

    def test_at_the_saturation_batch_size_half_of_the_peak_is_reached(self):
        alpha, beta = 0.03, 0.001
        fit = fit_step_time(timed(on_a_line(alpha, beta)))
        saturation = fit.saturation_batch_size
        assert saturation / (alpha + beta * saturation) == pytest.approx(0.5 / beta)

    def test_the_order_of_the_points_does_not_matter(self):
        points = timed(on_a_line(0.1, 0.01) | {64: 0.9})
        assert fit_step_time(points).model_dump() == pytest.approx(fit_step_time(points[::-1]).model_dump())

    def test_a_percent_off_at_large_sizes_does_not_drown_what_a_step_costs_by_itself(self):
        alpha, draw, found = 0.01, random.Random(1), []
        for _ in range(100):
            steps = on_a_line(alpha, 0.001, sizes=(1, 4, 16, 64, 256, 1024, 4096))
            noisy = {size: seconds * draw.gauss(1, 0.01) for size, seconds in steps.items()}
            found.append(abs(fit_step_time(timed(noisy)).alpha_seconds / alpha - 1))
        assert median(found) < 0.02

    @pytest.mark.parametrize("points", [[], timed({4: 0.1}), timed({4: 0.1}) * 3])
    def test_no_line_goes_through_one_size(self, points):
        assert fit_step_time(points) is None

    def test_a_step_that_grows_more_than_its_samples_has_no_cost_of_its_own(self):
        fit = fit_step_time(timed({8: 0.7, 16: 1.6, 32: 3.4}))
        assert fit.alpha_seconds == 0
        assert fit.saturation_batch_size == 0
        assert 0.7 / 8 < fit.beta_seconds_per_sample < 3.4 / 32

    def test_a_step_that_gets_no_longer_has_no_saturation(self):
        fit = fit_step_time(timed({1: 0.11, 2: 0.10, 4: 0.09}))
        assert (fit.beta_seconds_per_sample, fit.saturation_batch_size) == (0, None)
        assert 0.09 < fit.alpha_seconds < 0.11

    def test_how_far_the_steps_lie_off_the_line_is_told_and_decides_whether_it_holds(self):
        draw, sizes = random.Random(2), [2**power for power in range(4, 12)]
        errors = {}
        for noise in (0.0, 0.05, 0.3):
            steps = on_a_line(0.01, 0.001, sizes)
            fits = [
                fit_step_time(timed({size: seconds * draw.lognormvariate(0, noise) for size, seconds in steps.items()}))
                for _ in range(200)
            ]
            errors[noise] = median(fit.error_share for fit in fits)
            assert (sum(fit.holds for fit in fits) > 100) is (noise < 0.1)
        assert errors == pytest.approx({0.0: 0.0, 0.05: 0.05, 0.3: 0.3}, rel=0.2, abs=1e-9)

    def test_two_sizes_lie_on_a_line_whatever_the_noise_so_that_nothing_tells_whether_it_holds(self):
        for other in (0.15, 0.099, 0.21, 0.3):
            fit = fit_step_time(timed({8: 0.1, 16: other}))
            assert (fit.error_share, fit.holds) == (None, None)


class TestNearPeak:
    def test_the_smallest_size_within_5_percent_of_the_best_is_told(self):
        per_second = {8: 500.0, 16: 940.0, 32: 960.0, 64: 1000.0, 128: 990.0}
        fit = fit_step_time(timed({size: size / speed for size, speed in per_second.items()}))
        assert fit.batch_size_within_5_percent == 32

    def test_a_size_below_a_slow_one_is_not(self):
        per_second = {8: 980.0, 16: 700.0, 32: 990.0, 64: 1000.0}
        fit = fit_step_time(timed({size: size / speed for size, speed in per_second.items()}))
        assert fit.batch_size_within_5_percent == 32

    def test_a_size_that_is_fast_by_itself_counts_though_larger_ones_are_slower(self):
        per_second = {8: 1000.0, 16: 700.0, 32: 800.0}
        fit = fit_step_time(timed({size: size / speed for size, speed in per_second.items()}))
        assert fit.batch_size_within_5_percent == 8

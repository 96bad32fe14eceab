"""Which sizes are timed, and the step-time line through what was timed."""

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.document import ThroughputPoint
from batchtune.probe.timing.throughput import MAX_POINTS, fit_step_time, sizes_to_time


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
        assert sizes_to_time(100_000) == [1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000]

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


class TestLine:
    def test_a_step_that_took_no_time_is_left_out(self):
        untimed = ThroughputPoint(batch_size=1, step_seconds=0.0, samples_per_second=0.0)
        points = timed(on_a_line(0.01, 0.001, (2, 4, 8)))
        assert fit_step_time([untimed, *points]) == fit_step_time(points)
        assert fit_step_time([untimed, untimed.model_copy(update={"batch_size": 2})]) is None

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
        fit = fit_step_time(timed({8: 0.1, 16: 0.15}))
        assert (fit.error_share, fit.holds) == (None, None)


class TestNearPeak:
    def test_the_smallest_size_within_5_percent_of_the_best_is_told(self):
        per_second = {8: 500.0, 16: 940.0, 32: 960.0, 64: 1000.0, 128: 990.0}
        fit = fit_step_time(timed({size: size / speed for size, speed in per_second.items()}))
        assert fit.batch_size_within_5_percent == 32

    def test_a_size_that_is_fast_by_itself_counts_though_larger_ones_are_slower(self):
        per_second = {8: 1000.0, 16: 700.0, 32: 800.0}
        fit = fit_step_time(timed({size: size / speed for size, speed in per_second.items()}))
        assert fit.batch_size_within_5_percent == 8

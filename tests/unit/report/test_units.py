"""Figures as people read them: units that fit, digits that mean something, columns that line up."""

import pytest

from batchtune.document import Interval
from batchtune.units import aligned, duration, interval, number, share, size, sizes, time_interval, times


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-5, "20 µs"),
        (0.25, "250 ms"),
        (41.04, "41 s"),
        (125, "2 min 05 s"),
        (7500, "2 h 05 min"),
        (0.00099996, "1 ms"),
        (0.9997, "1 s"),
        (119.96, "2 min 00 s"),
    ],
)
def test_durations_are_written_with_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_figures_that_were_not_measured_are_a_dash():
    assert [size(None), duration(None), number(None), share(None)] == ["-", "-", "-", "-"]


def test_figures_are_rounded_to_what_a_reader_can_use():
    assert [size(3 << 20), size(18.26 * (1 << 30))] == ["3 MiB", "18.3 GiB"]
    assert [number(12345.6), number(0.12345), share(0.42)] == ["12,346", "0.123", "42%"]
    assert [number(value) for value in (999.4, 999.5, 999.99, -999.7)] == ["999", "1,000", "1,000", "-1,000"]
    assert number(9999.7, 4) == "10,000"


def test_an_interval_has_as_many_decimals_in_all_its_figures():
    assert interval(Interval(median=3.82, low=2.7, high=6.81), "×") == "3.82× (2.70 to 6.81)"
    assert interval(Interval(median=1e-5, low=0.5e-5, high=2e-5)) == "1e-05 (5e-06 to 2e-05)"
    assert interval(Interval(median=3.1, low=3.04, high=3.2, at_least=True), "×") == "at least 3.10×"
    assert time_interval(Interval(median=3.1, low=3.0, high=3.2, at_least=True)) == "at least 3.1 s"
    assert time_interval(Interval(median=4.381, low=4.379, high=4.384)) == "4.38 s"
    assert interval(None) == time_interval(None) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((0.4511, 0.268, 0.4512), "451 ms (268 to 451)"),
        ((127, 120, 130), "127 s (120 to 130)"),
        ((1500, 1200, 1800), "25 min (20 to 30)"),
        ((9000, 7200, 10800), "2.5 h (2.0 to 3.0)"),
    ],
)
def test_a_time_with_its_bounds_is_in_one_unit(seconds, text):
    median, low, high = seconds
    assert time_interval(Interval(median=median, low=low, high=high)) == text


def test_the_figures_of_a_column_share_a_unit_and_their_points_line_up():
    assert times([0.0045, None, 0.092]) == ("ms", ["4.5", "-  ", "92  "])
    assert sizes([198 << 20, 5 << 30, None]) == ("GiB", ["0.193", "5    ", "-    "])
    assert times([None]) == ("s", ["-"])


def test_rates_in_scientific_notation_are_left_as_they_are():
    assert aligned(["0.001", "1e-05"]) == ["0.001", "1e-05"]

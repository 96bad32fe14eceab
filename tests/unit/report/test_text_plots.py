"""Figures of characters: signs where the numbers are, labels that fit, and never a line wider than asked."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.report.text_figures import MIN_WIDTH, draw
from batchtune.report.view.figure import Axis, Series

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=12)
MARKS = ["fit", "checked", "oom", "failed", "limit", "curve"]
ANY_LAYERS = st.lists(st.builds(Series, st.sampled_from(MARKS), st.just("some name"), POINTS), min_size=1, max_size=4)
SIGNS = {"fit": "●", "checked": "◉", "oom": "×", "failed": "!", "limit": "╌"}


def drawn(*layers, width=60, x_axis=None, y_axis=None, **more):
    axes = (x_axis or Axis("micro-batch size"), y_axis or Axis("peak memory, GiB"))
    return [line.plain for line in draw(layers, *axes, width=width, **more)]


def places(lines, sign):
    """(column, row) of a sign in the grid, both counted from the axis."""
    (floor,) = [row for row, line in enumerate(lines) if "└" in line]
    left = lines[floor].index("└") + 1
    grid = lines[:floor]
    return [
        (column - left, len(grid) - 1 - row)
        for row, line in enumerate(grid)
        for column, char in enumerate(line)
        if char == sign and column >= left
    ]


@example(
    layers=[Series("fit", "some name", [(1.58e-157, -5.9e166)])],
    width=20,
    height=1,
    logs=(False, False),
    from_zero=False,
)
@settings(deadline=None)
@given(
    layers=ANY_LAYERS,
    width=st.integers(MIN_WIDTH, 150),
    height=st.integers(1, 12),
    logs=st.tuples(st.booleans(), st.booleans()),
    from_zero=st.booleans(),
)
def test_no_line_is_wider_than_asked_whatever_the_numbers(layers, width, height, logs, from_zero):
    axes = Axis("micro-batch size", log=logs[0]), Axis("peak memory, GiB", log=logs[1], from_zero=from_zero)
    lines = draw(layers, *axes, width=width, height=height)
    usable = any((x > 0 or not logs[0]) and (y > 0 or not logs[1]) for layer in layers for x, y in layer.points)
    assert bool(lines) == usable
    assert all(line.cell_len <= width for line in lines)
    assert not any(line.plain.endswith(" ") for line in lines)


def test_what_has_no_name_has_no_line_of_its_own_in_a_full_legend():
    points = [(1.0, 1.0), (2.0, 2.0)]
    for width in range(MIN_WIDTH, 80):
        lines = drawn(Series("fit", "fits", points), Series("oom", "", points), width=width)
        assert "" not in [line.strip() for line in lines], width


@settings(deadline=None)
@given(points=POINTS, width=st.integers(30, 120))
def test_every_point_has_its_sign_unless_another_took_its_cell(points, width):
    lines = drawn(Series("fit", "", points), width=width)
    shown = places(lines, "●")
    assert 1 <= len(shown) <= len(set(points))
    assert all(0 <= row < 6 for _, row in shown)


def test_larger_numbers_stand_further_right_and_higher():
    lines = drawn(Series("fit", "fits", [(0, 0), (50, 5), (100, 10)]))
    (left, low), (middle, half), (right, high) = sorted(places(lines, "●"))
    assert left < middle < right
    assert low == 0 < half < high == 5
    assert middle == pytest.approx((left + right) / 2, abs=1)


def test_equal_ratios_are_equally_far_apart_on_a_logarithmic_axis():
    lines = drawn(Series("fit", "fits", [(8, 1), (32, 2), (128, 3)]), x_axis=Axis("batch", log=True, whole=True))
    first, second, third = sorted(column for column, _ in places(lines, "●"))
    assert second - first == pytest.approx(third - second, abs=1)
    assert [label for label in ("8", "16", "32", "64", "128") if label in " ".join(lines).split()] == [
        "8", "16", "32", "64", "128",
    ]  # fmt: skip


def test_one_point_and_equal_points_are_drawn_once():
    for points in ([(7, 3)], [(7, 3)] * 4):
        lines = drawn(Series("fit", "fits", points))
        assert len(places(lines, "●")) == 1
        assert any(line.split()[:1] == ["3"] for line in lines)


@pytest.mark.parametrize("points", [[(-1e308, -1e308), (1e308, 1e308)], [(5e-324, 5e-324), (1e-323, 1e-323)]])
def test_the_ends_of_the_floating_point_numbers_are_drawn(points):
    assert len(places(drawn(Series("fit", "fits", points)), "●")) == 2


def test_figures_that_are_none_are_left_out():
    odd = [(float("nan"), 1.0), (1.0, float("inf"))]
    assert drawn(Series("fit", "fits", odd)) == []
    assert len(places(drawn(Series("fit", "fits", [*odd, (1, 1)])), "●")) == 1
    assert drawn() == []


def test_a_limit_is_a_line_across_that_failures_cover():
    lines = drawn(Series("limit", "limit 20 GiB", [(0, 20)]), Series("oom", "out of memory", [(0, 20), (10, 20)]))
    (row,) = {row for _, row in places(lines, "╌")}
    assert {row for _, row in places(lines, "×")} == {row}


def test_a_curve_runs_between_its_points_in_dots_and_covers_no_sign():
    lines = drawn(Series("curve", "fitted", [(0, 0), (100, 10)]), Series("fit", "measured", [(0, 0)]))
    assert len(places(lines, "●")) == 1
    dotted = [line for line in lines if any("\u2801" <= char <= "\u28ff" for char in line)]
    assert len(dotted) >= 6


def test_axes_have_their_names_and_round_labels():
    lines = drawn(Series("fit", "fits", [(1, 5), (176, 20)]), y_axis=Axis("peak memory, GiB", from_zero=True))
    assert lines[0] == "peak memory, GiB"
    assert [line.split()[0] for line in lines if "┤" in line] == ["20", "10", "0"]
    assert "micro-batch size" in "".join(lines)


def test_a_legend_names_each_sign_once_and_wraps():
    layers = [Series(mark, f"what {mark} means", [(1, 1), (2, 2)]) for mark in SIGNS]
    text = " ".join(drawn(*layers, width=30))
    assert all(f"{sign} what {mark} means" in " ".join(text.split()) for mark, sign in SIGNS.items())


def test_a_layer_without_a_name_is_not_in_the_legend():
    lines = drawn(Series("limit", "", [(1, 2)]), Series("fit", "fits", [(1, 1)]))
    assert lines[-1].split("micro-batch size")[1].strip() == "● fits"


def test_an_axis_of_whole_numbers_has_no_labels_in_between():
    points = [(0, 1), (2, 3)]
    assert "0.5" in drawn(Series("fit", "fits", points))[-2].split()
    assert drawn(Series("fit", "fits", points), x_axis=Axis("batch", whole=True))[-2].split() == ["0", "1", "2"]


def test_there_is_no_figure_where_its_labels_alone_would_fill_the_room():
    assert drawn(Series("fit", "fits", [(1, 1)]), width=MIN_WIDTH - 1) == []


def test_signs_tell_apart_what_colours_tell_apart():
    legends = [drawn(Series(mark, "it", [(1, 1)]))[-1].removesuffix(" it")[-1] for mark in MARKS]
    assert len(set(legends)) == len(MARKS)

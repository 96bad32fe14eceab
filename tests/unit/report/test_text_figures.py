"""A probe's figures: what is drawn where, what is left out, and how two of them share the width."""

import io

import pytest
from rich.console import Console

from batchtune.report.text_figures import Figures
from batchtune.report.view.probe import memory_plot, throughput_plot


def layers(figure):
    return {each.mark: each for each in figure.series}


def shown(probe, width=80):
    page = io.StringIO()
    Console(file=page, width=width).print(
        Figures([plot for plot in (memory_plot([probe]), throughput_plot([probe])) if plot])
    )
    return page.getvalue().splitlines()


@pytest.fixture
def made(result_of):
    return result_of("probe").probe


def test_memory_shows_fits_and_the_check_under_the_limit_and_failures_above_it(made):
    drawn = layers(memory_plot([made]))
    limit = made.memory_limit_bytes / 2**20
    assert drawn["limit"].points == [(0, limit)]
    assert [batch for batch, _ in drawn["fit"].points] == [1, 64, 176]
    assert [batch for batch, _ in drawn["checked"].points] == [176]
    assert [batch for batch, _ in drawn["oom"].points] == [256, 177]
    assert {height for _, height in drawn["oom"].points} == {limit}
    assert limit > drawn["fit"].points[-1][1]
    lines = shown(made)
    failures = next(number for number, line in enumerate(lines) if "×" in line)
    assert "╌" in lines[failures + 1]


def test_other_failures_have_a_sign_of_their_own(made):
    attempts = [
        attempt.model_copy(update={"outcome": "crash"}) if attempt.outcome == "oom" else attempt
        for attempt in made.attempts
    ]
    drawn = layers(memory_plot([made.model_copy(update={"attempts": attempts})]))
    assert "oom" not in drawn
    assert len(drawn["failed"].points) == 2


def test_a_limit_far_above_the_peaks_is_named_and_not_drawn(made):
    fits = [attempt for attempt in made.attempts if attempt.fits]
    figure = memory_plot([made.model_copy(update={"attempts": fits, "memory_limit_bytes": 2**40})])
    assert "limit" not in layers(figure)
    assert (figure.y.title, figure.note) == ("peak memory, MiB", "limit 1,024.0 GiB")


def test_speeds_stand_on_the_fitted_curve_with_the_size_from_which_more_gains_little(made):
    drawn = layers(throughput_plot([made]))
    assert [batch for batch, _ in drawn["measured"].points] == [8, 16, 32, 64, 128, 176]
    assert drawn["knee"].points == [drawn["measured"].points[4]]
    assert drawn["curve"].points[0] == pytest.approx(drawn["measured"].points[0])
    assert drawn["curve"].points[-1] == pytest.approx(drawn["measured"].points[-1])


def test_a_speed_without_a_fit_has_no_curve(made):
    assert set(layers(throughput_plot([made.model_copy(update={"throughput_fit": None})]))) == {"measured"}


@pytest.mark.parametrize("error", [0.101, 0.5, None])
def test_a_fit_that_does_not_hold_or_that_nothing_tells_of_is_not_drawn(made, error):
    fit = made.throughput_fit.model_copy(update={"error_share": error})
    assert set(layers(throughput_plot([made.model_copy(update={"throughput_fit": fit})]))) == {"measured", "knee"}


@pytest.mark.parametrize(("width", "together"), [(60, False), (80, True), (120, True), (300, True)])
def test_the_two_stand_side_by_side_where_there_is_room(made, width, together):
    lines = shown(made, width)
    assert any("peak memory" in line and "throughput" in line for line in lines) is together
    assert max(map(len, lines)) <= min(width, 150)


def test_what_was_not_measured_is_not_drawn(made):
    alone = shown(made.model_copy(update={"throughput": []}))
    assert "peak memory" in alone[0]
    assert not any("throughput" in line for line in alone)
    nothing = made.model_copy(update={"throughput": [], "attempts": [], "memory_limit_bytes": None})
    assert shown(nothing) == []


def test_peaks_too_small_to_be_told_are_not_drawn_and_without_others_neither_is_the_limit(made):
    first, *others = [attempt for attempt in made.attempts if attempt.fits]
    tiny = first.model_copy(update={"peak_reserved_bytes": 24 << 10})
    drawn = layers(memory_plot([made.model_copy(update={"attempts": [tiny, *others]})]))
    assert [batch for batch, _ in drawn["fit"].points] == [64, 176]
    assert memory_plot([made.model_copy(update={"attempts": [tiny], "memory_limit_bytes": 16 << 30})]) is None

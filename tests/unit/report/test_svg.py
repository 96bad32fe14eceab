"""Figures as SVG: each number has its place, each label its room, and no text becomes markup."""

import re
from html.parser import HTMLParser
from itertools import pairwise

import documents
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.report.svg import chart
from batchtune.report.view.figure import Axis, AxisScale, Plot, Scale, Series
from batchtune.report.view.read import plot_of

LINEAR, FROM_ZERO = Axis("batch"), Axis("peak", from_zero=True)


class Drawn(HTMLParser):
    """The elements of a figure with their attributes, and its texts."""

    def __init__(self, markup):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(str(markup))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def of(self, tag, *classes):
        return [each for name, each in self.elements if name == tag and {*classes} <= {*each.get("class", "").split()}]


def plot(*series, x=LINEAR, y=FROM_ZERO, **more):
    return Plot("A figure", x, y, series, **more)


def dots(drawn):
    return [(float(each["cx"][:-1]), float(each["cy"])) for each in drawn.of("circle", "dot") if each["cx"] != "50%"]


def test_larger_numbers_stand_further_right_and_higher_and_equal_steps_are_equal():
    (left, low), (middle, half), (right, high) = dots(
        Drawn(chart(plot(Series("fit", "", [(0, 0), (50, 5), (100, 10)]))))
    )
    assert left < middle < right
    assert low > half > high
    assert (middle - left, low - half) == (pytest.approx(right - middle, abs=0.02), pytest.approx(half - high, abs=0.2))


def test_on_a_logarithmic_axis_equal_ratios_are_equally_far_apart_under_powers_of_two():
    axis = Axis("batch", log=True, whole=True)
    drawn = Drawn(chart(plot(Series("fit", "", [(8, 1), (32, 2), (128, 3)]), x=axis)))
    first, second, third = (across for across, _ in dots(drawn))
    assert second - first == pytest.approx(third - second, abs=0.02)
    assert {"8", "16", "32", "64", "128"} <= {*drawn.texts}


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.9, 120.0, [1, 2, 5, 10, 20, 50, 100]),
        (1e-6, 1.0, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]),
        (2.1, 4.9, [3, 4]),
        (2.3, 2.4, [2.3, 2.32, 2.34, 2.36, 2.38, 2.4]),
        (1e-12, 1.0, [1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1]),
    ],
)
def test_a_logarithmic_axis_has_round_ticks(low, high, ticks):
    assert AxisScale.over([low, high], Axis("", log=True)).round_values(7) == pytest.approx(ticks)


@example(points=[(0.0, -1.7e308)], log=False, from_zero=True)
@settings(deadline=None)
@given(
    points=st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=9),
    log=st.booleans(),
    from_zero=st.booleans(),
)
def test_every_place_is_a_number_within_the_figure_whatever_the_points(points, log, from_zero):
    axis = Axis("n", log=log, from_zero=from_zero)
    text = str(chart(plot(*(Series(mark, "", points) for mark in ("fit", "oom", "other")), x=axis, y=axis)))
    assert not re.search(r"[\"\s,-](nan|inf)", text)
    for share, down in dots(Drawn(text)):
        assert 0 <= share <= 100
        assert 0 <= down <= 400


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_no_labels_touch_on_a_phone(name):
    within = 308  # pixels, labels beside the axis included
    for figure in ("curves", "landscape", "memory", "throughput", "sensors", "estimates", "efficiency", "step"):
        found = plot_of(documents.result(name), figure)
        text = str(chart(found)) if found else ""
        placed = re.findall(r'<text class="middle" x="([\d.]+)%" y="([\d.]+)">([^<]+)', text)
        beside = float(next(iter(re.findall(r'<svg width="([\d.]+)"', text)), 0))
        lines = {}
        for share, down, label in placed:
            lines.setdefault(down, []).append(((within - beside) / 100 * float(share), 6 * len(label) / 2))
        for line in lines.values():
            ends = [(centre - half, centre + half) for centre, half in sorted(line)]
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_line_has_a_piece_for_each_run_and_what_is_said_at_its_end():
    hover = [("a",), ("the end of a",), (), ("b",), ("the end of b",)]
    drawn = Drawn(chart(plot(Series("other", "runs", [(1, 1), (2, 2), None, (1, 3), (2, 4)], hover))))
    assert len(drawn.of("path", "line", "faint")) == 2
    assert [text for text in drawn.texts if "end of" in text] == ["the end of a", "the end of b"]


def test_a_thousand_long_runs_stay_a_small_figure():
    run = [*((float(at), float(at)) for at in range(1, 1200)), None]
    assert len(chart(plot(Series("other", "runs", run * 600)))) < 400_000


def test_a_limit_goes_from_side_to_side_and_a_note_stands_where_it_would_be():
    (line,) = Drawn(chart(plot(Series("limit", "", [(0, 5)]), Series("fit", "", [(3, 4)])))).of("line", "bad")
    assert (line["x1"], line["x2"], line["y1"]) == ("0", "100%", line["y2"])
    assert "↑ limit 18 GiB" in Drawn(chart(plot(Series("fit", "", [(3, 4)]), note="limit 18 GiB"))).texts


@pytest.mark.parametrize(("least_is_best", "order"), [(True, ["shade0", "shade7"]), (False, ["shade7", "shade0"])])
def test_the_best_figure_has_the_first_shade(least_is_best, order):
    scale = Scale("time", {1.0: "1 s"}, least_is_best)
    drawn = Drawn(chart(plot(Series("scored", "", [(1, 1), (2, 2)], shades=[1.0, 9.0], scale=scale))))
    assert [each["class"].split()[1] for each in drawn.of("circle", "dot")] == order


def test_bars_are_as_long_as_their_numbers_and_named_beside_them():
    axis = Axis("", ticks={0: "RTX 4090", 1: "H200"})
    drawn = Drawn(chart(plot(Series("bar", "expected", [(50, 0), (100, 1)]), x=FROM_ZERO, y=axis)))
    short, long = (float(each["width"][:-1]) for each in drawn.of("rect", "bar") if each["width"].endswith("%"))
    assert long == pytest.approx(2 * short, abs=0.02)
    assert {"RTX 4090", "H200"} <= {*drawn.texts}


def test_levels_of_a_prediction_surround_its_best_and_are_no_measurements(result_of):
    drawn = Drawn(chart(plot_of(result_of("tune"), "landscape")))
    assert len(drawn.of("path", "line", "faint")) > 2
    assert "predicted time, s (response surface, 7 runs), not measured" in drawn.texts


def test_a_figure_is_named_for_who_cannot_see_it_and_nothing_in_it_takes_the_focus(result_of):
    drawn = Drawn(chart(plot_of(result_of("probe"), "memory")))
    (named,) = [each["aria-label"] for _, each in drawn.elements if each.get("role") == "img"]
    assert named.startswith("Peak memory against batch size. peak memory, MiB over micro-batch size. fits (3)")
    assert not [each for _, each in drawn.elements if "tabindex" in each]


def test_a_figure_without_a_point_is_none():
    assert chart(plot(Series("fit", "", [(float("nan"), 1)]))) == ""


def test_texts_are_escaped_and_short():
    drawn = Drawn(chart(plot(Series("fit", "<b>&" + "x" * 500, [(1, 1)], [("<i>",)]), x=Axis("<script>"))))
    assert "<script>" in drawn.texts
    assert "<i>" in drawn.texts
    assert max(map(len, drawn.texts)) == 80
    assert {name for name, _ in drawn.elements} <= {"svg", "div", "ul", "li", "line", "circle", "path", "text", "title"}

"""The figures: what they show, what they leave out, and that no text of a user's is read as markup."""

import functools
import json
import sys

import documents
import plotly.graph_objects as go
import pytest
from documents import DOCUMENTS, estimate, estimated

from batchtune.device.gpus import all_gpus
from batchtune.errors import UsageError
from batchtune.report.plotly_figures import draw, label
from batchtune.report.view.read import plots_of
from batchtune.result import Result

PLOTS = ["estimates", "curves", "landscape", "memory", "throughput", "sensors"]


def figures(result):
    return {name: draw(plot) for name, plot in plots_of(result).items()}


@pytest.fixture(scope="module")
def drawn():
    """What a named document's figures are, drawn once."""
    return functools.cache(lambda name: figures(documents.result(name)))


def traces(figure):
    return {trace.name: trace for trace in figure.data}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_document_s_figures_are_valid_json_without_binary_arrays(drawn, name):
    for figure in drawn(name).values():
        text = figure.to_json()
        json.loads(text)
        assert "bdata" not in text


@pytest.mark.parametrize("name", ["hostile", "hostile estimate"])
def test_no_figure_holds_a_tag_of_the_user_s(drawn, name):
    for figure in drawn(name).values():
        text = figure.to_json()
        assert not any(mark in text for mark in ("<a", "<script", "<img", "<b>", "\\u003ca", "\\u003cscript"))


def test_memory_shows_fits_the_final_check_failures_and_the_limit(result_of):
    shown = traces(result_of("probe").plot_memory())
    assert list(shown) == ["fits", "final check", "out of memory", "limit 1.5 GiB"]
    assert shown["fits"].x == (1, 64, 176)
    assert shown["final check"].x == (176,)
    assert shown["out of memory"].x == (256, 177)
    assert set(shown["out of memory"].y) == set(shown["limit 1.5 GiB"].y) == {1_650_000_000 / 2**20}


def test_a_limit_far_above_the_peaks_is_named_and_not_drawn(result_of):
    probe = DOCUMENTS["probe"]["probe"]
    fits = [attempt for attempt in probe["attempts"] if attempt["outcome"] == "fit"]
    figure = result_of("probe", probe=probe | {"attempts": fits, "memory_limit_bytes": 2**40}).plot_memory()
    assert "limit" not in "".join(traces(figure))
    assert figure.layout.annotations[0].text == "↑ limit 1,024.0 GiB"
    assert figure.layout.yaxis.range[1] < 2 * max(traces(figure)["fits"].y)


def test_throughput_shows_the_fit_and_the_knee(result_of):
    shown = traces(result_of("probe").plot_throughput())
    assert list(shown) == ["t = α + β·B", "measured", "within 5% of best"]
    assert shown["within 5% of best"].x == (128,)
    fitted = shown["t = α + β·B"]
    assert fitted.x[0] == 8
    assert fitted.y[0] == pytest.approx(8 / 0.008)
    assert fitted.x[-1] == pytest.approx(176)


def test_several_precisions_are_told_apart_by_name_and_colour(result_of):
    shown = traces(result_of("probe at two precisions").plot_throughput())
    assert {"bf16 measured", "fp32 measured"} <= set(shown)
    assert shown["bf16 measured"].marker.color != shown["fp32 measured"].marker.color


def test_only_sensors_that_were_there_get_a_row(result_of):
    probe = DOCUMENTS["probe"]["probe"]
    only_power = [
        {key: value for key, value in point.items() if key in {"batch_size", "samples_per_second", "step_seconds"}}
        | {"power_watts": 300.0}
        for point in probe["throughput"]
    ]
    assert len(figures(result_of("probe"))["sensors"].data) == 5
    assert len(figures(result_of("probe", probe=probe | {"throughput": only_power}))["sensors"].data) == 1


def test_learning_curves_set_apart_what_runs_today_and_what_is_recommended(result_of):
    figure = result_of("tune").plot_curves()
    shown = traces(figure)
    assert list(shown) == ["other runs", "what you run today", "recommended", "target: val_loss ≤ 2.41"]
    assert shown["recommended"].x.count(None) == 2
    assert figure.layout.xaxis.type == "log"
    assert min(second for second in shown["other runs"].x if second is not None) > 0


def test_a_metric_to_maximise_stays_on_a_linear_axis(result_of):
    target = {"metric": "accuracy", "goal": "maximize", "value": 0.9}
    figure = result_of("tune", target=target).plot_curves()
    assert figure.layout.yaxis.type != "log"
    assert "target: accuracy ≥ 0.9" in traces(figure)


def test_the_landscape_has_one_point_for_each_configuration_coloured_by_its_median_time(result_of):
    shown = traces(result_of("tune").plot_landscape())
    reached = shown["reached the target"]
    assert list(zip(reached.x, reached.y, strict=True)) == [(32, 0.001), (64, 0.002), (128, 0.004), (8, 0.004)]
    assert 10 ** reached.marker.color[2] == pytest.approx(9.5)
    assert shown["stopped before the target"].y == (0.03,)
    assert shown["diverged or failed"].y == (0.5,)
    assert (shown["recommended"].x, shown["what you run today"].x) == ((128,), (32,))


def test_the_landscape_draws_what_the_surface_predicts_as_an_estimate_under_the_runs(result_of):
    figure = result_of("tune").plot_landscape()
    lines = figure.data[0]
    assert (lines.type, lines.name) == ("contour", "predicted time, s (response surface, 7 runs)")
    assert lines.z[2][2] == 9.0  # at rate 0.004 and batch 128
    assert lines.z[2][0] == 9.0 * 5
    assert lines.hovertext[2][2].endswith("<br>predicted 9.0 s (4.5 to 18.0), 90% band<br>not measured")
    assert lines.contours.start >= 9.0
    assert lines.contours.end <= 4 * 9.0


def test_the_landscape_shows_where_the_search_started(result_of):
    shown = traces(result_of("tune").plot_landscape())
    believed = shown["believed best before the search"]
    assert (believed.x, believed.y) == ((32,), (0.003,))
    assert believed.y[0] + believed.error_y.array[0] == pytest.approx(0.003 * 10**0.5)
    assert believed.y[0] - believed.error_y.arrayminus[0] == pytest.approx(0.003 / 10**0.5)
    assert shown["edge of stability, range test"].x == (32,)
    assert not {"believed best before the search", "edge of stability, range test"} & set(
        traces(result_of("tune", prior=None).plot_landscape())
    )


@pytest.mark.parametrize("cut", [{"batch_sizes": [8]}, {"learning_rates": [0.1]}])
def test_a_prediction_along_one_axis_only_draws_no_lines(result_of, cut):
    field = DOCUMENTS["tune"]["landscape"]
    for name in ("median_seconds", "low_seconds", "high_seconds"):
        rows = field[name][:1] if "batch_sizes" in cut else field[name]
        cut = cut | {name: [row[:1] for row in rows] if "learning_rates" in cut else rows}
    figure = result_of("tune", landscape=field | cut).plot_landscape()
    assert not any(trace.type == "contour" for trace in figure.data)
    assert not any(trace.type == "contour" for trace in result_of("tune", landscape=None).plot_landscape().data)


def test_gpus_whose_long_names_begin_alike_each_get_a_bar_and_a_name_of_their_own():
    names = [gpu.name for gpu in all_gpus() if gpu.name.startswith("RTX PRO 6000 Blackwell")]
    assert len(names) > 1
    made = Result.model_validate_json(json.dumps(estimated(*((name, 90 + at) for at, name in enumerate(names)))))
    figure = figures(made)["estimates"]
    assert figure.data[0].y == tuple(range(len(names)))
    assert [text.replace("<br>", " ") for text in figure.layout.yaxis.ticktext] == names
    assert list(traces(figure)) == ["expected", "safe, error band included"]


def test_many_estimates_with_one_answer_share_a_bar():
    gpus = [(f"card {number}", 24) for number in range(30)] + [("H200", 141)]
    figure = figures(Result.model_validate_json(json.dumps(estimated(*gpus))))["estimates"]
    assert figure.layout.yaxis.ticktext == ("card 0 +29", "H200")


def test_precisions_with_one_answer_share_a_bar_where_there_are_many():
    document = estimated(*[(f"card {number}", 24) for number in range(15)])
    document["estimates"] += [row | {"precision": "fp16"} for row in document["estimates"]]
    figure = figures(Result.model_validate_json(json.dumps(document)))["estimates"]
    (name,) = figure.layout.yaxis.ticktext
    assert name == f"card 0 +14 {document['estimates'][0]['precision']}/fp16"


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_without_measurements_is_refused_by_name(result_of, name):
    plot = getattr(result_of("failed at once"), f"plot_{name}")
    with pytest.raises(UsageError, match=f"no measurements for plot_{name}"):
        plot()


@pytest.mark.parametrize("name", PLOTS)
def test_whatever_the_page_draws_a_notebook_can_draw_alone(drawn, name):
    document = "estimate" if name == "estimates" else "tune"
    figure = getattr(documents.result(document), f"plot_{name}")()
    assert isinstance(figure, go.Figure)
    assert figure.to_json() == drawn(document)[name].to_json()


@pytest.mark.parametrize("name", ["memory", "curves"])
def test_who_lacks_plotly_reads_how_to_get_it(result_of, monkeypatch, name):
    monkeypatch.delitem(sys.modules, "batchtune.report.plotly_figures", raising=False)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(UsageError, match=r"draws with plotly: pip install 'batchtune-cli\[plots\]'"):
        getattr(result_of("tune"), f"plot_{name}")()


def test_labels_are_escaped_and_short():
    assert label("<b>&") == "&lt;b&gt;&amp;"
    assert label("x" * 500).endswith("…")
    assert len(label("x" * 500)) == 80


def test_gpus_that_none_beats_in_speed_and_energy_are_named(result_of):
    rows = [
        estimate(name, 80) | {"samples_per_second": speed, "samples_per_joule": lean}
        for name, speed, lean in (("fast", 90.0, 2.0), ("lean", 30.0, 8.0), ("beaten", 30.0, 1.0))
    ]
    figure = result_of("estimate", estimates=rows).plot_efficiency()
    assert figure.data[0].text == ("fast", "lean", "")
    assert [text.split("<br>")[0] for text in figure.data[0].hovertext] == ["fast", "lean", "beaten"]
    assert "estimated" in figure.layout.title.text


def test_memory_over_the_step_is_drawn_from_phase_to_phase_with_its_peak(result_of):
    figure = result_of("estimate").plot_step()
    line, peak = figure.data
    assert max(line.y) == 130
    assert (peak.x, peak.y) == ((5,), (130,))
    assert figure.layout.xaxis.ticktext[:3] == ("build", "forward 1", "backward 1")
    assert "1,692" in figure.layout.title.text
    assert "estimated" in figure.layout.title.text


@pytest.mark.parametrize("name", ["plot_efficiency", "plot_step"])
def test_figures_of_an_estimate_are_refused_where_there_is_none(result_of, name):
    with pytest.raises(UsageError, match="this probe result"):
        getattr(result_of("probe"), name)()


def test_the_landscape_gives_no_colour_to_a_run_that_broke_after_its_best_value(result_of):
    common = {"batch_size": 32, "precision": "bf16", "seed": 0}
    trials = [
        {"number": 0, "state": "complete", "outcome": "diverged", "learning_rate": 0.9, "value": 0.1} | common,
        {"number": 1, "state": "complete", "outcome": "finished", "learning_rate": 0.1, "value": 0.5} | common,
    ]
    shown = traces(result_of("tune", trials=trials, recommendation=None).plot_landscape())
    assert shown["finished"].y == (0.1,)
    assert shown["diverged or failed"].y == (0.9,)


def test_a_speed_without_a_largest_batch_is_drawn(result_of):
    row = estimate("H200", 141) | {"max_batch_size": None}
    figure = result_of("estimate", estimates=[row]).plot_efficiency()
    assert figure.data[0].hovertext[0].endswith("largest batch -")

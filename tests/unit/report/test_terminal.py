"""The report that people read: the answer first, the evidence after it, and nothing that was not measured."""

import ast
import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from batchtune.document import Attempt, Failure, Interval
from batchtune.report.terminal.report import render

WIDTHS = [40, 60, 80, 120]


def shown(result, width=100, *, verbose=False, **more):
    page = io.StringIO()
    Console(file=page, width=width, **more).print(render(result, verbose=verbose))
    return page.getvalue()


def words(result, width=100):
    """The text without line breaks and frames."""
    return " ".join(shown(result, width).replace("│", " ").split())


def row(text, start):
    """The cells of the line that starts with a word, frame and colours aside."""
    (line,) = [line for line in text.splitlines() if line.strip(" │").startswith(start)]
    return re.split(r"\s{2,}", line.strip(" │"))


def figures_of(result):
    """Every number of a result that a reader must find whole, as the report writes it."""
    found, base = result.recommendation, result.baseline
    for each in (found, base):
        if each is not None:
            yield from (f"{each.global_batch_size}", f"{each.learning_rate:.3g}")
    for probe in result.probes or [result.probe] if result.probe else []:
        yield from (f"{attempt.batch_size:,}" for attempt in probe.attempts)
        yield from (f"{point.samples_per_second:,.0f}" for point in probe.throughput if result.kind == "probe")
    for trial in result.trials or []:
        yield from (f"{trial.batch_size:,}", f"{trial.learning_rate:.3g}")
        yield from [f"{trial.time_to_target_seconds:.3g}"] if trial.time_to_target_seconds else []
    for estimate in result.estimates or []:
        yield from (f"{estimate.max_batch_size:,}", f"{estimate.safe_max_batch_size:,}")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal_or_trails_blanks(any_result, width):
    lines = shown(any_result, width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["tune", "probe", "probe at two precisions", "estimate", "interrupted in its study"])
def test_no_figure_is_cut_however_narrow_the_terminal(result_of, name, width):
    result = result_of(name)
    text = shown(result, width, verbose=True)
    numbers = set(re.findall(r"[\d.,]*\d", text))
    assert "…" not in text
    if name in {"tune", "interrupted in its study"}:
        result = result.model_copy(update={"probe": None})  # its attempts are drawn, and listed by `batchtune probe`
    assert set(figures_of(result)) <= numbers


@pytest.mark.parametrize("name", ["tune", "probe"])
def test_one_screen_holds_the_answer_its_proof_and_the_figures(result_of, name):
    screen = "\n".join(shown(result_of(name), 80).splitlines()[:24])
    answer = "speed-up" if name == "tune" else "largest batch 176"
    order = [answer, "177 did not (oom)", "peak memory, MiB", "◉ final check"]
    places = [screen.index(each) for each in order]
    assert places == sorted(places)
    assert "throughput, samples/s" in screen


def test_the_order_is_that_of_the_page_and_what_to_paste_stands_where_the_prompt_is(result_of):
    text = shown(result_of("tune", warnings=["the GPU was shared"]), 80)
    order = [
        "train with", "3.0× (2.7 to 3.3)", "reaches the target 3 times", "largest batch", "peak memory",
        "why these batch sizes", "configurations", "batch_size = 128", "warning: the GPU was shared",
        "measured on NVIDIA H200",
    ]  # fmt: skip
    places = [text.index(each) for each in order]
    assert places == sorted(places)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_to_paste_is_python_at_every_width(result_of, width):
    for name, precision in [("tune", "bf16"), ("probe", "bf16"), ("probe", "tf32")]:
        result = result_of(name)
        probe = result.probe.model_copy(update={"precision": precision})
        pasted = shown(result.model_copy(update={"probe": probe}), width).split("\npaste\n")[1].split("\n\n")[0]
        names = [
            target.id for each in ast.parse(pasted).body for target in each.targets if isinstance(target, ast.Name)
        ]
        assert names[0] == "batch_size"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_an_output_that_cannot_write_a_character_gets_one_that_says_the_same(any_result, encoding):
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=page, width=80).print(any_result)
    page.flush()
    text = page.buffer.getvalue().decode(encoding)
    assert max(map(len, text.splitlines())) <= 80
    if any_result.probe is not None and any_result.probe.throughput:
        assert "o measured" in text
        assert "?" not in text
        assert re.search(r"[o.]\.+o", text)  # dots of the curve between two points


def test_colours_are_left_out_where_they_are_not_wanted(tuned, monkeypatch):
    assert "\x1b[" in shown(tuned, force_terminal=True, color_system="standard")
    assert "\x1b[" not in shown(tuned)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(tuned, force_terminal=True, color_system="standard")
    assert not re.search(r"\x1b\[[\d;]*3\d", plain)


def test_the_recommendation_stands_first_beside_what_is_run_today(tuned):
    text = shown(tuned)
    assert text.startswith("╭")
    assert "digits" in text.splitlines()[0]
    assert row(text, "batch size ")[1:] == ["256 = 128 × 2 accumulated", "32"]
    assert row(text, "learning rate  ")[1:] == ["0.0003", "0.001"]
    assert row(text, "precision ")[1:] == ["bf16", "bf16"]
    assert row(text, "time to target  ")[1:] == ["41 s (39 to 44)", "127 s (120 to 130)"]
    assert row(text, "speed-up")[1:] == ["3.1× (2.8 to 3.4)", "1×"]
    assert text.index("reaches the target 3.10 times") < text.index("target val_loss at most 0.4123")


def test_an_interval_stays_in_one_piece_below_its_median_where_room_is_short(result_of):
    text = shown(result_of("tune"), 48)
    assert row(text, "time to target")[1:] == ["10 s", "30 s"]
    assert row(text, "(9 to 11)") == ["(9 to 11)", "(27 to 33)"]


def test_the_best_metric_is_shown_where_no_time_counts(tuned):
    value = Interval(median=0.41, low=0.4, high=0.43)
    best = tuned.recommendation.model_copy(
        update={"time_to_target_seconds": None, "speedup_over_baseline": None, "value": value}
    )
    result = tuned.model_copy(update={"recommendation": best, "baseline": None})
    assert row(shown(result), "val_loss ")[1:] == ["0.41 (0.40 to 0.43)"]
    assert "today" not in shown(result).split("╰")[0]


def test_a_probe_is_certified_from_both_sides(probed):
    text = words(probed)
    assert "largest batch 176 ran 20 steps, evaluation and saving in a fresh process" in text
    assert "177 did not (oom)" in text
    assert "peak 15.0 GiB of 20.0 GiB" in text
    assert "measured on NVIDIA H200, torch 2.13.0, CUDA 13.0" in text


def test_a_run_that_did_not_complete_says_so_at_the_top(probed):
    stopped = probed.model_copy(
        update={"status": "interrupted", "error": Failure(exit_code=130, message="interrupted by hand")}
    )
    assert shown(stopped).startswith("interrupted: interrupted by hand\n")


def test_nothing_fits_is_no_batch_of_zero(probed):
    attempts = [Attempt(batch_size=1, outcome="oom", message="out of memory")]
    probe = probed.probe.model_copy(
        update={"max_batch_size": None, "attempts": attempts, "throughput": [], "throughput_fit": None}
    )
    text = shown(probed.model_copy(update={"probe": probe}))
    assert "probe bf16: nothing fits" in text
    assert "largest batch" not in text
    refused = probe.model_copy(update={"attempts": [Attempt(batch_size=1, outcome="user_error", message="half only")]})
    assert "probe bf16: nothing trains" in shown(probed.model_copy(update={"probe": refused}))


def test_a_name_is_text_and_no_markup(result_of):
    assert "[bold]x[/bold]" in shown(result_of("tune").model_copy(update={"name": "[bold]x[/bold]"}))


def test_a_note_names_the_gpus_that_it_is_about_unless_those_are_all(result_of):
    row = result_of("estimate").estimates[0].model_dump()
    rows = [row | {"gpu": f"GPU {number}", "notes": ["everywhere", *own]} for number, own in
            enumerate([["two"], ["two"], ["many"], ["many"], ["many"], ["many"], []])]  # fmt: skip
    text = words(result_of("estimate", estimates=rows))
    assert "note: everywhere" in text
    assert "note for GPU 0, GPU 1: two" in text
    assert "note for GPU 2, GPU 3, GPU 4 and 1 more: many" in text
    assert text.count("everywhere") == 1


@pytest.mark.parametrize("width", [80, 160])
def test_times_on_several_devices_are_marked_as_estimates_beyond_the_one_that_ran(scaled, width):
    lines = shown(scaled, width).splitlines()
    first = next(number for number, line in enumerate(lines) if line.strip() == "on several devices") + 1
    rows = [line.split() for line in lines[first:] if line.split()[:1] in [["1"], ["2"], ["4"], ["8"]]][:4]
    assert [(row[0], row[-1]) for row in rows] == [
        ("1", "measured"),
        ("2", "estimated"),
        ("4", "estimated"),
        ("8", "estimated"),
    ]
    assert all("256" in row for row in rows)
    assert "25.6" in " ".join(rows[1])
    assert "communication takes 50 ms of a step's 250 ms (20%)" in " ".join(" ".join(lines).split())


def test_no_figure_of_several_devices_is_cut_where_room_is_short(scaled):
    text = shown(scaled, 50)
    assert all(cell_len(line) <= 50 for line in text.splitlines())
    assert text.count("estimated") == 3
    assert {"25.6", "23.0", "28.2"} <= set(re.findall(r"[0-9.]+", text))


@pytest.mark.parametrize("width", [1, 2, 30])
def test_no_width_is_too_small_to_say_everything(result_of, width):
    text = shown(result_of("tune"), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text


def test_a_version_that_is_not_known_is_not_named(result_of):
    result = result_of("probe", environment={"device": "some device"})
    assert "measured on some device, batchtune" in words(result)

"""The report that people read: the answer first, the evidence after it, and nothing that was not measured."""

import ast
import io
import re

import documents
import pytest
from rich.cells import cell_len
from rich.console import Console

from batchtune.device.gpus import all_gpus
from batchtune.document import Attempt, Failure, Interval, OptimizerSettings
from batchtune.report.terminal import render
from batchtune.report.view.words import estimated, estimated_safe

WIDTHS = [40, 60, 80, 120]


def shown(result, width=100, *, verbose=False, page="", **more):
    text = io.StringIO()
    Console(file=text, width=width, **more).print(render(result, verbose=verbose, page=page))
    return text.getvalue()


def words(result, width=100, **more):
    """The text without line breaks."""
    return " ".join(shown(result, width, **more).split())


def row(text, start):
    """The cells of the line that starts with a word."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return re.split(r"\s{2,}", line.strip())


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
        yield from (estimated(estimate, estimate.max_batch_size), estimated_safe(estimate))


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


def test_what_is_behind_the_answer_stands_above_it_where_it_is_asked_for(result_of):
    text = shown(result_of("tune", warnings=["the GPU was shared"]), 80, verbose=True)
    order = [
        "largest batch", "peak memory", "throughput, samples/s", "why these batch sizes", "configurations",
        "measured on NVIDIA H200", "3× as fast as today", "batch_size = 128", "warning: the GPU was shared",
    ]  # fmt: skip
    places = [text.index(each) for each in order]
    assert places == sorted(places)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_to_paste_is_python_at_every_width(result_of, width):
    for name, precision in [("tune", "bf16"), ("probe", "bf16"), ("probe", "tf32")]:
        result = result_of(name)
        probe = result.probe.model_copy(update={"precision": precision})
        settings = {"values": {"momentum": 0.9, "dampening": 0, "weight_decay": 1e-4, "nesterov": False}}
        task = result.task.model_copy(update={"optimizer": "SGD", "optimizer_settings": OptimizerSettings(**settings)})
        pasted = shown(result.model_copy(update={"probe": probe, "task": task}), width)
        pasted = pasted.split("\npaste\n")[1].split("\n\n")[0]
        names = [
            target.id for each in ast.parse(pasted).body for target in each.targets if isinstance(target, ast.Name)
        ]
        assert names[0] == "batch_size"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_an_output_that_cannot_write_a_character_gets_one_that_says_the_same(any_result, encoding):
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=page, width=80).print(render(any_result, verbose=True))
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
    assert text.startswith("3.1× as fast as today (2.8 to 3.4)\n")
    assert row(text, "batch size ")[1:] == ["256 = 128 × 2 accumulated", "32"]
    assert row(text, "learning rate  ")[1:] == ["0.0003", "0.001"]
    assert row(text, "precision ")[1:] == ["bf16", "bf16"]
    assert row(text, "time to target  ")[1:] == ["41 s (39 to 44)", "127 s (120 to 130)"]
    assert row(text, "target")[1:] == ["val_loss at most 0.4123"]
    assert "reaches the target 3.10 times" not in text  # the first line says so


def test_an_interval_stays_in_one_piece_below_its_median_where_room_is_short(result_of):
    text = shown(result_of("tune"), 40)
    assert row(text, "time to target")[1:] == ["10 s", "30 s"]
    assert row(text, "(9 to 11)") == ["(9 to 11)", "(27 to 33)"]


def test_the_best_metric_is_shown_where_no_time_counts(tuned):
    value = Interval(median=0.41, low=0.4, high=0.43)
    best = tuned.recommendation.model_copy(
        update={"time_to_target_seconds": None, "speedup_over_baseline": None, "value": value}
    )
    result = tuned.model_copy(update={"recommendation": best, "baseline": None})
    assert row(shown(result), "val_loss ")[1:] == ["0.41 (0.40 to 0.43)"]
    assert "today" not in shown(result)


def test_a_probe_is_certified_from_both_sides(probed):
    text = words(probed)
    assert text.startswith("176 is the largest micro-batch size that trains ran 20 steps, evaluation and saving in a")
    assert "177 did not (oom)" in text
    assert "peak 15.0 GiB of 20.0 GiB" in text
    assert "measured on NVIDIA H200, torch 2.13.0, CUDA 13.0" in words(probed, verbose=True)


def test_a_run_that_did_not_complete_says_so_at_the_top(probed):
    stopped = probed.model_copy(
        update={"status": "interrupted", "error": Failure(exit_code=130, message="interrupted by hand")}
    )
    assert shown(stopped).startswith("interrupted by hand\n")


def test_nothing_fits_is_no_batch_of_zero(probed):
    attempts = [Attempt(batch_size=1, outcome="oom", message="out of memory")]
    probe = probed.probe.model_copy(
        update={"max_batch_size": None, "attempts": attempts, "throughput": [], "throughput_fit": None}
    )
    text = shown(probed.model_copy(update={"probe": probe}))
    assert text == "nothing fits\nat bf16: out of memory at batch 1\n"
    refused = probe.model_copy(update={"attempts": [Attempt(batch_size=1, outcome="user_error", message="half only")]})
    assert "nothing trains" in shown(probed.model_copy(update={"probe": refused}))


def test_a_name_is_text_and_no_markup(result_of):
    assert "[bold]x[/bold]" in shown(result_of("tune").model_copy(update={"name": "[bold]x[/bold]"}))


def test_a_note_names_the_gpus_that_it_is_about_unless_those_are_all(result_of):
    row = result_of("estimate").estimates[0].model_dump()
    rows = [row | {"gpu": f"GPU {number}", "notes": ["everywhere", *own]} for number, own in
            enumerate([["two"], ["two"], ["many"], ["many"], ["many"], ["many"], []])]  # fmt: skip
    text = words(result_of("estimate", estimates=rows), verbose=True)
    assert "note: everywhere" in text
    assert "note for GPU 0, GPU 1: two" in text
    assert "note for GPU 2, GPU 3, GPU 4 and 1 more: many" in text
    assert text.count("everywhere") == 1


@pytest.mark.parametrize("width", [80, 160])
def test_times_on_several_devices_are_marked_as_estimates_beyond_the_one_that_ran(scaled, width):
    lines = shown(scaled, width, verbose=True).splitlines()
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


def test_what_ranks_took_stands_beside_what_was_estimated(scaled):
    answer = scaled.recommendation
    one, two, *more = answer.scaling.points
    energy = Interval(median=900.0, low=800.0, high=1000.0)
    two = two.model_copy(update={"is_estimate": False, "estimated_seconds": 20.48, "energy_to_target_joules": energy})
    told = answer.scaling.model_copy(update={"points": [one, two, *more]})
    text = shown(
        scaled.model_copy(update={"recommendation": answer.model_copy(update={"scaling": told})}), 160, verbose=True
    )
    (row,) = [line for line in text.splitlines() if "the estimate" in line]
    assert "51.2 s" in row
    assert "900 J" in row
    assert "measured; the estimate: 0.80 times as long" in row


def test_no_figure_of_several_devices_is_cut_where_room_is_short(scaled):
    text = shown(scaled, 50, verbose=True)
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
    assert "measured on some device, batchtune" in words(result, verbose=True)


PAGE = ".batchtune/digits/report.html"
MANY = [
    "other programs used up to 51% of the processors while steps were timed: probe again when it is idle",
    "batch sizes above 128 were not probed: budget.run has room for too few of their steps",
    "a third",
    "a fourth",
    "a fifth",
]
NO_GAIN = "no significant speed-up over the baseline; the best candidate got there 1.04 times as fast as the baseline"
NO_GAIN += " (95% interval 0.93 to 1.12 over 3 fresh seeds each)"
COMMAND = "batchtune tune .batchtune/digits/config.yaml confirm.seeds=3 budget.total=261s"
UNSURE = {
    "seeds_to_confirm": 3,
    "confirm_command": COMMAND,
    "reason": "best of 4 single runs",
    "speedup_over_baseline": None,
}
FAILED = {"status": "failed", "error": {"exit_code": 1, "message": "a reason"}}


def _probe(**more):
    return {"probe": documents.probed() | more}


def _recommended(name, **more):
    made = documents.tuned()
    return {"recommendation": {key: value for key, value in (made[name] | more).items() if value is not None}}


SCREENS = {
    "bound by memory": ("probe", {}, "176 is the largest"),
    "bound by the data": (
        "probe", _probe(first_failing_batch_size=None, limited_by="dataset"), "176 is the largest"
    ),
    "at four precisions": (
        "probe", {"probes": [documents.probed(name) for name in ("bf16", "fp16", "tf32", "fp32")]}, "176 is the largest"
    ),
    "with warnings": ("probe", {"warnings": MANY}, "176 is the largest"),
    "nothing fits": ("probe where nothing fits", {}, "failed: nothing fits"),
    "better": ("tune", {"warnings": MANY}, "3× as fast as today (2.7 to 3.3"),
    "less energy": ("tune of energy", {"warnings": MANY}, "3× less energy"),
    "no better": ("tune", {"warnings": MANY, **_recommended("baseline", reason=NO_GAIN)}, "no better than"),
    "not confirmed": (
        "tune", {"warnings": MANY, **_recommended("recommendation", **UNSURE)}, "not confirmed"
    ),
    "failed in its study": ("interrupted in its study", FAILED, "failed: a reason"),
    "interrupted": ("interrupted in its study", {"warnings": MANY}, "interrupted"),
    "one GPU": ("estimate", {"estimates": [documents.estimate("T4", 16)]}, "170 is the largest safe micro-batch size"),
    "three GPUs": ("estimate", {}, "3 of 3 GPUs could train it"),
    "all GPUs": (
        "estimate",
        {"estimates": [documents.estimate(gpu.name, gpu.memory_bytes >> 30) for gpu in all_gpus()]},
        "98 of 98 GPUs could train it",
    ),
    "all GPUs at three precisions": (
        "estimate",
        {
            "estimates": [
                documents.estimate(gpu.name, gpu.memory_bytes >> 30) | {"precision": each}
                for gpu in all_gpus()
                for each in ("bf16", "fp16", "fp32")
            ]
        },
        "98 of 98 GPUs could train it",
    ),
    "refused": (
        "estimate",
        {"status": "failed", "estimates": [], "error": {"exit_code": 4, "message": "nothing fits"}},
        "failed: nothing fits",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20)])
@pytest.mark.parametrize("name", SCREENS)
def test_one_screen_holds_the_answer_first_what_to_paste_and_to_run_and_two_warnings(result_of, name, width, height):
    document, more, answer = SCREENS[name]
    result = result_of(document, **more)
    lines = shown(result, width, page=PAGE, height=height).splitlines()
    assert " ".join(" ".join(lines[:2]).split()).startswith(answer)
    assert len(lines) < height  # the prompt has a line
    assert max(map(cell_len, lines)) <= width
    told = sum(line.startswith("warning: ") for line in lines)
    assert told == min(2, len(result.warnings)) or (told < 2 and height < 24)
    more = len(result.warnings) - told
    assert sum(line.startswith(f"{more} {'more ' if told else ''}warning") for line in lines) == (more > 0)
    assert lines[-1] == f"page: {PAGE} (--open shows it)"
    found = [sentence for sentence in lines if len(sentence) > 20]
    assert len(found) == len(set(found))  # nothing is said twice

"""The report that programs and pull requests read."""

import csv
import io
import json

import pytest

from batchtune.document import Failure, Interval
from batchtune.report.formats import environment_text, to_csv, to_json, to_markdown
from batchtune.report.view.settings import pytorch
from batchtune.result import load_result


def test_json_reads_back_as_the_same_result(tuned, tmp_path):
    (tmp_path / "result.json").write_text(to_json(tuned))
    assert load_result(tmp_path) == tuned


def test_json_leaves_out_what_was_not_measured(tuned):
    document = json.loads(to_json(tuned))
    assert "environment" not in document
    assert "time_to_target_seconds" not in document["trials"][2]
    assert "power_watts" not in document["probe"]["throughput"][0]


def test_csv_has_a_row_for_every_trial_of_a_study(tuned):
    rows = list(csv.DictReader(io.StringIO(to_csv(tuned))))
    assert [row["number"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[1]["time_to_target_seconds"] == "41.0"
    assert rows[2]["time_to_target_seconds"] == ""
    assert "curve" not in rows[0]


def test_what_has_parts_is_json_in_csv(tuned):
    arguments = {"momentum": 0.9, "nesterov": True, "kind": "a"}
    first = tuned.trials[0].model_copy(update={"optimizer_arguments": arguments})
    found = tuned.model_copy(update={"trials": [first, *tuned.trials[1:]]})
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [json.loads(row["optimizer_arguments"]) for row in rows] == [arguments, {}, {}, {}]


def test_csv_has_a_row_for_every_attempt_of_a_probe(probed):
    rows = list(csv.DictReader(io.StringIO(to_csv(probed))))
    assert [(row["precision"], row["batch_size"], row["outcome"]) for row in rows] == [
        ("bf16", "1", "fit"),
        ("bf16", "177", "oom"),
        ("bf16", "176", "fit"),
    ]


def test_markdown_sets_the_recommendation_beside_what_is_run_today(tuned):
    lines = to_markdown(tuned).splitlines()
    assert lines[0] == "## batchtune tune: digits"
    assert "| batch size | 256 = 128 × 2 accumulated | 32 |" in lines
    assert "| time to target | 41 s (39 to 44) | 127 s (120 to 130) |" in lines
    assert "**3.1×** as fast as today (2.8 to 3.4)" in lines
    assert "> warning: batch size 300 ended in crash" in lines


def test_markdown_of_a_probe_gives_the_bracket_and_the_curve(probed):
    text = to_markdown(probed)
    assert (
        "Largest batch at bf16: **176**; ran 20 steps, evaluation and saving in a fresh process; 177 did not (oom)"
        in text
    )
    assert "| 176 | 880 | 200 ms |" in text
    assert "| train with |" not in text


def test_markdown_says_when_a_run_did_not_complete(probed):
    assert "**failed**" in to_markdown(probed.model_copy(update={"status": "failed"}))


@pytest.mark.parametrize(
    ("precision", "line"),
    [
        ("bf16", "autocast = torch.autocast(device.type, dtype=torch.bfloat16)"),
        ("fp16", "autocast = torch.autocast(device.type, dtype=torch.float16)"),
        ("tf32", "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True"),
        ("fp32", None),
    ],
)
def test_the_lines_to_paste_are_python_that_sets_what_was_found(tuned, precision, line):
    found = tuned.recommendation.model_copy(update={"precision": precision})
    lines = pytorch(tuned.model_copy(update={"recommendation": found})).splitlines()
    compile("\n".join(lines), "paste", "exec")
    assert lines[:3] == ["batch_size = 128", "accumulation_steps = 2", "learning_rate = 0.0003"]
    assert lines[3:] == ([line] if line else [])


def test_a_probe_gives_its_largest_batch_to_paste(probed):
    assert pytorch(probed).startswith(f"batch_size = {probed.probe.max_batch_size}")


def test_the_environment_leaves_out_what_is_not_there():
    facts = {
        "batchtune": "0.1.0",
        "environment": {"device": "cpu", "device_memory_bytes": 3 << 30, "cuda": None},
        "sensors": {"power_watts": 88.0},
    }
    assert [line.split() for line in environment_text(facts).splitlines()] == [
        ["batchtune", "0.1.0"],
        ["device", "cpu"],
        ["device_memory_bytes", "3.0", "GiB"],
        ["power_watts", "88.0"],
    ]


def test_markdown_sets_the_metric_reached_beside_what_is_reached_today(tuned):
    def reaching(each, value):
        reached = Interval(median=value, low=value, high=value)
        return each.model_copy(update={"time_to_target_seconds": None, "value": reached})

    best = {"recommendation": reaching(tuned.recommendation, 0.4), "baseline": reaching(tuned.baseline, 0.5)}
    lines = to_markdown(tuned.model_copy(update=best)).splitlines()
    assert "| val_loss | 0.4 | 0.5 |" in lines


def test_markdown_keeps_text_in_its_cell_and_in_its_line(tuned):
    searched = tuned.recommendation.model_copy(update={"optimizer_arguments": {"mode": "a|b\nc"}})
    more = {"recommendation": searched, "warnings": ["two\nlines"], "status": "failed"}
    lines = to_markdown(
        tuned.model_copy(update=more | {"error": Failure(exit_code=3, message="raised\nthere")})
    ).splitlines()
    assert "| optimizer | mode=a\\|b c | - |" in lines
    assert "> warning: two lines" in lines
    assert "**failed**: raised there" in lines


def test_markdown_names_no_version_that_is_not_known(result_of):
    assert to_markdown(result_of("probe", environment={"device": "cpu"})).endswith("Measured on cpu.\n")


def test_counts_with_gaps_are_whole_numbers(result_of):
    rows = list(csv.DictReader(io.StringIO(to_csv(result_of("probe")))))
    assert [row["peak_reserved_bytes"] for row in rows[:3]] == ["208000000", "712000000", ""]


def test_a_study_that_ended_in_its_probe_gives_the_attempts(result_of):
    rows = list(csv.DictReader(io.StringIO(to_csv(result_of("interrupted in its probe")))))
    assert [row["batch_size"] for row in rows] == ["1", "64", "256", "176", "177", "176"]

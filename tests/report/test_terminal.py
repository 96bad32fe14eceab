"""The report that people read: the answer first, the evidence after it, and nothing that was not measured."""

import io
import re

import pytest
from rich.console import Console

from batchtune.report.units import duration, number, share, size
from batchtune.results import Attempt, Failure, Interval


def shown(result, width=100):
    page = io.StringIO()
    Console(file=page, width=width).print(result)
    return page.getvalue()


def row(text, start):
    """The cells of the line that starts with a word, frame and colours aside."""
    (line,) = [line for line in text.splitlines() if line.strip(" │").startswith(start)]
    return re.split(r"\s{2,}", line.strip(" │"))


def test_the_recommendation_stands_first_beside_what_is_run_today(tuned):
    text = shown(tuned)
    assert text.startswith("╭")
    assert "digits" in text.splitlines()[0]
    assert row(text, "batch size")[1:] == ["256 = 128 × 2 accumulated", "32"]
    assert row(text, "learning rate  ")[1:] == ["0.0003", "0.001"]
    assert row(text, "precision ")[1:] == ["bf16", "bf16"]
    assert row(text, "time to target  ")[1:] == ["41 s (39 to 44)", "127 s (120 to 130)"]
    assert row(text, "speed-up")[1:] == ["3.1× (2.8 to 3.4)", "1×"]
    assert text.index("reaches the target 3.10 times") < text.index("target  val_loss at most 0.4123")


def test_the_best_metric_is_shown_where_no_time_counts(tuned):
    value = Interval(median=0.41, low=0.4, high=0.43)
    best = tuned.recommendation.model_copy(
        update={"time_to_target_seconds": None, "speedup_over_baseline": None, "value": value}
    )
    result = tuned.model_copy(update={"recommendation": best, "baseline": None})
    assert row(shown(result), "val_loss ")[1:] == ["0.41 (0.4 to 0.43)"]
    assert "today" not in shown(result).split("╰")[0]


def test_runs_are_listed_best_first_without_those_that_never_ran(tuned):
    text = shown(tuned)
    assert "3 best of 3 runs" in text
    runs = [line.split() for line in text.splitlines() if re.match(r" +\d +(baseline|search)", line)]
    assert [cells[0] for cells in runs] == ["1", "0", "2"]
    assert runs[0][-1] == "reached"
    assert runs[2][-1] == "capped"


def test_what_to_paste_and_the_warnings_come_after_the_evidence(tuned):
    text = shown(tuned)
    assert text.index("best of 3 runs") < text.index("batch_size = 128") < text.index("warning: batch size 300")
    assert "accumulation_steps = 2" in text


def test_a_probe_is_certified_from_both_sides(probed):
    text = " ".join(shown(probed).split())
    assert "largest batch 176 ran 20 steps, evaluation and saving in a fresh process" in text
    assert "177 did not (oom)" in text
    assert "peak 15.0 GiB of 20.0 GiB" in text
    assert "measured on NVIDIA H200, torch 2.13.0, CUDA 13.0" in text


def test_every_attempt_is_listed_with_its_memory_drawn_against_the_limit(probed):
    lines = shown(probed).splitlines()
    (first,) = [line for line in lines if re.match(r" +1 +fit", line)]
    (last,) = [line for line in lines if re.match(r" +176 +fit", line)]
    (failed,) = [line for line in lines if re.match(r" +177 +oom", line)]
    assert first.count("█") == 3  # a quarter of twelve
    assert last.count("█") == 9
    assert last.rstrip().endswith("final check")
    assert "█" not in failed
    assert "out of memory [while allocating] 2 GiB" in failed


def test_figures_stay_readable_on_a_narrow_terminal_whatever_the_message(probed):
    long = Attempt(batch_size=123456, outcome="kernel_limit", message="a reason of many words, and then some " * 6)
    probe = probed.probe.model_copy(update={"attempts": [*probed.probe.attempts, long]})
    text = shown(probed.model_copy(update={"probe": probe}), width=80)
    assert all(word in text for word in ("123,456", "kernel_limit", "15.0 GiB", "outcome"))
    assert max(map(len, text.splitlines())) <= 80


def test_a_sensor_that_the_device_lacks_has_no_column(probed):
    text = shown(probed)
    assert "samples/s" in text
    assert not any(name in text for name in ("power", "J/sample", "°C"))
    points = [point.model_copy(update={"power_watts": 312.0}) for point in probed.probe.throughput]
    warm = probed.model_copy(update={"probe": probed.probe.model_copy(update={"throughput": points})})
    assert "312 W" in shown(warm)


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-5, "20 µs"),
        (0.25, "250 ms"),
        (41.04, "41 s"),
        (125, "2 min 05 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_written_with_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_figures_that_were_not_measured_are_a_dash():
    assert [size(None), duration(None), number(None), share(None)] == ["-", "-", "-", "-"]


def test_figures_are_rounded_to_what_a_reader_can_use():
    assert [size(3 << 20), size(18.26 * (1 << 30))] == ["3 MiB", "18.3 GiB"]
    assert [number(12345.6), number(0.12345), share(0.42)] == ["12,346", "0.123", "42%"]

"""The tables of the terminal: what each row says, in which order, and what is no column at all."""

import io
import re

import pytest
from documents import estimate as estimated_row
from rich.console import Console

from batchtune.device.gpus import COMMON, all_gpus
from batchtune.document import Attempt, InputPipeline, ProbeResult, TaskInfo, ThroughputPoint
from batchtune.report.formats import to_markdown
from batchtune.report.terminal import FittedTable, render
from batchtune.report.view import estimate, study
from batchtune.report.view.probe import attempts, throughput
from batchtune.report.view.probe import lines as lines_about
from batchtune.report.view.read import view_of
from batchtune.result import Result


def lines_of(table, width=100):
    page = io.StringIO()
    Console(file=page, width=width).print(FittedTable(table))
    return page.getvalue().splitlines()


def text_of(*probes, kind="probe"):
    result = Result(
        kind=kind,
        status="complete",
        task=TaskInfo(path="model.py"),
        probe=probes[0],
        probes=list(probes) if len(probes) > 1 else None,
    )
    page = io.StringIO()
    Console(file=page, width=160).print(render(result, verbose=True))
    return page.getvalue()


def probe(precision, batch=64, rate=100.0, **more):
    point = {"batch_size": batch, "samples_per_second": rate, "step_seconds": 1.0}
    return ProbeResult(
        precision=precision,
        max_batch_size=batch,
        peak_reserved_bytes=2**31,
        throughput=[ThroughputPoint(**point, **more)],
    )


def estimates_of(result):
    return lines_of(estimate.section(result.estimates).tables[0])


def row_of(text, precision):
    table = text[text.index("precisions compared") :]
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [precision])


def test_every_attempt_is_listed_in_order_with_its_memory_drawn_against_the_limit(probed):
    first, failed, last = lines_of(attempts(probed.probe))[3:]
    assert first.split()[:3] == ["1", "fit", "5"]
    assert first.count("█") == 3  # a quarter of twelve
    assert last.count("█") == 9
    assert last.rstrip().endswith("final check")
    assert failed.split()[:2] == ["177", "oom"]
    assert "█" not in failed
    assert "out of memory [while allocating] 2 GiB" in failed


def test_attempts_stay_readable_in_a_narrow_terminal_whatever_the_message(probed):
    long = Attempt(batch_size=123456, outcome="kernel_limit", message="a reason of many words, and then some " * 6)
    probe = probed.probe.model_copy(update={"attempts": [*probed.probe.attempts, long]})
    lines = lines_of(attempts(probe), 50)
    assert max(map(len, lines)) <= 50
    assert all(word in " ".join(lines) for word in ("123,456", "kernel_limit", "peak, GiB", "outcome"))


@pytest.mark.parametrize(
    ("fitted", "said"),
    [
        ({}, "4 ms + 500 µs per sample (fitted, ±3%); half of the peak speed at batch 8; within"),
        ({"error_share": 1e-9}, "4 ms + 500 µs per sample (fitted, ±1%); half"),
        ({"alpha_seconds": 0.0, "saturation_batch_size": 0.0}, "500 µs per sample (fitted, ±3%); within"),
        (
            {"beta_seconds_per_sample": 0.0, "saturation_batch_size": None},
            "4 ms at every size timed (fitted, ±3%); within",
        ),
        ({"error_share": 0.24}, "too noisy for a fit; within"),
        ({"error_share": None}, "within"),
    ],
)
def test_a_step_time_is_fitted_with_its_error_where_what_was_measured_bears_it_out(result_of, fitted, said):
    found = result_of("probe").probe
    fit = found.throughput_fit.model_copy(update=fitted)
    (line,) = lines_about(found.model_copy(update={"throughput_fit": fit}))
    assert line.text.startswith(said)
    assert line.text.endswith("within 5% of the best measured speed from batch 128")


@pytest.mark.parametrize("peak", [0, (1 << 20) - 1])
def test_a_peak_too_small_to_be_told_is_said_to_be_that_wherever_it_stands(probed, peak):
    tried = [each.model_copy(update={"peak_reserved_bytes": peak}) for each in probed.probe.attempts if each.fits]
    small = probed.probe.model_copy(update={"attempts": tried, "peak_reserved_bytes": peak, "throughput": []})
    text = text_of(small)
    assert "peak < 1 MiB of 20.0 GiB" in text
    assert [line.split()[3:5] for line in text.splitlines() if re.match(r"\d +(1|176) +fit", line)] == [["<", "1"]] * 2
    page = probed.model_copy(update={"probe": small}).to_html()
    assert page.count("&lt; 1 MiB") == 5  # proof, certificate, Markdown to paste, two attempts
    assert not re.search(r">0 B|\d KiB|0\.0%|Peak memory against", page)


def test_runs_are_listed_best_first_without_those_that_never_ran(tuned):
    lines = lines_of(study.runs(tuned))
    assert lines[0].strip() == "every run, best first; ● with what is recommended"
    runs = [line.split() for line in lines if re.search(r"baseline|search", line)]
    assert [cells[0] for cells in runs] == ["●", "0", "●"]
    assert runs[0][1:4] == ["1", "search", "256"]
    assert [cells[-1] for cells in runs] == ["reached", "reached", "capped"]


def test_runs_of_a_metric_to_maximise_are_ranked_by_it(result_of):
    target = {"metric": "accuracy", "goal": "maximize"}
    trials = [
        {"number": n, "state": "complete", "batch_size": 32, "learning_rate": 0.1, "precision": "bf16", "seed": 0}
        | {"value": value}
        for n, value in enumerate((0.5, 0.9, 0.7))
    ]
    lines = lines_of(study.runs(result_of("tune", target=target, trials=trials, recommendation=None)))
    assert [line.split()[0] for line in lines[3:]] == ["1", "2", "0"]
    assert "to target" not in lines[1]


def test_estimates_are_named_as_such_each_with_its_error(result_of):
    lines = estimates_of(result_of("estimate"))
    assert "estimated, not measured" in lines[0]
    assert lines[3].split() == ["RTX", "4090", "24", "260", "290", "high", "±4%"]


def test_a_size_beyond_which_nothing_was_looked_at_is_marked(result_of):
    row = result_of("estimate").estimates[0].model_copy(update={"limited_by": "max", "safe_max_batch_size": 288})
    lines = estimates_of(result_of("estimate").model_copy(update={"estimates": [row]}))
    assert lines[3].split()[3:5] == ["≥288", "≥288"]


def test_an_estimate_has_no_more_digits_than_it_can_know_and_the_safe_size_is_rounded_down(result_of):
    (row, *_), more = result_of("estimate").estimates, {"max_batch_size": 567_633_029, "safe_max_batch_size": 559_999}
    shown = {}
    for error in (None, 0.35, 0.04, 0.004):
        made = row.model_copy(update={**more, "error_share": error})
        columns = {each.name: each.cells for each in estimate.section([made]).tables[0].columns}
        shown[error] = (columns["safe"], columns["largest"])
    assert list(shown.values()) == [(["550,000"], ["570,000,000"])] * 3 + [(["559,000"], ["568,000,000"])]


def test_the_safe_size_comes_first_and_a_speed_is_a_bound_that_must_be_asked_for(result_of):
    result = result_of("estimate")
    (row, *_) = result.estimates
    answer = estimate.headline([row])
    assert (answer.figure, answer.choice[0].text) == ("260", "290")
    assert estimate.headline([row.model_copy(update={"safe_max_batch_size": None})]).figure == "none"
    for verbose, speeds in ((False, 0), (True, 2)):
        page = io.StringIO()
        Console(file=page, width=160).print(render(result, verbose=verbose))
        head = next(line for line in page.getvalue().splitlines() if line.startswith("GPU "))
        assert head.index("safe") < head.index("largest")
        assert head.count("at most") == speeds
    assert "samples/" not in to_markdown(result)
    assert "samples/s at most" in result.to_html()


def test_of_many_gpus_the_most_common_are_shown_and_all_where_they_are_asked_for(result_of):
    rows = [estimated_row(gpu.name, gpu.memory_bytes >> 30) for gpu in all_gpus()]
    short, every = estimate.section(result_of("estimate", estimates=rows).estimates).tables
    assert set(short.columns[0].cells) == set(COMMON)
    assert (len(every.columns[0].cells), every.folded, short.folded) == (len(rows), True, False)
    assert f"on 10 of {len(rows)} GPUs" in short.title
    at_three = [row | {"precision": precision} for row in rows for precision in ("bf16", "fp16", "fp32")]
    (shown, _) = estimate.section(result_of("estimate", estimates=at_three).estimates).tables
    assert set(shown.columns[0].cells) == set(COMMON[:3])
    named = [row | {"precision": each} for row in rows[:3] for each in ("bf16", "fp16", "fp32", "tf32")]
    (whole,) = estimate.section(result_of("estimate", estimates=named).estimates).tables
    assert {*whole.columns[0].cells} == {row["gpu"] for row in rows[:3]}  # asked for by name
    assert len(estimate.section(result_of("estimate", estimates=rows[:10]).estimates).tables) == 1


def test_memory_is_told_by_phase_with_what_holds_the_most_activations(result_of):
    section = estimate.memory(result_of("estimate").details)
    lines = lines_of(section.tables[0], width=160)
    assert lines[0].startswith("what memory is for at its peak, estimated")
    assert lines[3].split()[:10] == ["bf16", "1,692", "130", "4", "4", "8", "104", "10", "backward", "2"]
    (note,) = section.notes
    assert "backward 2, most activations are held by blocks.*.up (model.py:21): 60.0 GiB" in note


def test_precisions_stand_side_by_side():
    text = text_of(probe("bf16", 128, 900.0), probe("fp32", 64, 300.0))
    assert row_of(text, "bf16") == ["bf16", "128", "2,048", "900", "128"]
    assert row_of(text, "fp32") == ["fp32", "64", "2,048", "300", "64"]


def test_a_precision_in_which_nothing_fits_is_in_the_table_too():
    text = text_of(probe("bf16"), ProbeResult(precision="fp32"))
    assert row_of(text, "fp32") == ["fp32", "nothing", "fits", "-", "-", "-"]


def test_utilisation_is_compared_where_it_is_known():
    text = text_of(probe("bf16", mfu=0.42), probe("fp32"))
    assert row_of(text, "bf16")[-1] == "42%"
    assert row_of(text, "fp32")[-1] == "-"


def test_one_precision_is_not_compared():
    assert "precisions compared" not in text_of(probe("bf16"))


def test_what_held_the_clocks_back_is_shown_where_something_did():
    assert "power cap, sync boost" in text_of(probe("bf16", throttle_reasons=["power cap", "sync boost"]))
    assert "held back" not in text_of(probe("bf16", throttle_reasons=[]))
    assert "held back" not in text_of(probe("bf16"))


def test_sensors_that_do_not_exist_have_no_columns():
    bare, warm = (lines_of(throughput(probe("bf16", **more)))[1] for more in ({}, {"power_watts": 312.0}))
    assert bare.split() == ["batch", "samples/s", "of", "best", "step,", "s"]
    assert warm.split() == ["batch", "samples/s", "of", "best", "step,", "s", "power,", "W"]


def test_the_verdict_on_the_data_loader_is_shown():
    pipeline = InputPipeline(batch_size=64, step_samples_per_second=8000.0, verdict="input-bound: so and so")
    assert "input-bound: so and so" in text_of(probe("bf16").model_copy(update={"input_pipeline": pipeline}))


def test_runs_of_a_study_of_energy_are_ranked_by_it(result_of):
    lines = lines_of(study.runs(result_of("tune of energy")))
    assert "energy, J" in lines[1]
    joules = [re.search(r"\d,000", line) for line in lines[3:]]
    assert [found[0] if found else None for found in joules] == [
        "3,000", "4,000", "5,000", "7,000", "9,000", None, None
    ]  # fmt: skip


def test_where_no_run_got_there_the_best_metric_comes_first(result_of):
    common = {"batch_size": 32, "learning_rate": 0.1, "precision": "bf16", "seed": 0, "state": "pruned"}
    trials = [{"number": number, "value": value} | common for number, value in enumerate((0.5, 0.1, 0.3))]
    target = {"metric": "val_loss", "goal": "minimize", "kind": "time_to_target", "value": 0.01}
    lines = lines_of(study.runs(result_of("tune", target=target, trials=trials, recommendation=None)))
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "0"]


def test_joules_that_were_counted_besides_do_not_rank_the_runs(result_of):
    result = result_of("tune of energy")
    timed = result.target.model_copy(update={"kind": "time_to_target"})
    lines = lines_of(study.runs(result.model_copy(update={"target": timed})))
    assert [line.split()[1] for line in lines[3:6] if "●" in line] == ["2", "5"]


def test_what_a_run_had_reached_before_it_broke_is_no_best(result_of):
    common = {"batch_size": 32, "learning_rate": 0.1, "precision": "bf16", "seed": 0}
    trials = [
        {"number": 0, "state": "fail", "outcome": "diverged", "value": 0.1} | common,
        {"number": 1, "state": "complete", "outcome": "finished", "value": 0.5} | common,
        {"number": 2, "state": "fail", "outcome": "crash", "value": 0.2} | common,
    ]
    target = {"metric": "val_loss", "goal": "minimize"}
    lines = lines_of(study.runs(result_of("tune", target=target, trials=trials, recommendation=None)))
    assert lines[3].split()[0] == "1"


def test_gpus_of_which_nothing_is_known_are_told_with_the_reason_and_shown_after_those_with_an_answer(result_of):
    reason = "tracing took longer than 60 s (0% of it was done): --timeout 10m gives it longer"
    known_of_it = {"gpu": "A100-80GB", "memory_bytes": 80 << 30, "precision": "bf16"}
    refused = known_of_it | {"confidence": "refused", "notes": [reason]}
    known = [estimated_row(gpu.name, gpu.memory_bytes >> 30) for gpu in all_gpus() if gpu.name not in COMMON]
    view = view_of(result_of("estimate", estimates=[refused, *known]))
    said = f"1 of {len(known) + 1} GPUs: tracing took longer than 60 s"
    assert [(line.name, line.text) for line in view.lines] == [("refused", said)]
    assert view.headline.figure == str(len(known))
    assert view.headline.words == f"of {len(known)} GPUs that were estimated could train it"
    assert "A100-80GB" not in view.overview.columns[0].cells
    assert view_of(result_of("estimate", estimates=[refused])).lines == []
    too_small = known[0] | {"max_batch_size": None, "safe_max_batch_size": None}
    words = view_of(result_of("estimate", estimates=[refused, too_small])).headline.words
    assert words == "GPUs that were estimated could train it"


def test_an_estimate_of_more_than_the_training_set_holds_says_so_at_first_sight(result_of):
    few = "train_dataset has 31,033 samples: training makes no larger batches"
    one, other = (estimated_row(gpu.name, gpu.memory_bytes >> 30) for gpu in all_gpus()[:2])
    view = view_of(result_of("estimate", estimates=[one | {"notes": [few, "another note"]}, other | {"notes": [few]}]))
    assert [(line.name, line.text) for line in view.lines] == [("data", few)]
    assert view_of(result_of("estimate", estimates=[one, other])).lines == []

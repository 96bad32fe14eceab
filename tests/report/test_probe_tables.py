"""What the terminal shows of precisions, sensors and the data loader."""

import io

from rich.console import Console

from batchtune.report.terminal import render
from batchtune.results import InputPipeline, ProbeResult, Result, TaskInfo, ThroughputPoint


def text_of(*probes, kind="probe"):
    console = Console(width=160, record=True, file=io.StringIO())
    result = Result(
        kind=kind,
        status="complete",
        task=TaskInfo(path="model.py"),
        probe=probes[0],
        probes=list(probes) if len(probes) > 1 else None,
    )
    console.print(render(result))
    return console.export_text()


def probe(precision, batch=64, rate=100.0, **more):
    point = {"batch_size": batch, "samples_per_second": rate, "step_seconds": 1.0}
    return ProbeResult(
        precision=precision,
        max_batch_size=batch,
        peak_reserved_bytes=2**31,
        throughput=[ThroughputPoint(**point, **more)],
    )


def row_of(text, precision):
    table = text[text.index("precisions compared") :]
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [precision])


def test_precisions_stand_side_by_side():
    text = text_of(probe("bf16", 128, 900.0), probe("fp32", 64, 300.0))
    assert row_of(text, "bf16") == ["bf16", "128", "2.0", "GiB", "900", "128"]
    assert row_of(text, "fp32") == ["fp32", "64", "2.0", "GiB", "300", "64"]


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
    text = text_of(probe("bf16"))
    assert "MFU" not in text
    assert "memory" not in text


def test_the_verdict_on_the_data_loader_is_shown():
    pipeline = InputPipeline(batch_size=64, step_samples_per_second=8000.0, verdict="input-bound: so and so")
    assert "input-bound: so and so" in text_of(probe("bf16").model_copy(update={"input_pipeline": pipeline}))

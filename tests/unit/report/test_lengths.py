"""What reports show of a probe of several lengths: a table, a figure with both sides, and what is gained."""

import documents
import pytest

import batchtune
from batchtune.errors import UsageError
from batchtune.report.formats import to_json, to_markdown
from batchtune.report.terminal import render
from batchtune.report.view import estimate
from batchtune.report.view.read import plots_of, view_of
from batchtune.report.view.settings import pytorch
from batchtune.report.view.trainers import EXPORTS
from batchtune.result import Result


def point(length, batch, failing=None, attempts=()):
    tried = [{"batch_size": size, "length": length, "outcome": outcome} for size, outcome in attempts]
    tried.append({"batch_size": batch, "length": length, "outcome": "fit", "step_seconds": 0.5})
    return {
        "length": length,
        "max_batch_size": batch,
        "first_failing_batch_size": failing,
        "limited_by": "memory",
        "peak_reserved_bytes": 1 << 30,
        "attempts": tried,
    }


@pytest.fixture
def probed():
    """A probe of three lengths, with those of the training set where they are given."""

    def probed(counts=((128, 300), (512, 60), (1024, 40)), lengths=(128, 512, 1024)):
        known = [point(lengths[0], 80, 81, [(81, "oom")]), point(lengths[1], 20), point(lengths[2], 10, 11)]
        more = {
            "lengths": known,
            "length_distribution": [{"length": length, "samples": samples} for length, samples in counts],
            "length_check": {"steps": 200, "lowered": [lengths[0]]},
        }
        document = documents.DOCUMENTS["probe"]
        return Result.model_validate(document | {"probe": document["probe"] | more})

    return probed


def test_the_table_has_a_row_for_each_length(probed):
    (table,) = next(each for each in view_of(probed()).sections if each.title == "Lengths").tables
    cells = {column.name: list(column.cells) for column in table.columns}
    assert cells["length"] == ["128", "512", "1024"]
    assert cells["largest batch"] == ["80", "20", "10"]
    assert cells["fails at"] == ["81", "-", "11"]
    assert cells["samples/s"] == ["160", "40", "20"]
    assert cells["tokens/s"] == ["20,480", "20,480", "20,480"]
    assert cells["attempts"] == ["2", "1", "1"]


def test_the_figure_has_both_sides_of_each_bracket(probed):
    plot = plots_of(probed())["lengths"]
    points = {series.mark: list(series.points) for series in plot.series}
    assert points == {"fit": [(128, 80), (512, 20), (1024, 10)], "oom": [(128, 81), (1024, 11)]}


def test_lengths_of_several_numbers_lie_at_their_product(probed):
    plot = plots_of(probed((), [(16, 8), (32, 16), (64, 16)]))["lengths"]
    assert [x for x, _ in plot.series[0].points] == [128, 512, 1024]
    assert "product" in plot.x.title


def test_what_is_gained_is_told_against_the_longest_s_batch(probed):
    gain = next(line for line in view_of(probed()).lines if line.name == "gain")
    assert gain.text.startswith("3.7 times")  # 400 / 10 batches; here 300 / 80 + 60 / 20 + 40 / 10
    assert "with 10 at every length" in gain.text


def test_a_gain_is_told_against_what_the_longest_trains_without_the_others(probed):
    alone = {"batch_size": 20, "length": 1024, "outcome": "fit", "purpose": "verify"}
    document = probed().model_dump()
    document["probe"]["lengths"][-1]["attempts"].append(alone)
    gain = next(line for line in view_of(Result.model_validate(document)).lines if line.name == "gain")
    assert gain.text.startswith("1.9 times")  # 400 / 20 batches
    alone["batch_size"] = 40
    assert "gain" not in {line.name for line in view_of(Result.model_validate(document)).lines}  # 400 / 40 are fewer


@pytest.mark.parametrize("counts", [(), ((2048, 5),)], ids=["unknown", "longer than all that was probed"])
def test_no_gain_is_told_where_it_is_not_known(probed, counts):
    assert "gain" not in {line.name for line in view_of(probed(counts)).lines}


def test_lengths_that_the_final_check_has_made_smaller_are_named(probed):
    line = next(line for line in view_of(probed()).lines if line.name == "all lengths")
    assert line.text.startswith("200 steps")
    assert line.text.endswith("made smaller by it: 128")


def test_lengths_of_several_numbers_have_no_tokens(probed):
    (table,) = next(
        each for each in view_of(probed((), [(16, 8), (32, 16), (64, 16)])).sections if each.title == "Lengths"
    ).tables
    assert "tokens/s" not in [column.name for column in table.columns]


def test_the_lines_of_pytorch_make_batches_of_every_length(probed):
    lines, found = pytorch(probed()), {}
    exec(next(line for line in lines.splitlines() if line.startswith("length_batches")), found)
    assert found["length_batches"] == {128: 80, 512: 20, 1024: 10}
    assert "batch_size =" not in lines
    assert batchtune.LengthBatchSampler([100, 700], found["length_batches"])
    assert "is the largest micro-batch size that trains at length 1024" in view_of(probed()).headline.words


def test_what_was_not_checked_together_is_told_and_exported_to_nobody(probed):
    document = probed().model_dump()
    document["probe"]["length_check"] = None
    result = Result.model_validate(document)
    told = {line.name: line.text for line in view_of(result).lines}
    assert told["all lengths"].startswith("not checked together yet")
    assert "length_batches" not in pytorch(result)
    assert "gain" not in told
    (table,) = next(each for each in view_of(result).sections if each.title == "Lengths").tables
    assert "not checked together yet" in table.title
    assert table.columns[1].name == plots_of(result)["lengths"].series[0].name == "fits alone, not checked"
    with pytest.raises(UsageError, match="ended before its lengths were checked together"):
        EXPORTS["lhotse"].text(result)
    with pytest.raises(UsageError, match="ended before its lengths were checked together"):
        batchtune.LengthBatchSampler([100], result)


def test_a_probe_without_lengths_shows_nothing_of_them():
    result = documents.result("probe")
    assert "lengths" not in plots_of(result)
    assert "Lengths" not in {section.title for section in view_of(result).sections}


@pytest.mark.parametrize(("width", "verbose"), [(120, False), (60, True), (160, True)])
def test_every_report_has_them(probed, width, verbose):
    from rich.console import Console

    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(render(probed(), verbose=verbose))
    assert max(map(len, shown.get().splitlines())) <= width
    for title in ("largest micro-batch", "peak memory", "throughput, samples/s") if verbose else ():
        assert title in shown.get()
    for text in (shown.get(), to_markdown(probed())):
        assert "length" in text
        assert "80" in text
    assert [each.length for each in Result.model_validate_json(to_json(probed())).probe.lengths] == [128, 512, 1024]


def estimated(gpu, precision, safe):
    each = [
        {"length": n, "max_batch_size": safe, "safe_max_batch_size": safe, "alone_max_batch_size": safe}
        for n in (8, 16)
    ]
    row = {"gpu": gpu, "memory_bytes": 1 << 34, "precision": precision, "max_batch_size": safe, "lengths": each}
    return documents.document("estimate", estimates=[row])["estimates"][0]


@pytest.mark.parametrize(
    ("asked", "titles"),
    [
        ([("T4", "fp16")], ["at fp16, estimated, not measured, on T4"]),
        ([("T4", "fp16"), ("RTX 4090", "bf16")], ["at bf16 or fp16, estimated"]),
        (
            [("T4", "fp16"), ("RTX 4090", "fp16"), ("T4", "fp32"), ("RTX 4090", "fp32")],
            ["at fp16, est", "at fp32, est"],
        ),
    ],
)
def test_estimates_of_lengths_name_each_gpu_that_was_asked_about(asked, titles):
    rows = Result.model_validate(documents.document("estimate", estimates=[estimated(*each, 40) for each in asked]))
    tables = estimate.lengths(rows.estimates).tables
    assert all(title in table.title for table, title in zip(tables, titles, strict=True))
    for table in tables:
        cells = {column.name: list(column.cells) for column in table.columns}
        assert len(asked) == 1 or cells["GPU"] == ["RTX 4090", "T4"]

"""A result against an earlier one: what is worse, what cannot be told, and what cannot be compared at all."""

import copy
import json

import documents
import pytest

from batchtune.errors import UsageError
from batchtune.report.against import compare
from batchtune.result import Result

ALLOW = 0.05


def probe_with(**more):
    """A document of a probe with keys laid over its probe."""
    return documents.document("probe", probe=documents.probed() | more)


def compared(now, before, allow=ALLOW):
    read = [Result.model_validate(copy.deepcopy(each)) for each in (now, before)]
    return compare(*read, allow)


def verdicts(now, before, allow=ALLOW):
    found = json.loads(compared(now, before, allow).to_json())
    return {change["figure"]: change["verdict"] for change in found["changes"]}


OLD = probe_with()
PEAK = "peak_reserved_bytes"


def with_peaks(factor):
    tried = [each | ({PEAK: int(each[PEAK] * factor)} if PEAK in each else {}) for each in OLD["probe"]["attempts"]]
    return probe_with(attempts=tried)


def with_speed(factor, error_share):
    points = [each | {"samples_per_second": each["samples_per_second"] * factor} for each in OLD["probe"]["throughput"]]
    return probe_with(throughput=points, throughput_fit=OLD["probe"]["throughput_fit"] | {"error_share": error_share})


@pytest.mark.parametrize(
    ("now", "figure", "verdict"),
    [
        (OLD, "max_batch_size", "same"),
        (probe_with(max_batch_size=168, first_failing_batch_size=169), "max_batch_size", "same"),
        (probe_with(max_batch_size=167, first_failing_batch_size=168), "max_batch_size", "worse"),
        (probe_with(max_batch_size=150, first_failing_batch_size=176), "max_batch_size", "uncertain"),
        (probe_with(max_batch_size=None, first_failing_batch_size=1), "max_batch_size", "worse"),
        (probe_with(max_batch_size=190, first_failing_batch_size=191), "max_batch_size", "better"),
        (with_peaks(1.04), "peak_bytes", "same"),
        (with_peaks(1.06), "peak_bytes", "worse"),
        (with_peaks(0.9), "peak_bytes", "better"),
        (with_speed(0.96, 0.01), "samples_per_second", "same"),
        (with_speed(0.8, 0.01), "samples_per_second", "worse"),
        (with_speed(0.9, 0.03), "samples_per_second", "uncertain"),
        (with_speed(0.5, 0.3), "samples_per_second", "uncertain"),
    ],
)
def test_a_figure_is_worse_by_more_than_the_share_and_by_more_than_its_error(now, figure, verdict):
    assert verdicts(now, OLD)[figure] == verdict


def test_peaks_are_of_one_batch_size_that_ran_in_both():
    tried = [documents.attempt(64), documents.attempt(200)]
    now = probe_with(attempts=tried, max_batch_size=200, first_failing_batch_size=201)
    (peak,) = (each for each in compared(now, OLD).changes if each.figure == "peak_bytes")
    assert (peak.words, peak.change_share) == ("peak at batch 64", 0)


def test_the_speed_of_another_processor_proves_nothing_while_its_memory_does():
    def on(name):
        return with_speed(0.5 if "Xeon" in name else 1, 0.01) | {"environment": {"device": name, "device_type": "cpu"}}

    found = compared(on("Xeon (4 cores)"), on("EPYC (4 cores)"))
    assert {each.figure: each.verdict(ALLOW) for each in found.changes}["samples_per_second"] == "uncertain"
    assert not found.worse
    assert found.notes == ["device: Xeon (4 cores) now, EPYC (4 cores) before"]


def studied(seconds, low, high, target=2.41):
    tuned = documents.tuned()
    tuned["recommendation"]["time_to_target_seconds"] = {"median": seconds, "low": low, "high": high}
    tuned["target"]["value"] = target
    return tuned


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (studied(10, 9.9, 10.1), "same"),
        (studied(12, 11.9, 12.1), "worse"),
        (studied(12, 9, 15), "uncertain"),
        (studied(12, 12, 12), "uncertain"),  # one run has no interval
        (studied(12, 11.9, 12.1, target=2.3), "uncertain"),
    ],
)
def test_the_time_to_one_target_is_worse_only_beyond_its_intervals(now, verdict):
    assert verdicts(now, studied(10, 9.9, 10.1))["time_to_target_seconds"] == verdict


def test_what_an_idle_machine_would_take_is_not_held_against_what_runs_took():
    now = studied(5, 4.9, 5.1)
    now["recommendation"]["timed_in_turn"] = True
    (change,) = [each for each in compared(now, studied(10, 9.9, 10.1)).changes if each.figure.startswith("time")]
    assert change.words == "time to target, now with the machine idle (estimate)"
    assert change.verdict(0.05) == "uncertain"


def test_estimates_are_compared_gpu_by_gpu():
    def estimated(safe):
        row = {"gpu": "A100-80GB", "memory_bytes": 80 << 30, "precision": "bf16", "max_batch_size": 120}
        return documents.document("estimate", estimates=[row | {"safe_max_batch_size": safe}])

    assert [change.of for change in compared(estimated(90), estimated(100)).worse] == ["A100-80GB, bf16"]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (OLD | {"environment": {"device": "NVIDIA A10"}}, "device: NVIDIA A10 now, NVIDIA H200 before"),
        (OLD | {"task": {"path": "other.py"}}, "task: other.py now, model.py before"),
        (probe_with(precision="fp32"), "precision bf16: not measured now"),
        (probe_with(memory_limit_bytes=20 << 30), "probe both with the same --memory-limit"),
        (probe_with(inference=True), "precision bf16: forward passes"),
        (documents.tuned(), "kind of result: tune now, probe before"),
        (OLD | {"status": "failed", "error": {"exit_code": 4, "message": "nothing fits"}}, "is failed: nothing fits"),
    ],
)
def test_what_was_not_measured_alike_is_refused_by_name(now, named):
    with pytest.raises(UsageError) as refused:
        compared(now, OLD)
    assert named in str(refused.value)


def test_a_limit_that_no_search_reached_may_be_another():
    reached_none = {"limited_by": "dataset"}
    now, before = probe_with(memory_limit_bytes=20 << 30, **reached_none), probe_with(**reached_none)
    assert not compared(now, before).worse


def test_the_folder_of_a_task_is_not_part_of_its_name():
    assert not compared(OLD | {"task": {"path": "elsewhere/model.py"}}, OLD).worse


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, found in {"old": OLD, "new": probe_with(max_batch_size=100, first_failing_batch_size=101)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


@pytest.fixture
def run(files):
    from typer.testing import CliRunner

    from batchtune.cli import app

    return lambda *options: CliRunner().invoke(app, ["report", *options])


@pytest.mark.parametrize("format_", ["table", "markdown", "json"])
def test_the_command_prints_it_and_its_exit_code_says_whether_it_is_worse(run, format_):
    worse = run("new.json", "--against", "old.json", "--format", format_)
    assert (worse.exit_code, "largest batch" in worse.stdout or "max_batch_size" in worse.stdout) == (1, True)
    assert run("old.json", "--against", "new.json", "--format", format_).exit_code == 0
    assert run("new.json", "--against", "old.json", "--format", format_, "--allow", "50%").exit_code == 0


def test_the_comparison_alone_is_on_stdout_for_programs(run):
    assert json.loads(run("new.json", "--against", "old.json", "--json").stdout)["worse"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--allow", "5"), "--allow 5: is a share"),
        (("--allow", "some"), "--allow some: is a share"),
        (("--allow", "-1%"), "--allow -1%: is a share"),
        (("--format", "html"), "--against old.json: not with --format html"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(run, options, message):
    refused = run("new.json", "--against", "old.json", *options)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_share_without_an_earlier_result_is_refused(run):
    refused = run("new.json", "--allow", "5%")
    assert (refused.exit_code, "--allow 5%: says nothing without --against" in refused.stderr) == (2, True)


def test_names_in_a_comment_end_neither_a_cell_nor_a_line():
    evil = "model|.py\n\n# heading"
    shown = compared(OLD | {"task": {"path": evil}}, OLD | {"task": {"path": evil}}).to_markdown()
    assert [line for line in shown.splitlines() if line.startswith("#")] == [shown.splitlines()[0]]

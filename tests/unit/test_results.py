"""The result document: its JSON, its schema, and reading it back."""

import json
import os
import stat
from pathlib import Path

import documents
import jsonschema
import pytest
from pydantic import ValidationError

from batchtune.document import (
    Attempt,
    CurvePoint,
    Environment,
    Failure,
    Interval,
    ProbeResult,
    TaskInfo,
    ThroughputPoint,
)
from batchtune.errors import UsageError
from batchtune.result import Result, load_result, result_schema
from batchtune.run_folder import write_atomically

TASK = TaskInfo(path="model.py")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=documents.DOCUMENTS)
def document(request) -> Result:
    return documents.result(request.param)


@pytest.fixture
def written(tmp_path):
    """A function that changes a document and writes it."""

    def write(**changes: object) -> Path:
        content = documents.DOCUMENTS["probe"] | changes
        path = tmp_path / "result.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture(scope="module")
def by_schema():
    schema = result_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_document_is_valid_by_its_schema(document, by_schema):
    by_schema.validate(json.loads(document.to_json()))


def test_the_document_reads_back_the_same(document, tmp_path):
    (tmp_path / "result.json").write_text(document.to_json())
    assert load_result(tmp_path / "result.json") == document
    assert load_result(tmp_path) == document


def test_a_result_is_one_line_with_its_answer_where_python_prints_it(document):
    shown = repr(document)
    assert shown == str(document)
    assert "\n" not in shown
    assert len(shown) <= len("<Result: >") + 200
    assert shown.startswith(f"<Result: {document.kind} of {document.name}, "[:200])


def test_that_line_has_what_to_choose_or_why_there_is_nothing():
    told = "3× as fast as today (2.7 to 3.3 over 1 fresh seed); batch size 128; learning rate 0.004; precision bf16"
    assert repr(documents.result("tune")) == f"<Result: tune of digits, complete: {told}>"
    assert "176 is the largest micro-batch size that trains" in repr(documents.result("probe"))
    nothing = Result(kind="probe", status="failed", task=TASK, error=Failure(exit_code=3, message="it\nraised"))
    assert repr(nothing) == "<Result: probe of model.py, failed: it raised>"
    probed = documents.result("probe").model_copy(update={"status": "failed", "error": nothing.error})
    assert repr(probed) == f"<Result: probe of {probed.name}, failed: it raised; precision bf16>"


def test_the_document_names_its_schema_and_version():
    head = json.loads(Result(kind="probe", status="complete", task=TASK).to_json())
    assert (head["schema"], head["kind"], head["status"]) == ("batchtune.result/1", "probe", "complete")
    assert head["created_at"].endswith("+00:00")
    assert head["batchtune_version"]


@pytest.mark.parametrize("wrong", [{"kind": "guess"}, {"status": "fine"}, {"schema": "other/1"}, {"warnings": "none"}])
def test_the_schema_refuses_another_document(wrong, by_schema):
    with pytest.raises(jsonschema.ValidationError):
        by_schema.validate(documents.DOCUMENTS["probe"] | wrong)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_a_figure_that_was_not_measured_is_absent(value):
    attempt = Attempt(batch_size=1, outcome="fit", step_seconds=value)
    probe = ProbeResult(precision="fp32", attempts=[attempt])
    text = Result(kind="probe", status="complete", task=TASK, probe=probe).to_json()
    assert "step_seconds" not in text
    assert "NaN" not in text
    assert "null" not in text


def test_zero_is_a_measurement_and_stays():
    point = ThroughputPoint(batch_size=1, samples_per_second=1.0, step_seconds=1.0, gpu_utilization=0.0)
    assert "gpu_utilization" in point.model_dump_json(exclude_none=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: Interval(median=value, low=1.0, high=2.0),
        lambda value: ThroughputPoint(batch_size=1, samples_per_second=value, step_seconds=1.0),
        lambda value: CurvePoint(seconds=value, samples=1),
    ],
)
def test_a_figure_that_must_be_there_must_be_a_number(make, value):
    with pytest.raises(ValidationError, match="finite"):
        make(value)


def test_records_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        documents.result("probe").kind = "tune"


def test_keys_that_a_later_version_added_are_ignored(written):
    path = written(colour="blue", environment={"device": "a CPU", "firmware": "9"})
    assert load_result(path).environment == Environment(device="a CPU")


@pytest.mark.parametrize("version", ["2", "17", "99999999999999999999"])
def test_a_newer_schema_is_refused_with_the_remedy(written, version):
    with pytest.raises(UsageError, match=r"a newer batchtune wrote it.*upgrade batchtune"):
        load_result(written(schema=f"batchtune.result/{version}"))


@pytest.mark.parametrize("version", ["0", "", "-1", "one", "²"])
def test_a_schema_that_never_was_is_refused(written, version):
    with pytest.raises(UsageError, match="there never was such a version"):
        load_result(written(schema=f"batchtune.result/{version}"))


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"schema": "other/1"}', '{"schema": 1}', "null"])
def test_another_json_file_is_no_result(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UsageError, match=r"not a batchtune result .*; name a run"):
        load_result(tmp_path / "x.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "binary", "deep"])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"not a JSON document .*; name a run, its folder or its result\.json"):
        load_result(tmp_path / "x.json")


def test_a_file_too_large_to_be_a_result_is_not_read(tmp_path):
    with (tmp_path / "x.json").open("wb") as stream:
        stream.truncate(10 << 30)
    with pytest.raises(UsageError, match=r"x\.json: larger than 128 MiB; this is no result"):
        load_result(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("place", "wrong", "told"),
    [
        ("probe.attempts.0.batch_size", 0, "greater than or equal to 1"),
        ("probe.attempts.0.batch_size", 10**30, "less than"),
        ("probe.peak_reserved_bytes", -1, "greater than or equal to 0"),
        ("trials.0.learning_rate", 0.0, "greater than 0"),
        ("prior.learning_rate_decades", 1e300, "less than or equal to 100"),
        ("landscape.median_seconds", [[1.0]], "a row for each batch size and a column for each learning rate"),
        ("landscape.batch_sizes", [], "a row for each batch size and a column for each learning rate"),
    ],
)
def test_a_figure_that_nothing_could_have_measured_is_refused_by_its_key(written, place, wrong, told):
    *parents, last = place.split(".")
    document = section = json.loads(json.dumps(documents.DOCUMENTS["tune"]))
    for key in parents:
        section = section[int(key) if key.isdigit() else key]
    section[last] = wrong
    with pytest.raises(
        UsageError, match=rf"result\.json: {place.removesuffix('.median_seconds').removesuffix('.batch_sizes')}.*{told}"
    ):
        load_result(written(**document))


def test_what_no_text_can_hold_is_a_question_mark():
    failed = Failure(exit_code=3, message="no file '\udcff.png' – €")
    document = Result(kind="probe", status="failed", task=TaskInfo(path="\ud800.py"), error=failed)
    assert json.loads(document.to_json())["error"]["message"] == "no file '?.png' – €"
    assert document.task.path == "?.py"


def test_a_damaged_document_names_the_first_wrong_key(written):
    with pytest.raises(UsageError, match=r"result.json: status: Input should be .* \(1 problem"):
        load_result(written(status="fine"))


def test_no_result_comes_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(UsageError, match="no such result; run 'batchtune probe' or 'batchtune tune' first"):
        load_result(tmp_path)


class TestFrames:
    def test_a_study_gives_a_row_for_each_trial(self):
        frame = documents.result("tune").to_frame()
        assert list(frame["number"]) == [0, 1, 2, 3, 4, 5, 6]
        assert list(frame["time_to_target_seconds"].dropna()) == [30.0, 12.0, 9.0, 10.0, 110.0]
        assert "curve" not in frame.columns

    def test_a_probe_gives_a_row_for_each_attempt(self):
        frame = documents.result("probe").to_frame()
        assert list(frame["batch_size"]) == [1, 64, 256, 176, 177, 176]
        assert list(frame["outcome"]) == ["fit", "fit", "oom", "fit", "oom", "fit"]
        assert set(frame["precision"]) == {"bf16"}

    def test_several_probes_give_the_attempts_of_all(self):
        assert len(documents.result("probe at two precisions").to_frame()) == 12

    def test_an_estimate_gives_a_row_for_each_gpu(self):
        assert list(documents.result("estimate").to_frame()["gpu"]) == ["RTX 4090", "A100-80GB", "H200"]

    def test_a_failure_gives_no_rows(self):
        assert documents.result("failed at once").to_frame().empty


class TestWriteAtomically:
    def test_the_text_replaces_the_file(self, tmp_path):
        for text in ("old", "new ü"):
            write_atomically(tmp_path / "result.json", text)
        assert (tmp_path / "result.json").read_text(encoding="utf-8") == "new ü"
        assert names(tmp_path) == ["result.json"]

    def test_others_may_read_it_as_they_may_any_new_file(self, tmp_path):
        (tmp_path / "plain").touch()
        write_atomically(tmp_path / "result.json", "{}")
        modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert len(modes) == 1

    @pytest.mark.parametrize("umask", [0o022, 0o077])
    def test_it_is_as_private_as_the_umask_has_it(self, tmp_path, umask):
        before = os.umask(umask)
        try:
            write_atomically(tmp_path / "result.json", "{}")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o666 & ~umask

    def test_a_file_that_was_private_stays_so(self, tmp_path):
        (tmp_path / "result.json").touch(mode=0o600)
        write_atomically(tmp_path / "result.json", "{}")
        assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o600

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_failure_leaves_the_old_file_and_no_other(self, tmp_path, monkeypatch, step):
        def no_space(*_: object) -> None:
            raise OSError(28, "No space left on device")

        (tmp_path / "result.json").write_text("old")
        monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), no_space)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(tmp_path / "result.json", "new")
        assert (tmp_path / "result.json").read_text() == "old"
        assert names(tmp_path) == ["result.json"]

    def test_an_interruption_leaves_no_temporary_file(self, tmp_path, monkeypatch):
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "result.json", "new")
        assert names(tmp_path) == []


def test_the_result_of_a_long_study_reads_back(tmp_path):
    study = documents.result("tune")
    message = "x" * (140 << 10)  # as long as thousands of evaluations, and written in no time
    trials = [study.trials[1].model_copy(update={"number": n, "message": message}) for n in range(500)]
    file = tmp_path / "result.json"
    file.write_text(study.model_copy(update={"trials": trials}).to_json())
    assert file.stat().st_size > 64 << 20
    assert len(load_result(file).trials) == 500

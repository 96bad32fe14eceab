"""Whatever is wrong with what a user gives, they get one clear line with the remedy and the documented exit code."""

import contextlib
import errno
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import batchtune.api
from batchtune.document import Attempt
from batchtune.errors import UsageError
from batchtune.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]

# The configuration


def refused(invoke, folder, text, *arguments, name="config.yaml"):
    """What `tune` says to a configuration that cannot be used; it neither trains nor leaves anything behind."""
    (folder / name).write_text(text)
    answer = invoke("tune", folder / name, *arguments)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    assert not (folder / ".batchtune").exists()
    return answer.stderr.replace(f"{folder}/", "")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_problems_of_a_configuration_are_told_at_once_with_their_lines(invoke, folder):
    told = refused(
        invoke,
        folder,
        "name: ../elsewhere\n"  # no task
        "spaces: {}\n"  # unknown
        "batch_size: {min: 10, max: 5}\n"  # contradictory
        "learning_rate:\n"
        "  max: quick\n"  # mistyped
        "  maxx: 3\n"  # unknown, spelled like a known one
        "seed: -1\n"
        "budget: {run: 2m, total: 1m}\n",
    )
    for line, problem in {
        1: "'task' is missing; add 'task: model.py'",
        2: "unknown key 'spaces'",
        3: "batch_size: min 10 is greater than max 5; swap them or raise max",
        5: "learning_rate.max: ",
        6: "unknown key 'learning_rate.maxx'. Did you mean 'learning_rate.max'?",
        7: "seed: ",
        8: "budget: run 120 s is longer than total 60 s; raise total",
    }.items():
        assert f"config.yaml:{line}: {problem}" in told
    assert "cannot name a run folder" in told
    assert len(told.splitlines()) == 8


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task: [model.py\nname: x\n", "config.yaml:2: not valid YAML: expected ',' or ']'"),
        ("task: model.py\n\tname: x\n", "config.yaml:2: not valid YAML: found character '\\t'"),
        ("- task\n", "config.yaml:1: a configuration is a mapping of keys to values"),
        ("", "config.yaml:1: 'task' is missing"),
        ("task: a.py\ntask: b.py\n", "config.yaml:2: key 'task' stands twice (first in line 1); remove one"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_with_its_line(invoke, folder, text, told):
    assert told in refused(invoke, folder, text)


def test_a_configuration_that_is_not_there_is_told_with_the_command_that_writes_one(invoke, folder):
    answer = invoke("tune", "nowhere.yaml")
    assert answer.exit_code == 2
    assert answer.stderr == (
        "batchtune: nowhere.yaml: cannot be read: No such file or directory; 'batchtune init' writes one\n"
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("budget.total", "'budget.total' is not of the form key=value, for example budget.total=5m"),
        ("budget.totl=5m", "'budget.totl=5m': unknown key 'budget.totl'. Did you mean 'budget.total'?"),
        ("budget.total=soon", "'budget.total=soon': budget.total: 'soon' is not a duration; write 90s, 10m or 1h"),
        ("batch_size.min=99", "batch_size: min 99 is greater than max 16"),
    ],
)
def test_an_override_that_cannot_be_used_is_named(invoke, folder, override, told):
    assert told in refused(invoke, folder, "task: model.py\nbatch_size: {max: 16}\n", override)


def test_a_key_goes_before_its_flag(invoke, folder, monkeypatch):
    monkeypatch.setattr(batchtune.api, "check", lambda *_, **__: {})  # what a dry run does in a child
    (folder / "config.yaml").write_text("task: model.py\nbudget: {run: 1s}\n")
    flags, keys = ("--workers", "3", "--budget", "33s"), ("workers=2", "budget.total=44s")
    resolved = yaml.safe_load(invoke("tune", "config.yaml", *flags, *keys, "--dry-run", "-q").stdout)
    assert (resolved["workers"], resolved["budget"]["total"]) == (2, 44.0)


def test_numbers_and_switches_may_be_spelled_as_people_spell_them(invoke, folder, monkeypatch):
    monkeypatch.setattr(batchtune.api, "check", lambda *_, **__: {})  # what a dry run does in a child
    (folder / "config.yaml").write_text(
        "task: model.py\nlearning_rate: {min: 1e-5, max: 1}\nconfirm: off\nmemory: {limit: 2GiB}\nname: on\n"
    )
    resolved = yaml.safe_load(invoke("tune", "config.yaml", "--dry-run", "-q").stdout)
    assert resolved["learning_rate"] == {"min": 1e-5, "max": 1.0}
    assert resolved["confirm"]["seeds"] == 0
    assert resolved["memory"]["limit"] == 2 << 30
    assert resolved["name"] == "on"


# Command lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["probe", "nowhere.py"], "nowhere.py: no such task file; 'batchtune init' writes a template"),
        (["probe", "no where"], "'no where': neither a Python file nor a module"),
        (["probe", "model.py", "--min", 5, "--max", 3], "--min 5 is greater than --max 3; swap them or raise --max"),
        (["probe", "model.py", "--max", 2**31], "batchtune: --max 2147483648: must be at most 2147483647\n"),
        (["probe", "model.py", "--memory-limit", "3XB"], "'3XB' is not a size; write 20GiB, 24GB or 500MiB"),
        (["probe", "model.py", "--timeout", "soon"], "'soon' is not a duration"),
        (["probe", "model.py", "--margin", 2], "--margin 2.0: is a share: at least 0 and less than 1"),
        (["probe", "model.py", "--precision", "int3"], "Invalid value for '--precision'"),
        (["probe", "model.py", "--steps", "many"], "Invalid value for '--steps'"),
        (["probe"], "Missing argument 'TASK'"),
        (["brew"], "No such command 'brew'"),
        (["report", "nothing"], "nothing: no such result; run 'batchtune probe' or 'batchtune tune' first"),
        (["report", "other.json"], "other.json: not a batchtune result"),
        (["report", "broken.json"], "broken.json: not a JSON document"),
        (["report", "newer.json"], "newer.json: a newer batchtune wrote it (schema 2)"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(quick_cli, arguments, told):
    quick_cli.write("other.json", '{"schema": "something.else/1"}')
    quick_cli.write("broken.json", '{"schema": "batch')
    quick_cli.write("newer.json", '{"schema": "batchtune.result/2"}')
    quick_cli.write("model.py", "raise AssertionError('never imported')")
    answer = quick_cli(*arguments)
    assert answer.code == 2
    assert told in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("command", [["probe", "marking.py"], ["tune", "config.yaml"], ["report"], ["env"]])
@pytest.mark.parametrize("place", ["missing/out.json", ".", "/proc/nothing"])
def test_an_output_file_that_cannot_be_written_is_found_before_the_work_starts(quick_cli, command, place):
    quick_cli.write("marking.py", "open('imported', 'w')")
    quick_cli.write("config.yaml", "task: marking.py\n")
    answer = quick_cli(*command, "-o", place)
    assert answer.code == 2
    assert answer.err.startswith(f"batchtune: --output {place}: cannot be written: ")
    assert answer.err.endswith("; name a file elsewhere, or make room\n")
    assert not (quick_cli.folder / "imported").exists()
    assert not (quick_cli.folder / ".batchtune").exists()


def test_an_output_file_keeps_what_it_holds_until_there_is_a_result(quick_cli):
    kept = quick_cli.write("out.json", "precious")
    assert quick_cli("probe", "linear.py", "--device", "cuda:99", "-o", "out.json").code == 5
    assert kept.read_text() == "precious"


PROBE = ("probe", "task.py", "--memory-limit", "300MiB", "--max", 2, "--no-throughput", "--json", "-q")


# A run folder that is another's


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("learning_rate.max=0.5",), "measured with learning_rate.max = 1.0, now 0.5"),
        (("objective.kind=best_metric",), 'measured with objective.kind = "time_to_target", now "best_metric"'),
        (
            ("space.momentum.min=0.5", "space.momentum.max=0.9"),
            'measured with the arguments under space = [], now ["momentum"]',
        ),
        ((), "linear.py has changed since; results would mix. Put it back as it was; or use --fresh"),
    ],
)
def test_a_run_folder_of_another_configuration_is_refused_by_the_key_that_changed(tuned, quick_cli, change, key, dry):
    tuned.copy_to(quick_cli)
    if not change:
        quick_cli.write("linear.py", (quick_cli.folder / "linear.py").read_text() + "changed = True\n")
    before = {path.name: path.read_bytes() for path in quick_cli.run_folder().iterdir()}
    answer = quick_cli("tune", "config.yaml", *change, *dry)
    assert answer.code == 2
    assert key in answer.err
    assert "se --fresh to start over, or another 'name' to keep both" in answer.err
    assert len(answer.err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in quick_cli.run_folder().iterdir()} == before


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("device=cuda",), 5, "cuda"),
        (("--workers", "99"), 2, "99"),
        (("baseline.batch_size=9999",), 2, "9,999"),
        (("task=broken.py",), 3, "broken.py"),
    ],
)
def test_a_fresh_start_that_is_refused_takes_nothing_away(tuned, quick_cli, change, code, message):
    tuned.copy_to(quick_cli)
    quick_cli.write("broken.py", "raise RuntimeError('broken')")
    before = {path.name: path.read_bytes() for path in quick_cli.run_folder().iterdir()}
    answer = quick_cli("tune", "config.yaml", "--fresh", *change)
    assert (answer.code, message in answer.err) == (code, True), answer.err
    assert {path.name: path.read_bytes() for path in quick_cli.run_folder().iterdir()} == before


def test_a_damaged_line_of_a_study_is_told_by_its_number_and_a_damaged_result_can_be_left_out(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    result, journal = quick_cli.run_folder() / "result.json", quick_cli.run_folder() / "study.log"
    result.write_text("{")
    refused = quick_cli("tune", "config.yaml")
    assert (refused.code, "Without that file the study goes on with its trials" in refused.err) == (2, True)
    result.unlink()
    again = quick_cli("tune", "config.yaml", "--json", "-q")
    assert (again.code, len(again.document["trials"])) == (0, len(tuned.document["trials"])), again.err
    assert (again.document["prior"], again.document["probe"]) == (tuned.document["prior"], tuned.document["probe"])
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:4], "junk\n", *lines[5:]]))
    refused = quick_cli("tune", "config.yaml")
    assert refused.code == 2
    assert "study.log: line 5 is damaged; take the line away" in refused.err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_study_does_not_go_on_on_another_device(tuned, quick_cli, dry):
    tuned.copy_to(quick_cli)
    file = quick_cli.run_folder() / "identity.json"
    known = json.loads(file.read_text())
    assert known["the device"] == tuned.document["environment"]["device"]
    file.write_text(json.dumps(known | {"the device": "NVIDIA A100"}))
    result = (quick_cli.run_folder() / "result.json").read_bytes()
    answer = quick_cli("tune", "config.yaml", "baseline.learning_rate=0.01", *dry)
    assert answer.code == 2
    assert 'measured with the device = "NVIDIA A100", now ' in answer.err
    assert (quick_cli.run_folder() / "result.json").read_bytes() == result


def test_a_run_folder_of_a_newer_schema_is_refused_and_left_as_it_is(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    file = quick_cli.run_folder() / "result.json"
    file.write_text(file.read_text().replace("batchtune.result/1", "batchtune.result/2"))
    before = {path.name: path.read_bytes() for path in quick_cli.run_folder().iterdir()}
    for command in (("tune", "config.yaml"), ("report",)):
        answer = quick_cli(*command)
        assert answer.code == 2
        assert "a newer batchtune wrote it (schema 2)" in answer.err
    assert {path.name: path.read_bytes() for path in quick_cli.run_folder().iterdir()} == before


def test_a_run_folder_in_use_is_not_shared(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    first = RunFolder("config", quick_cli.folder / ".batchtune")
    first.open()
    second = quick_cli("tune", "config.yaml")
    first.close()
    assert second.code == 2
    assert f"process {os.getpid()} is running in it; wait, stop it, or choose another name" in second.err


# No space


def test_a_full_output_device_loses_nothing(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    answer = quick_cli("tune", "config.yaml", "-q", "-o", "/dev/full")
    assert answer.code == 2
    assert "--output /dev/full: cannot be written: No space left on device" in answer.err
    assert "train with" in answer.out  # shown, since it could not be written
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full", "2> >(head -1 >/dev/null)"])
def test_a_stderr_that_nobody_reads_costs_nobody_the_result(cli, lost):
    probing = shlex.join(
        [sys.executable, "-m", "batchtune", "probe", "linear.py", "--max", "8", "--no-throughput", "--json"]
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f"{probing} {lost}"]
    done = subprocess.run(command, cwd=cli.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["probe"]["max_batch_size"] == 8
    assert (cli.run_folder("probe-linear") / "result.json").read_text() == done.stdout


def test_a_full_disk_is_told_when_an_attempt_is_kept(tmp_path):
    folder = RunFolder("full", tmp_path)
    folder.open()
    (folder.path / "attempts.jsonl").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"attempts\.jsonl: cannot be written: No space left on device; make room"):
        folder.append_attempt(Attempt(batch_size=1, outcome="fit"))
    folder.close()


def test_a_probe_that_comes_to_nothing_leaves_an_earlier_one_as_it_was(quick_cli):
    quick_cli.write("task.py", (quick_cli.folder / "linear.py").read_text())
    before = quick_cli(*PROBE)
    assert before.code == 0, before.err
    kept = {path.name: path.read_bytes() for path in quick_cli.run_folder("probe-task").iterdir()}
    quick_cli.write("task.py", "def build_model(:\n")
    assert quick_cli(*PROBE).code == 3
    assert {path.name: path.read_bytes() for path in quick_cli.run_folder("probe-task").iterdir()} == kept


def test_a_full_disk_at_the_end_of_a_probe_shows_the_result_all_the_same(quick_cli, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("batchtune.run_folder.write_atomically", full)
    quick_cli.write("task.py", (quick_cli.folder / "linear.py").read_text())
    answer = quick_cli(*PROBE)
    assert answer.code == 2
    assert answer.err == (
        "batchtune: .batchtune/probe-task/result.json: cannot be written: No space left on device; "
        "make room and start again\n"
    )
    assert answer.document["probe"]["max_batch_size"] == 2


@contextlib.contextmanager
def no_file_larger_than(count):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_a_study_which_goes_on_when_there_is_room(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    before = len(tuned.document["trials"])
    journal = (quick_cli.run_folder() / "study.log").stat().st_size
    more = ("tune", "config.yaml", f"budget.trials={before + 2}", "confirm=off", "--json", "-q")
    with no_file_larger_than(journal + 4000):
        answer = quick_cli(*more)
    assert answer.code == 2, answer.err
    *warned, told = answer.err.splitlines()
    assert re.match("batchtune: .*File too large; make room and start again", told)
    assert all(line.startswith("batchtune: warning: report.html was not written: ") for line in warned)
    assert answer.document["status"] == "failed"
    assert answer.document["trials"][:before] == tuned.document["trials"]
    again = quick_cli(*more)
    assert again.code == 0, again.err
    assert again.document["status"] == "complete"
    assert again.document["trials"][:before] == tuned.document["trials"]

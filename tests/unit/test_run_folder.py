"""The run folder: who may write to it, and when it belongs to another run."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

from batchtune.document import Attempt, TaskInfo
from batchtune.errors import RunInterrupted, UsageError
from batchtune.result import Result, find_run, is_behind, latest_run, load_result, page_of, running_in
from batchtune.run_folder import RunFolder, probe_folder

RESULT = Result(kind="probe", status="complete", task=TaskInfo(path="model.py"))


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder("digits", tmp_path / "runs")
    folder.open()
    yield folder
    folder.close()


def test_it_is_made_with_the_folders_above_it(folder, tmp_path):
    assert folder.path == tmp_path / "runs" / "digits"
    assert folder.path.is_dir()


def test_a_second_run_in_it_is_refused_with_the_process_that_has_it(folder, tmp_path):
    with pytest.raises(UsageError, match=f"process {os.getpid()} is running in it; wait, stop it, or choose another"):
        RunFolder("digits", tmp_path / "runs").open()


def test_it_is_free_again_after_closing(folder, tmp_path):
    folder.close()
    folder.close()
    other = RunFolder("digits", tmp_path / "runs")
    other.open()
    other.close()


def test_what_a_killed_process_left_half_written_is_taken_away(folder, tmp_path):
    (folder.path / ".result.json.k1ll3d.tmp").write_text('{"schema": "batch')
    (folder.path / ".notes.tmp").write_text("mine")
    folder.close()
    again = RunFolder("digits", tmp_path / "runs")
    again.open()
    again.close()
    assert sorted(path.name for path in folder.path.iterdir()) == [".notes.tmp", "lock"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/digits: cannot be written: Not a directory"):
        RunFolder("digits", tmp_path / "file").open()


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("measures", [False, True])
def test_what_was_measured_before_a_fresh_start_goes_when_it_has_measured_and_nothing_else_does(
    folder, tmp_path, measures, is_killed
):
    folder.keep_identity({"task": "before"})
    folder.append_attempt(Attempt(batch_size=1, outcome="fit"))
    folder.write_result(RESULT)
    (folder.path / "notes.txt").write_text("mine")
    folder.close()
    kept = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    again = RunFolder("digits", tmp_path / "runs")
    again.open()
    again.set_aside()
    assert (again.identity(), again.has_result(), list(again.attempts())) == (None, False, [])
    again.write("config.yaml", "task: now\n")
    again.write_result(RESULT.model_copy(update={"status": "failed"}))
    if measures:
        again.keep_identity({"task": "now"})
    name = "digits"
    if is_killed:  # nobody closes it
        name = shutil.copytree(again.path, again.path.with_name("killed")).name
    again.close()
    after = RunFolder(name, tmp_path / "runs")
    after.open()
    if measures:
        assert (after.identity(), list(after.attempts())) == ({"task": "now"}, [])
        assert (after.path / "notes.txt").read_text() == "mine"
    after.close()
    assert measures or {path.name: path.read_bytes() for path in after.path.iterdir()} == kept
    assert not (after.path / ".earlier").exists()


def test_attempts_of_an_earlier_search_are_forgotten_and_its_result_is_not(folder):
    assert not folder.has_result()
    folder.append_attempt(Attempt(batch_size=1, outcome="fit"))
    folder.write_result(RESULT)
    folder.forget_attempts()
    folder.forget_attempts()
    assert list(folder.attempts()) == []
    assert folder.has_result()


class TestIdentity:
    def test_the_same_run_goes_on(self, folder):
        folder.check_identity({"seed": 0})
        folder.keep_identity({"batch_size.max": 32, "precision": ("bf16",)})
        for _ in range(2):
            folder.check_identity({"batch_size.max": 32, "precision": ("bf16",)})

    def test_nothing_is_refused_before_something_was_measured(self, folder):
        for seed in range(2):
            folder.check_identity({"seed": seed})
        assert folder.identity() is None

    def test_another_run_is_refused_naming_the_key_and_the_remedy(self, folder):
        folder.keep_identity({"seed": 0, "batch_size.max": 32})
        with pytest.raises(UsageError) as raised:
            folder.check_identity({"seed": 0, "batch_size.max": 64})
        assert "measured with batch_size.max = 32, now 64; results would mix" in str(raised.value)
        assert "--fresh" in str(raised.value)

    def test_a_refusal_changes_nothing(self, folder):
        folder.keep_identity({"seed": 0})
        for _ in range(2):
            with pytest.raises(UsageError):
                folder.check_identity({"seed": 1})
        folder.check_identity({"seed": 0})

    def test_keys_of_another_version_do_not_matter(self, folder):
        folder.keep_identity({"seed": 0, "old": 1})
        folder.check_identity({"seed": 0, "new": 2})

    def test_long_values_are_cut_in_the_message(self, folder):
        folder.keep_identity({"task": "a" * 500})
        with pytest.raises(UsageError) as raised:
            folder.check_identity({"task": "b" * 500})
        assert len(str(raised.value)) < 400

    def test_a_damaged_file_is_no_identity(self, folder):
        (folder.path / "identity.json").write_text("{")
        assert folder.identity() == {}
        with pytest.raises(UsageError, match=r"identity\.json is damaged, .* start over with --fresh"):
            folder.check_identity({"seed": 0})
        folder.keep_identity({"seed": 0})
        assert folder.identity() == {"seed": 0}


class TestAttempts:
    def test_they_come_back_in_order_with_what_was_said_about_them(self, folder):
        for size in (1, 2):
            folder.append_attempt(Attempt(batch_size=size, outcome="fit"), precision="bf16")
        assert [(each["batch_size"], each["precision"]) for each in folder.attempts()] == [(1, "bf16"), (2, "bf16")]
        assert Attempt.model_validate(next(folder.attempts())).fits

    def test_a_line_cut_off_by_a_crash_is_passed_over(self, folder):
        folder.append_attempt(Attempt(batch_size=1, outcome="fit"))
        with (folder.path / "attempts.jsonl").open("ab") as stream:
            stream.write(b'{"batch_size": 2, "outc\xff\n3\n')
        folder.append_attempt(Attempt(batch_size=4, outcome="oom"))
        assert [each["batch_size"] for each in folder.attempts()] == [1, 4]

    @pytest.mark.parametrize("line", ["{}", '{"batch_size": 0, "outcome": "fit"}', "[" * 100_000, '{"outcome": "fit"}'])
    def test_a_line_that_is_no_attempt_is_passed_over(self, folder, line):
        (folder.path / "attempts.jsonl").write_text(line + "\n")
        assert list(folder.attempts()) == []

    @pytest.mark.parametrize("tail", [b'{"batch_size": 2, "outc', b"\x00\x00\x00", b'{"half": \n'])
    def test_an_attempt_after_a_crash_is_not_added_to_half_a_line(self, folder, tmp_path, tail):
        folder.append_attempt(Attempt(batch_size=1, outcome="fit"))
        folder.close()
        with (folder.path / "attempts.jsonl").open("ab") as stream:
            stream.write(tail)
        again = RunFolder("digits", tmp_path / "runs")
        again.open()
        again.append_attempt(Attempt(batch_size=4, outcome="oom"))
        again.close()
        assert [each["batch_size"] for each in again.attempts()] == [1, 4]
        assert tail not in (folder.path / "attempts.jsonl").read_bytes()

    def test_there_are_none_in_a_new_folder(self, folder):
        assert list(folder.attempts()) == []


def test_a_result_is_read_back_from_the_folder(folder):
    folder.write_result(RESULT)
    assert load_result(folder.path) == RESULT


def test_a_full_disk_is_told_in_one_line(folder, monkeypatch):
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UsageError, match=r"result.json: cannot be written: No space left on device; "):
        folder.write_result(RESULT)


def test_a_full_disk_does_not_keep_a_folder_from_being_closed(folder, tmp_path, monkeypatch):
    folder.close()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    again = RunFolder("digits", tmp_path / "runs")
    with monkeypatch.context() as now:
        now.setattr(os, "write", no_space)
        again.open()
        with pytest.raises(UsageError, match="process unknown is running in it"):
            RunFolder("digits", tmp_path / "runs").open()
        again.close()


def test_ctrl_c_while_the_report_is_drawn_costs_nobody_the_result(folder, tmp_path, monkeypatch):
    def interrupt(_result: Result) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("batchtune.report.formats.to_html", interrupt)
    folder.write_result(RESULT)
    with pytest.raises(RunInterrupted, match="the result is saved, and 'batchtune report' draws its page") as raised:
        folder.close()
    assert raised.value.result == RESULT
    again = RunFolder("digits", tmp_path / "runs")
    again.open()  # nobody holds it any more
    again.close()
    assert {path.name for path in folder.path.iterdir()} == {"lock", "result.json"}


def test_the_latest_run_is_the_one_whose_result_is_newest(tmp_path):
    for age, name in ((30, "a"), (10, "b"), (20, "c")):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "result.json"
        file.write_text("{}")
        os.utime(file, (1e9 - age, 1e9 - age))
    assert latest_run(tmp_path) == tmp_path / "b"


def test_without_a_run_the_commands_that_make_one_are_named(tmp_path):
    with pytest.raises(UsageError, match="run 'batchtune probe' or 'batchtune tune' first"):
        latest_run(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "../../runs/../secret", "digits/../../secret"])
def test_a_run_s_name_does_not_lead_out_of_the_folder_of_runs(tmp_path, name):
    for place in ("runs/digits", "secret"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "result.json").write_text(RESULT.to_json())
    assert find_run("digits", tmp_path / "runs") == tmp_path / "runs" / "digits"
    assert find_run(name, tmp_path / "runs") == Path(name)  # a path as any other, from the current folder


def test_what_a_run_leaves_is_as_private_as_the_umask_has_it(tmp_path):
    before = os.umask(0o077)
    try:
        folder = RunFolder("digits", tmp_path / "runs")
        folder.open()
        folder.append_attempt(Attempt(batch_size=1, outcome="fit"))
        folder.keep_identity({"seed": 0})
        folder.write_result(RESULT)
        folder.close()
    finally:
        os.umask(before)
    left = [path for path in (tmp_path / "runs").rglob("*") if path.stat().st_mode & 0o077]
    assert left == []
    assert {path.name for path in folder.path.iterdir()} >= {"attempts.jsonl", "identity.json", "result.json", "lock"}


def test_a_result_that_a_killed_study_has_left_behind_is_known_by_its_journal(folder):
    folder.write_result(RESULT)
    assert not is_behind(folder.path)
    journal = folder.path / "study.log"
    journal.touch()
    assert not is_behind(folder.path)
    later = (folder.path / "result.json").stat().st_mtime + 5
    os.utime(journal, (later, later))
    assert is_behind(folder.path)
    assert not is_behind(folder.path / "result.json")


def test_a_run_that_came_to_nothing_leaves_nothing(tmp_path):
    folder = RunFolder("digits", tmp_path / "runs")
    folder.open()
    folder.close()
    assert not folder.path.exists()


def kept(root, name, **changes):
    folder = RunFolder(name, root)
    folder.open()
    folder.write_result(RESULT.model_copy(update=changes))
    folder.close()
    return folder.path


def test_a_run_that_failed_is_not_the_latest_where_another_did_not(tmp_path):
    good, bad = kept(tmp_path, "good"), kept(tmp_path, "bad", status="failed")
    os.utime(good / "result.json", (1e9, 1e9))
    assert latest_run(tmp_path) == good
    (good / "result.json").unlink()
    assert latest_run(tmp_path) == bad


def test_another_task_of_the_same_name_has_a_folder_of_its_own(tmp_path):
    assert probe_folder("probe-model", "model.py", tmp_path).path.name == "probe-model"
    kept(tmp_path, "probe-model")
    assert probe_folder("probe-model", "model.py", tmp_path).path.name == "probe-model"
    other = probe_folder("probe-model", "other/model.py", tmp_path)
    assert other.path.name == "probe-model-other"
    kept(tmp_path, "probe-model-other", task=TaskInfo(path="other/model.py"))
    assert probe_folder("probe-model", "other/model.py", tmp_path).path == other.path
    third = probe_folder("probe-model", "third/other/model.py", tmp_path)
    assert third.path.name not in {"probe-model", "probe-model-other"}


def test_a_task_whose_name_the_locale_cannot_read_has_a_folder(tmp_path):
    name = "modell_ä.py".encode().decode("ascii", "surrogateescape")  # an argument under LC_ALL=C
    assert probe_folder("probe-model", name, tmp_path).path.name == "probe-model"


def test_a_folder_tells_which_process_is_running_in_it(folder):
    assert running_in(folder.path) == str(os.getpid())
    folder.close()
    assert running_in(folder.path) is None
    assert running_in(folder.path / "result.json") is None


def test_a_name_that_is_no_run_is_told_those_that_are(tmp_path):
    for name in ("digits", "charlm"):
        kept(tmp_path, name)
    with pytest.raises(UsageError, match="digit: no such run; did you mean 'digits'"):
        find_run("digit", tmp_path)
    with pytest.raises(UsageError, match="nope: no such run; there are charlm, digits"):
        find_run("nope", tmp_path)
    with pytest.raises(UsageError, match=r"^my digits: no such run; did you mean 'digits'"):
        find_run("my digits", tmp_path)


def test_a_run_that_is_at_work_and_has_no_result_yet_is_told_from_one_that_is_not_there(folder):
    with pytest.raises(UsageError, match=rf"^digits: process {os.getpid()} is at work on it, and it has no result yet"):
        find_run("digits", folder.path.parent)


class Clock:
    """The time of a test, in which drawing a page takes as long as it says."""

    def __init__(self, drawing=0.0):
        self.now, self.drawing = 100.0, drawing

    def monotonic(self):
        return self.now

    thread_time = monotonic

    def document(self):
        self.now += self.drawing
        return result("interrupted")


def result(status):
    return Result(kind="probe", status=status, name="watched", task=TaskInfo(path="model.py"))


@pytest.fixture
def watched(tmp_path, monkeypatch):
    def opened(drawing=0.0):
        clock = Clock(drawing)
        monkeypatch.setattr("batchtune.run_folder.time", clock)
        folder = RunFolder("watched", tmp_path)
        folder.open()
        return clock, folder, folder.path / "report.html"

    return opened


def test_the_page_of_a_run_says_where_it_stands_and_refreshes_itself_until_the_end(watched):
    clock, folder, page = watched()
    folder.show(clock.document, "3 runs done")
    assert not page.exists()  # who runs for a moment draws one page, at the end
    clock.now += 5
    folder.show(clock.document, "4 runs done, at most 2 min left")
    shown = page.read_text(encoding="utf-8")
    assert 'data-refresh="5"' in shown
    assert "<strong>running</strong> – 4 runs done, at most 2 min left" in shown
    folder.write_result(result("complete"))
    folder.close()
    assert "data-refresh=" not in page.read_text(encoding="utf-8")
    assert "running" not in page.read_text(encoding="utf-8").partition("<main>")[2]


@pytest.mark.parametrize(("drawing", "most"), [(0.01, 60), (0.1, 16), (2.0, 2)])
def test_pages_of_a_run_take_a_hundredth_of_its_time_at_most(watched, drawing, most):
    clock, folder, _ = watched(drawing)
    drawn = []
    for _ in range(300):
        clock.now += 1
        folder.show(lambda: drawn.append(clock.now) or clock.document(), "on its way")
    assert 1 <= len(drawn) <= most
    assert len(drawn) * drawing <= max(0.01 * 300, 2 * drawing)
    assert all(later - sooner >= 5 for sooner, later in itertools.pairwise(drawn))
    folder.close()


def test_a_run_that_came_to_nothing_gives_the_earlier_one_its_page_back(watched):
    clock, folder, page = watched()
    folder.write_result(result("complete"))
    folder.close()
    folder.open()
    clock.now += 5
    folder.show(clock.document, "tried batch 8")
    assert "running" in page.read_text(encoding="utf-8").partition("<main>")[2]
    folder.close()
    assert "running" not in page.read_text(encoding="utf-8").partition("<main>")[2]


def test_a_page_that_cannot_be_drawn_does_not_stop_the_run(watched):
    clock, folder, page = watched()
    clock.now += 5
    folder.show(lambda: 1 / 0, "tried batch 8")
    folder.close()
    assert not page.exists()


def test_the_page_of_a_result_is_that_of_the_run_that_has_it(tmp_path):
    older, newer = (Result(kind="probe", status="complete", task=TaskInfo(path="a.py"), created_at=f"2026-01-0{day}")
                    for day in (1, 2))  # fmt: skip
    assert page_of(newer, tmp_path) is None
    for name, result in (("probe-a", older), ("probe-b", newer)):
        folder = RunFolder(name, tmp_path)
        folder.open()
        folder.write_result(result)
        folder.close()
    assert page_of(older, tmp_path) == tmp_path / "probe-a" / "report.html"
    assert page_of(newer, tmp_path) == tmp_path / "probe-b" / "report.html"
    (tmp_path / "probe-b" / "report.html").unlink()
    assert page_of(newer, tmp_path) is None


def test_the_page_opens_in_the_browser_where_that_is_asked_for_and_never_fails_a_command(tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    folder = RunFolder("probe-a")
    folder.open()
    folder.write_result(RESULT)
    folder.close()
    page = tmp_path / ".batchtune" / "probe-a" / "report.html"
    shown = invoke("report", "--open")
    assert (shown.exit_code, opened) == (0, [page.as_uri()])
    assert shown.stdout.splitlines()[-1] == "page: .batchtune/probe-a/report.html (--open shows it)"
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert invoke("report", "--open").stderr.startswith("batchtune: note: no browser could be started: open .batchtune")
    page.unlink()
    shown = invoke("report", "--open")
    assert (shown.exit_code, len(opened)) == (0, 1)
    assert "no page to open: --format html -o report.html writes one" in shown.stderr

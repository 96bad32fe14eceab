"""A whole run of `tune`: what its document holds once all is done, and how one ends that is interrupted."""

import time
from types import SimpleNamespace

import documents
import pytest

from batchtune.config.schema import Config
from batchtune.document import ProbeResult
from batchtune.errors import NothingFitsError, RunInterrupted, UsageError
from batchtune.observer import Observer
from batchtune.run_folder import RunFolder
from batchtune.session import Session
from batchtune.tune import run
from batchtune.tune.plan import configure as plan
from batchtune.tune.progress import Progress
from batchtune.tune.run import run_and_save


class Stopped:
    """A tuning that is stopped by an error, perhaps on top of an interruption."""

    def __init__(self, folder, error, *, interrupted):
        self.folder, self.study = SimpleNamespace(path=folder), None
        self.error, self.interrupted, self.statuses = error, interrupted, []

    def run(self):
        try:
            if self.interrupted:
                raise KeyboardInterrupt
        finally:
            if self.error is not None:
                raise self.error

    def save_if_possible(self, status, _error):
        self.statuses.append(status)


def test_the_budget_counts_from_before_a_child_looks_at_what_the_task_trains_with_today(monkeypatch, tmp_path):
    looked = []
    monkeypatch.setattr(run, "configure", lambda *_: looked.append(time.perf_counter()))
    monkeypatch.setattr(run, "run_tune", lambda *_, began, **__: began)
    given = {"fresh": False, "observer": Observer(), "root": tmp_path, "warm_start": None}
    assert run.configure_and_run("model.py", {}, None, **given) < looked[0]


def test_so_it_does_for_the_command_whose_first_look_at_the_task_comes_before_all_else(monkeypatch, invoke):
    looked, counted = [], []
    given = Config(task="model.py", name="law", baseline={"batch_size": 8, "learning_rate": 1e-3})
    monkeypatch.setattr(plan, "configure", lambda *_: looked.append(time.perf_counter()) or given)
    monkeypatch.setattr(run, "run_tune", lambda *_, began, **__: counted.append(began))
    monkeypatch.setattr(Session, "deliver", lambda *_, **__: None)
    ended = invoke("tune", "model.py", "--budget", "1m")
    assert ended.exit_code == 0
    assert counted[0] < looked[0]


def test_a_probe_whose_steps_were_still_being_timed_times_all_of_them_again(tmp_path):
    (tmp_path / "model.py").write_text("")
    config = Config(task=str(tmp_path / "model.py"), baseline={"batch_size": 8, "learning_rate": 1e-3})
    progress, folder = Progress(config, RunFolder("law", tmp_path), 0.0), RunFolder("law", tmp_path)
    folder.open()
    found = ProbeResult.model_validate(documents.probed())
    progress.probing = SimpleNamespace(result=lambda: found)
    for known in (None, found):  # until it has come to its end, and then
        progress.probe = known
        progress.save("interrupted")
        later = Progress(config, folder, 0.0)
        later.load_earlier()
        assert later.earlier_probe() == known
    folder.close()


@pytest.mark.parametrize(
    ("error", "interrupted", "ending", "status"),
    [
        (None, True, RunInterrupted, "interrupted"),
        (FileNotFoundError(2, "the lock is gone"), True, RunInterrupted, "interrupted"),
        (RuntimeError("did not possess lock"), True, RunInterrupted, "interrupted"),
        (AssertionError(), True, RunInterrupted, "interrupted"),
        (OSError(28, "No space left on device"), False, UsageError, "failed"),
    ],
)
def test_an_interruption_is_one_whatever_a_lock_that_it_hits_raises_on_top(
    error, interrupted, ending, status, tmp_path
):
    tuning = Stopped(tmp_path, error, interrupted=interrupted)
    with pytest.raises(ending):
        run_and_save(tuning.run, tuning)
    assert tuning.statuses == [status]


def test_a_lock_that_cannot_be_taken_says_what_came_first(tmp_path):
    error = RuntimeError("did not possess lock")
    error.__context__ = FileNotFoundError(2, "No such file or directory")  # in giving back what was not taken
    error.__context__.__context__ = OSError(30, "Read-only file system")
    stopped = Stopped(tmp_path, error, interrupted=False)
    with pytest.raises(UsageError, match="the study cannot go on: Read-only file system; make room and start again"):
        run_and_save(stopped.run, stopped)


def test_where_nothing_fits_the_keys_of_the_configuration_are_named(tmp_path):
    stopped = Stopped(tmp_path, NothingFitsError("nothing fits; a larger --memory-limit"), interrupted=False)
    with pytest.raises(NothingFitsError, match=r"^nothing fits; a larger memory\.limit$"):
        run_and_save(stopped.run, stopped)
    assert stopped.statuses == ["failed"]


def test_an_error_of_ours_stays_one(tmp_path):
    stopped = Stopped(tmp_path, RuntimeError("ours"), interrupted=False)
    with pytest.raises(RuntimeError, match="ours"):
        run_and_save(stopped.run, stopped)


def test_an_error_of_ours_on_top_of_a_missing_file_stays_one(tmp_path):
    error = ValueError("ours")
    error.__context__ = FileNotFoundError(2, "No such file or directory")
    stopped = Stopped(tmp_path, error, interrupted=False)
    with pytest.raises(ValueError, match="ours"):
        run_and_save(stopped.run, stopped)

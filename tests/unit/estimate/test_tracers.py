"""Children that trace, by what their parent makes of them: one that is killed, and how far all of them are."""

import threading

import pytest

from batchtune.errors import DeviceError, UserCodeError
from batchtune.estimate import tracers
from batchtune.estimate.tracers import Answered, ask_tracers
from batchtune.observer import Observer
from batchtune.processes.worker import WorkerDied

KILLED = WorkerDied("crash", "killed by the host's out-of-memory killer", from_outside=True)
CRASHED = WorkerDied("crash", "the process died by SIGSEGV")


class Told(Observer):
    def __init__(self):
        self.notes, self.shares, self.looked = [], [], threading.Event()

    def note(self, text):
        self.notes.append(text)

    def progress(self, share, seconds, limit_seconds):
        self.shares.append(share)
        self.looked.set()


def traced(*ends):
    """One job whose children come to these ends, one after the other."""
    left, told = list(ends), Told()

    def answer(_worker, _job):
        end = left.pop(0)
        if isinstance(end, WorkerDied):
            raise end
        return end

    return told, lambda: ask_tracers(["bf16"], answer, told, seconds=60.0)


def test_one_that_something_else_has_ended_is_tried_again():
    done = Answered(None)
    told, ask = traced(KILLED, done)
    assert ask() == {"bf16": done}
    assert told.notes == [f"tracing at bf16 is tried again: {KILLED}"]


def test_ended_twice_it_is_the_machines_fault_and_said_so():
    _, ask = traced(KILLED, KILLED)
    with pytest.raises(DeviceError, match="tracing at bf16 was ended twice by something else: killed by the host"):
        ask()


def test_what_ends_by_itself_is_the_tasks_fault():
    _, ask = traced(CRASHED, Answered(None))
    with pytest.raises(UserCodeError, match="tracing at bf16 ended in crash: the process died by SIGSEGV"):
        ask()


def test_what_is_done_never_becomes_less_nor_all_as_long_as_one_is_at_work(monkeypatch):
    monkeypatch.setattr(tracers, "_LOOK_SECONDS", 0.005)
    told = Told()

    def answer(worker, _job):
        for share in (0.3, 1.0, 0.1, 0.6):  # it was asked for something else after that
            worker._progress(share)
            told.looked.clear()
            assert told.looked.wait(10)
        return Answered(None)

    ask_tracers(["bf16"], answer, told, seconds=60.0)
    assert told.shares == sorted(told.shares)
    assert max(told.shares) == 0.99

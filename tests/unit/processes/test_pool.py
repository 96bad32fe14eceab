"""Workers side by side: how they share processors and work, and how they stop together."""

import threading
import time

import pytest
from fakes import opened

from batchtune.errors import DeviceError, RunInterrupted
from batchtune.observer import Observer
from batchtune.processes import pool as crew_module
from batchtune.processes.pool import Crew, Member
from batchtune.protocol.commands import Describe, OpenTask

SETTINGS = OpenTask(task="never.py", memory_limit=1 << 20)
OPENED = opened(environment={"device": "a processor"})


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(crew_module, "processors", lambda: 8)
    with Crew(SETTINGS, 3, Observer()) as crew:
        crew.grow(OPENED)
        yield crew


def test_a_member_that_waits_for_its_device_stops_with_the_others(monkeypatch):
    stopping = threading.Event()
    member = Member(OpenTask(task="model.py"), stopping, {}, Observer())
    member.opened = opened(device="cuda:0")

    def busy():
        stopping.set()  # another one has failed meanwhile
        raise DeviceError("--device cuda: cannot be used now")

    monkeypatch.setattr(member, "_open", busy)
    with pytest.raises(RunInterrupted):
        member.start()


def test_a_member_on_another_kind_of_device_is_refused(crew, monkeypatch):
    def start_on(name):
        second = crew._all[1]
        second.opened = opened(device="cuda:1", environment={"device": name})
        monkeypatch.setattr(second, "_process", object())
        return second.start()

    assert start_on("a processor").device == "cuda:1"
    with pytest.raises(DeviceError, match=r"workers: device cuda:1 is a T4, but the study is of a processor.*--fresh"):
        start_on("T4")
    monkeypatch.setattr(crew._all[1], "_process", None)


class TestThreads:
    def test_on_the_cpu_all_workers_have_their_share_of_the_threads(self, crew):
        assert len(crew) == 3
        assert {worker._environment()["OMP_NUM_THREADS"] for worker in crew._all} == {"2"}

    def test_one_worker_is_left_as_it_is(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        crew = Crew(SETTINGS, "auto", Observer())
        crew.grow(OPENED)
        assert len(crew) == 1
        assert crew.first._environment()["OMP_NUM_THREADS"] == "5"


class TestWork:
    def test_all_work_at_once_until_there_is_nothing_left(self, crew):
        together, left, seen = threading.Barrier(3, timeout=10), [9], []

        def step(worker):
            with crew.lock:
                left[0] -= 1
                if left[0] < 0:
                    return False
                seen.append(worker)
            together.wait()  # nobody gets past it alone
            return True

        crew.work(step)
        assert len(seen) == 9
        assert set(seen) == set(crew._all)

    def test_what_one_raises_stops_all(self, crew):
        def step(worker):
            if worker is crew.first:
                raise ValueError("enough")
            time.sleep(0.01)
            return True

        with pytest.raises(ValueError, match="enough"):
            crew.work(step)


class TestWarmingUp:
    @pytest.fixture
    def started(self, crew, monkeypatch):
        """The workers whose start has begun; it ends when the event is set."""
        begun, go_on = [], threading.Event()

        def start(worker):
            begun.append(worker)
            assert go_on.wait(10)
            raise DeviceError("busy")

        monkeypatch.setattr(crew_module.Member, "start", start)
        crew.warm_up()
        yield begun, go_on
        go_on.set()

    def test_the_others_start_at_once_and_the_first_has_long_started(self, crew, started):
        deadline = time.monotonic() + 10
        while len(started[0]) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(started[0]) == set(crew._all[1:])

    def test_whoever_has_work_for_one_waits_for_it_and_learns_what_is_wrong(self, crew, started):
        begun, go_on = started
        threading.Timer(0.3, go_on.set).start()
        with pytest.raises(DeviceError, match="busy"):
            crew._all[1].call(Describe(device="cpu"), timeout=1)
        assert go_on.is_set()
        assert begun.count(crew._all[1]) == 2  # in the background, and for the work

    def test_without_work_nobody_waits(self, crew, started):
        crew.work(lambda _worker: False)
        assert not started[1].is_set()

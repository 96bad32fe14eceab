"""Workers side by side: how they share processors and work, and how they stop together."""

import threading
import time

import pytest
from fakes import opened

from batchtune.errors import DeviceError, RunInterrupted
from batchtune.observer import Observer
from batchtune.processes import pool as pool_module
from batchtune.processes.pool import PoolWorker, WorkerPool
from batchtune.protocol.commands import Describe, OpenTask

SETTINGS = OpenTask(task="never.py", memory_limit=1 << 20)
OPENED = opened(environment={"device": "a processor"})


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(pool_module, "processors", lambda: 8)
    with WorkerPool(SETTINGS, 3, Observer()) as pool:
        pool.grow(OPENED)
        yield pool


def test_a_member_that_waits_for_its_device_stops_with_the_others(monkeypatch):
    stopping = threading.Event()
    worker = PoolWorker(OpenTask(task="model.py"), stopping, {}, Observer())
    worker.opened = opened(device="cuda:0")

    def busy():
        stopping.set()  # another one has failed meanwhile
        raise DeviceError("--device cuda: cannot be used now")

    monkeypatch.setattr(worker, "_open", busy)
    with pytest.raises(RunInterrupted):
        worker.start()


def test_a_worker_on_another_kind_of_device_is_refused(pool, monkeypatch):
    def start_on(name):
        second = pool._all[1]
        second.opened = opened(device="cuda:1", environment={"device": name})
        monkeypatch.setattr(second, "_process", object())
        return second.start()

    assert start_on("a processor").device == "cuda:1"
    with pytest.raises(DeviceError, match=r"workers: device cuda:1 is a T4, but the study is of a processor.*--fresh"):
        start_on("T4")
    monkeypatch.setattr(pool._all[1], "_process", None)


class TestThreads:
    def test_on_the_cpu_all_workers_have_their_share_of_the_threads(self, pool):
        assert len(pool) == 3
        assert {worker._environment()["OMP_NUM_THREADS"] for worker in pool._all} == {"2"}

    def test_one_worker_is_left_as_it_is(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        pool = WorkerPool(SETTINGS, "auto", Observer())
        pool.grow(OPENED)
        assert len(pool) == 1
        assert pool.first._environment()["OMP_NUM_THREADS"] == "5"


class TestWork:
    def test_all_work_at_once_until_there_is_nothing_left(self, pool):
        together, left, seen = threading.Barrier(3, timeout=10), [9], []

        def step(worker):
            with pool.lock:
                left[0] -= 1
                if left[0] < 0:
                    return False
                seen.append(worker)
            together.wait()  # nobody gets past it alone
            return True

        pool.work(step)
        assert len(seen) == 9
        assert set(seen) == set(pool._all)

    def test_what_one_raises_stops_all(self, pool):
        def step(worker):
            if worker is pool.first:
                raise ValueError("enough")
            time.sleep(0.01)
            return True

        with pytest.raises(ValueError, match="enough"):
            pool.work(step)


class TestWarmingUp:
    @pytest.fixture
    def started(self, pool, monkeypatch):
        """The workers whose start has begun; it ends when the event is set."""
        begun, go_on = [], threading.Event()

        def start(worker):
            begun.append(worker)
            assert go_on.wait(10)
            raise DeviceError("busy")

        monkeypatch.setattr(pool_module.PoolWorker, "start", start)
        pool.warm_up()
        yield begun, go_on
        go_on.set()

    def test_the_others_start_at_once_and_the_first_has_long_started(self, pool, started):
        deadline = time.monotonic() + 10
        while len(started[0]) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(started[0]) == set(pool._all[1:])

    def test_whoever_has_work_for_one_waits_for_it_and_learns_what_is_wrong(self, pool, started):
        begun, go_on = started
        threading.Timer(0.3, go_on.set).start()
        with pytest.raises(DeviceError, match="busy"):
            pool._all[1].call(Describe(device="cpu"), timeout=1)
        assert go_on.is_set()
        assert begun.count(pool._all[1]) == 2  # in the background, and for the work

    def test_without_work_nobody_waits(self, pool, started):
        pool.work(lambda _worker: False)
        assert not started[1].is_set()

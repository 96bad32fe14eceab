"""Workers side by side: how they share processors and work, and how they stop together."""

import threading
import time
from typing import ClassVar

import pytest
from fakes import ScriptedLauncher, opened, refusal

from batchtune.errors import DeviceError
from batchtune.observer import Observer
from batchtune.processes import pool as pool_module
from batchtune.processes.pool import WorkerPool
from batchtune.protocol.commands import Describe, OpenTask

SETTINGS = OpenTask(task="never.py", memory_limit=1 << 20)
OPENED = opened(environment={"device": "a processor"})


class RecordingLauncher(ScriptedLauncher):
    """In the place of children on this machine: those have an answer each, and an environment."""

    made: ClassVar[list] = []

    def __init__(self, echo=None, environment=None):
        super().__init__(*[{"done": OPENED.model_dump()}] * 9)
        self.environment = environment
        self.made.append(self)


@pytest.fixture
def launchers(monkeypatch):
    monkeypatch.setattr(RecordingLauncher, "made", [])
    monkeypatch.setattr(pool_module, "LocalLauncher", RecordingLauncher)
    monkeypatch.setattr(pool_module, "processors", lambda: 8)
    return RecordingLauncher.made


@pytest.fixture
def pool(launchers):
    with WorkerPool(SETTINGS, 3, Observer()) as pool:
        pool.grow(OPENED)
        yield pool


def all_of(pool):
    """Its workers, as they come to work."""
    found, lock = [], threading.Barrier(len(pool), timeout=10)

    def step(worker):
        found.append(worker)
        lock.wait()
        return False

    pool.work(step)
    return found


class TestThreads:
    def test_on_the_cpu_all_workers_have_their_share_of_the_threads(self, pool, launchers):
        assert len(pool) == 3
        assert [launcher.environment["OMP_NUM_THREADS"] for launcher in launchers] == ["2"] * 3

    def test_one_worker_is_left_as_it_is(self, launchers):
        pool = WorkerPool(SETTINGS, "auto", Observer())
        pool.grow(OPENED)
        assert len(pool) == 1
        assert [launcher.environment for launcher in launchers] == [{}]


def test_only_the_others_are_held_to_the_kind_of_device_of_the_first(pool):
    wanted = {worker is pool.first: worker.settings.device_name for worker in all_of(pool)}
    assert wanted == {True: None, False: "a processor"}


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
        assert len(set(seen)) == 3

    def test_what_one_raises_stops_all(self, pool):
        def step(worker):
            if worker is pool.first:
                raise ValueError("enough")
            time.sleep(0.01)
            return True

        with pytest.raises(ValueError, match="enough"):
            pool.work(step)


def test_what_any_one_can_do_does_not_wait_for_a_worker_that_cannot_work(launchers):
    class FirstIsGone(WorkerPool):
        """As where the node of the first worker was lost."""

        def _step(self, step, worker):
            return super()._step(step, self.others[0] if worker is self.first else worker)

    with FirstIsGone(SETTINGS, 2, Observer()) as pool:
        pool.grow(OPENED)
        pool.others = all_of(WorkerPool(SETTINGS, 1, Observer()))
        assert pool.any_one(lambda worker: (worker, worker is pool.first)) == (pool.others[0], False)


class TestWarmingUp:
    @pytest.fixture
    def go_on(self, launchers, pool):
        """Children answer once this is set: that their device is busy."""
        event = threading.Event()

        def busy():
            assert event.wait(10)
            return refusal(DeviceError("busy"))

        for launcher in launchers:
            launcher.answers[:] = [busy] * 9
        pool.warm_up()
        yield event
        event.set()

    def wait_for(self, launchers, count):
        deadline = time.monotonic() + 10
        while sum(len(launcher.started) for launcher in launchers) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    def test_the_others_start_at_once_and_the_first_has_long_started(self, launchers, go_on):
        self.wait_for(launchers, 2)
        assert [len(launcher.started) for launcher in launchers] == [0, 1, 1]

    def test_whoever_has_work_for_one_waits_for_it_and_learns_what_is_wrong(self, pool, launchers, go_on):
        self.wait_for(launchers, 2)
        threading.Timer(0.3, go_on.set).start()

        def step(worker):
            if worker is pool.first:
                return False
            return worker.call(Describe(device="cpu"), timeout=1) is not None

        with pytest.raises(DeviceError, match="busy"):
            pool.work(step)
        assert go_on.is_set()
        assert max(len(launcher.started) for launcher in launchers) == 2  # in the background, and for the work

    def test_without_work_nobody_waits(self, pool, go_on):
        pool.work(lambda _worker: False)
        assert not go_on.is_set()

"""Real child processes, and what users' code does to them.

Starting a child takes seconds (it imports torch), so that all but those of `tests/process/test_cli.py` are forks of one
that has done so.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fixtures.children import Recorded
from fixtures.waiting import wait_until

from batchtune.document import CurvePoint
from batchtune.errors import DeviceError, UsageError, UserCodeError
from batchtune.processes.local import LocalLauncher, LocalProcess, is_of_a_child
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Describe, OpenTask, Train, TryBatchSize
from batchtune.protocol.messages import RunEnd, RunSpec

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
LIMIT = 400 * MIB
ROW_BYTES = (1 << 14) * 4
TASK = '''
"""Some sizes of batch have a fate of their own; all others only take memory."""
import os, signal, subprocess, sys, time
import torch
from torch import nn

WIDTH = 1 << 14
grandchildren = []

def build_model():
    return nn.Linear(WIDTH, 4)

def make_batch(batch_size):
    return torch.ones(batch_size, WIDTH)

def train_dataset():
    return [torch.ones(WIDTH)] * 40

def evaluate(model):
    return {"val_loss": float(model(torch.ones(1, WIDTH)).square().mean())}

def compute_loss(model, batch):
    if len(batch) in FATES:
        FATES[len(batch)]()
    return model(batch).square().mean()

def die_by(number):
    return lambda: os.kill(os.getpid(), number)

def leave():
    print("I have had enough", flush=True)
    os._exit(3)

def hang():
    time.sleep(600)

def die_and_leave_a_child():
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSEGV)

def flood():
    for _ in range(50):
        sys.stdout.write("x" * (1 << 20))
    print()
    for _ in range(20_000):
        print("line after line")

def close_everything():
    sys.stdin.close()
    sys.stdout.close()

def wander():
    os.chdir("/")

def replace_stdout():
    sys.stdout = None

def claim_memory(*_):
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

def bear():
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    grandchildren.append(subprocess.Popen(sleeping))
    print("grandchild", grandchildren[-1].pid)

FATES = {
    11: die_by(signal.SIGSEGV), 12: die_by(signal.SIGKILL), 13: die_by(signal.SIGRTMIN + 5), 14: leave, 15: hang,
    16: lambda: os._exit(0), 17: die_and_leave_a_child,
    21: flood, 22: close_everything, 23: wander, 24: replace_stdout, 25: claim_memory, 26: bear,
}
'''
FULL = """
import torch
from batchtune.device.host_memory import HostMemory

def full(*_):
    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')

HostMemory.enforce = full
"""
SEGFAULT, KILL, REAL_TIME, EXIT, HANG, QUIET_EXIT, ORPHAN = range(11, 18)
FLOOD, CLOSE, WANDER, NO_STDOUT, CLAIM, BEAR = range(21, 27)
PLAIN = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> OpenTask:
    path = tmp_path_factory.mktemp("task") / "model.py"
    path.write_text(TASK)
    return OpenTask(task=str(path), device="cpu", memory_limit=LIMIT, precision=("fp32",))


def try_size(worker: Worker, size: int, timeout: float = 60) -> dict:
    answer = worker.call(TryBatchSize(batch_size=size, steps=1, precision="fp32"), timeout=timeout)
    return answer.attempt.model_dump()


def train_arguments(**changes: object) -> dict:
    usual = {
        "micro_batch_size": PLAIN,
        "accumulation_steps": 1,
        "learning_rate": 1e-6,
        "precision": "fp32",
        "seed": 0,
        "metric": "val_loss",
        "goal": "minimize",
        "target": None,
        "limit_seconds": 0.05,
        "evaluate_every": 0.02,
        "evaluation_batch_size": 4,
    }
    return usual | changes


@pytest.fixture(scope="module", autouse=True)
def _children_are_forks(as_forks):
    with as_forks():
        yield


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return []


@pytest.fixture(scope="module")
def launcher(printed):
    return Recorded(printed.append)


@pytest.fixture(scope="module")
def healthy(settings, launcher):
    """A child that lives through this module."""
    with Worker(settings, launcher) as worker:
        worker.start()
        yield worker


@pytest.fixture
def same_child(healthy, launcher):
    """Asserts that a test neither killed nor replaced the child."""
    yield healthy
    assert try_size(healthy, PLAIN)["outcome"] == "fit"
    assert len(launcher.started) == 1


class TestAHealthyChild:
    def test_it_tells_what_it_found(self, healthy):
        found = healthy.start()
        assert found.precision == (("fp32", "asked for"),)
        assert (found.device, found.train_size, found.memory_limit_bytes) == ("cpu", 40, LIMIT)
        assert found.optimizer == "AdamW"

    def test_ten_ooms_in_turn_with_ten_fits_leave_the_boundary_where_it_was(self, same_child):
        fits, fails, near = (size * MIB // ROW_BYTES for size in (200, 450, 320))
        outcomes = [try_size(same_child, size)["outcome"] for _ in range(10) for size in (fits, fails)]
        assert outcomes == ["fit", "oom"] * 10
        assert try_size(same_child, near)["outcome"] == "fit"

    def test_an_oom_is_torchs_own_in_its_own_words(self, same_child):
        result = try_size(same_child, 200_000)
        assert result["outcome"] == "oom"
        assert result["message"].startswith("DefaultCPUAllocator: can't allocate memory")

    def test_an_exception_that_claims_an_oom_is_the_users(self, same_child):
        result = try_size(same_child, CLAIM)
        assert result["outcome"] == "user_error"
        assert "(not an out-of-memory error)" in result["message"]

    def test_fifty_megabytes_of_output_do_no_harm(self, same_child, printed):
        assert try_size(same_child, FLOOD)["outcome"] == "fit"
        wait_until(lambda: printed.count("line after line") == 20_000)

    @pytest.mark.parametrize("fate", [NO_STDOUT, CLOSE, WANDER], ids=["no stdout", "closed streams", "another folder"])
    def test_its_streams_and_its_folder_may_be_taken_from_it(self, settings, fate):
        with Worker(settings, launcher := Recorded()) as worker:
            assert try_size(worker, fate)["outcome"] == "fit"
            assert try_size(worker, PLAIN)["outcome"] == "fit"
        assert len(launcher.started) == 1

    def test_every_evaluation_of_a_run_is_seen_and_may_end_it(self, same_child):
        points: list[CurvePoint] = []

        def until_the_third(point: CurvePoint) -> bool:
            points.append(point)
            return len(points) < 3

        arguments = train_arguments(limit_seconds=60.0, evaluate_every=0.01)
        answer = same_child.call(Train(spec=RunSpec(**arguments)), timeout=60, on_event=until_the_third)
        assert answer.evaluation_seconds > 0
        assert replace(answer, evaluation_seconds=None, starting_seconds=None) == RunEnd("pruned")
        assert [point.samples > 0 for point in points] == [False, True, True]

    def test_a_run_goes_on_to_its_limit_when_nobody_looks(self, same_child):
        answer = same_child.call(Train(spec=RunSpec(**train_arguments())), timeout=60)
        assert answer.evaluation_seconds > 0
        assert replace(answer, evaluation_seconds=None, starting_seconds=None) == RunEnd("finished")


def fate_of(settings: OpenTask, size: int, timeout: float) -> tuple[WorkerDied, float, bool]:
    """What was raised, after how many seconds, and whether the child is still there."""
    with Worker(settings, launcher := Recorded()) as worker:
        worker.start()
        began = time.monotonic()
        with pytest.raises(WorkerDied) as raised:
            try_size(worker, size, timeout)
        return raised.value, time.monotonic() - began, psutil.pid_exists(launcher.pids[0])


@pytest.fixture(scope="module")
def fates(settings):
    """How children ended that were given a deadly batch."""
    sizes = (SEGFAULT, KILL, REAL_TIME, EXIT, HANG, QUIET_EXIT, ORPHAN)
    with ThreadPoolExecutor(4) as pool:
        ends = pool.map(lambda size: fate_of(settings, size, 1.0 if size == HANG else 60.0), sizes)
        return dict(zip(sizes, ends, strict=True))


@pytest.mark.parametrize(
    ("size", "outcome", "words"),
    [
        (SEGFAULT, "crash", "the process died by SIGSEGV"),
        (KILL, "crash", "SIGKILL"),
        (REAL_TIME, "crash", f"the process died by signal {signal.SIGRTMIN + 5}"),
        (EXIT, "crash", "the process ended with exit status 3; last output: I have had enough"),
        (QUIET_EXIT, "crash", "the process ended with exit status 0"),
        (HANG, "timeout", "no sign of life for 1 s"),
        (ORPHAN, "crash", "the process died by SIGSEGV"),
    ],
)
def test_a_child_that_dies_is_missed_and_its_end_is_named(fates, size, outcome, words):
    lost, _, survived = fates[size]
    assert lost.outcome == outcome
    assert words in str(lost)
    assert not survived


def test_a_child_is_missed_at_once_though_a_child_of_its_own_lives_on(fates):
    assert fates[ORPHAN][1] < 20


def test_the_next_call_gets_a_new_child_with_the_limit_of_the_first(settings):
    with Worker(settings, launcher := Recorded()) as worker:
        limit = worker.start().memory_limit_bytes
        with pytest.raises(WorkerDied):
            try_size(worker, SEGFAULT)
        assert try_size(worker, PLAIN)["outcome"] == "fit"
        assert len(launcher.started) == 2
        assert worker.opened.memory_limit_bytes == limit

        def interrupt(_event: dict) -> bool:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            worker.call(Train(spec=RunSpec(**train_arguments())), timeout=60, on_event=interrupt)
        assert not psutil.pid_exists(launcher.pids[1])  # a child that waits for an answer is of no use


BAD = {
    "lacks its file": ("", {"task": "nowhere.py"}, UsageError, "no such task file"),
    "asks for a device that is not here": (TASK, {"device": "xpu:7"}, DeviceError, "not available here"),
    "asks for a device that nobody knows": (TASK, {"device": "abacus"}, UsageError, "torch knows no such device"),
    "asks for a precision of other devices": (TASK, {"precision": ("tf32",)}, DeviceError, "CUDA devices only"),
    "raises": ("def build_model():\n    raise KeyError('x')\ndef make_batch(n): ...", {}, UserCodeError, r"py:2: 'x'"),
    "stops the clock": (
        f"{TASK}\ntime.perf_counter = lambda: 0.0",
        {},
        UserCodeError,
        r"the task replaces time\.perf_counter, which times its steps; leave that clock as it is",
    ),
    "meets a device that others fill": (
        TASK + FULL,
        {},
        DeviceError,
        r"^--device cpu: cannot be used now: CUDA out of memory\. Tried to allocate 20\.00 GiB$",
    ),
    "dies": ("import os\nos.kill(os.getpid(), 11)", {}, UserCodeError, "ended in crash: the process died by SIGSEGV"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    def refusal(name: str) -> BaseException:
        text, changes, kind, _ = BAD[name]
        path = tmp_path_factory.mktemp("bad") / "model.py"
        path.write_text(text)
        settings = OpenTask(**{"task": str(path), "device": "cpu"} | changes)
        with Worker(settings) as worker, pytest.raises(kind) as raised:
            worker.start()
        return raised.value

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(BAD, pool.map(refusal, BAD), strict=True))


@pytest.mark.parametrize("name", BAD)
def test_a_task_is_refused_in_one_line_when_it(refusals, name):
    assert re.search(BAD[name][3], str(refusals[name]))
    assert "\n" not in str(refusals[name])


def test_a_parent_that_is_killed_takes_child_and_grandchild_along(settings):
    code = (
        "from batchtune.processes.local import LocalLauncher\n"
        "from batchtune.processes.worker import Worker\n"
        "from batchtune.protocol.commands import OpenTask, TryBatchSize\n"
        f"worker = Worker(OpenTask(task={settings.task!r}, device='cpu', precision=('fp32',)), LocalLauncher(print))\n"
        "worker.start(); print('child')\n"
        f"for size in ({BEAR}, {HANG}):\n"
        "    worker.call(TryBatchSize(batch_size=size, steps=1, precision='fp32'), timeout=600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=lambda: [lines.put(line) for line in parent.stdout])
        reader.start()
        assert lines.get(timeout=60) == "child\n"
        family = psutil.Process(parent.pid).children()
        assert len(family) == 1
        family.append(psutil.Process(int(lines.get(timeout=60).removeprefix("grandchild "))))
        parent.kill()
        reader.join(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_closing_a_worker_ends_what_its_child_started(settings):
    printed: queue.Queue[str] = queue.Queue()
    with Worker(settings, LocalLauncher(printed.put)) as worker:
        try_size(worker, BEAR)
        grandchild = psutil.Process(int(printed.get(timeout=60).split()[1]))
    psutil.wait_procs([grandchild], timeout=60)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_who_waits_long_for_the_import_is_told_for_what(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("batchtune.processes.worker.LONG_OPENING_SECONDS", 0.3)
    path, told = tmp_path / "slow.py", []
    path.write_text("import time\ntime.sleep(1)\n" + Path(settings.task).read_text())
    with Worker(settings.but(task=str(path)), LocalLauncher(), note=told.append) as worker:
        worker.start()
        worker.renew()
        worker.start()
    assert len(told) == 1
    assert told[0].startswith(f"{path}: importing it, building the model and looking at its data takes long")


def test_a_child_without_a_task_describes_the_machine():
    with Worker(None) as worker:
        answer = worker.call(Describe(device="cpu"), timeout=60)
    assert answer.environment.device_memory_bytes > 0
    assert answer.sensors == {}


RUNAWAY = """
import subprocess, sys
sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL)
print(sleeping.pid, file=sys.stderr, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("by_us", [False, True])
def test_a_child_that_something_else_kills_is_told_from_one_that_we_kill(by_us):
    child = LocalProcess(["sleep", "60"], {"PATH": os.defpath})
    try:
        child.kill() if by_us else os.kill(child.pid, signal.SIGKILL)
        assert child.last_output()[1] is not by_us
    finally:
        child.close()


def test_closing_does_not_wait_for_what_got_away_with_the_childs_streams():
    printed: queue.Queue[str] = queue.Queue()
    process = LocalProcess([sys.executable, "-c", RUNAWAY], os.environ, printed.put)
    runaway = psutil.Process(int(printed.get(timeout=30)))
    try:
        process.close()
        assert runaway.is_running()
    finally:
        runaway.kill()


def test_what_a_child_has_started_is_known_after_its_end_but_not_what_left_its_session():
    start = "import subprocess as s; print(*(s.Popen(['sleep', '60'], start_new_session=how).pid for how in (0, 1)))"
    printed: queue.Queue[str] = queue.Queue()
    code = f"import sys; sys.stdout = sys.stderr; {start}"
    process = LocalProcess([sys.executable, "-c", code], os.environ, printed.put)
    stays, leaves = map(int, printed.get(timeout=30).split())
    try:
        process.wait(30)
        assert [is_of_a_child(pid) for pid in (stays, leaves, os.getpid())] == [True, False, False]
    finally:
        process.close()
        psutil.Process(leaves).kill()


def test_children_that_are_closed_leave_neither_files_nor_threads():
    files, threads = psutil.Process().num_fds(), threading.active_count()
    for _ in range(5):
        process = LocalProcess([sys.executable, "-c", "print('{}'); input()"], os.environ)
        assert process.answer(30) == {}
        process.close()
        assert psutil.Process().num_fds() <= files
        assert threading.active_count() <= threads

"""Groups of ranks as real processes: what an attempt comes to when one of them fails, and that nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from fixtures.waiting import wait_until

from batchtune.config.probe import ProbeOptions
from batchtune.errors import BatchtuneError
from batchtune.observer import Observer
from batchtune.probe.runner import Probe
from batchtune.processes import local
from batchtune.processes.ranks import RankLauncher
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import OpenTask, TimeSteps, TryBatchSize

MIB = 2**20
LIMIT = 300 * MIB
ROW_BYTES = (1 << 14) * 4
TASK = '''
"""Some sizes of batch have a fate on rank 1; all others only take memory."""
import os, signal, time
import torch
from torch import nn

WIDTH = 1 << 14
HUGE = 1 << 34

def build_model():
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4))

def make_batch(batch_size):
    return torch.ones(batch_size, WIDTH)

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        torch.ones(HUGE)
        return gradient

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if fate == "optimizer":
            torch.ones(HUGE)
        return super().step(closure)

fate = None

def build_optimizer(model, lr):
    return Optimizer(model.parameters(), lr=lr)

def compute_loss(model, batch):
    global fate
    fate = FATES.get(len(batch)) if os.environ.get("RANK") == "1" else None
    if len(batch) >= int(os.environ.get("FAILS_FROM", 1 << 40)) and os.environ.get("RANK", "1") == "1":
        fate = os.environ["FAILS_BY"]
    loss = model(batch).square().mean()
    if fate == "forward":
        torch.ones(HUGE)
    if fate == "backward":
        return Backward.apply(loss)
    if fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fate == "hang":
        time.sleep(600)
    if fate == "raise":
        raise ValueError("rank 1 has another opinion")
    if len(batch) == 29:
        torch.ones(HUGE)
    return loss

FATES = {21: "forward", 22: "backward", 23: "optimizer", 24: "kill", 25: "hang", 26: "raise"}
'''
FORWARD, BACKWARD, OPTIMIZER, KILL, HANG, RAISE = range(21, 27)
EVERYWHERE = 29
PLAIN = 3
MARK = str(time.time_ns())


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> OpenTask:
    path = tmp_path_factory.mktemp("task") / "model.py"
    path.write_text(TASK)
    return OpenTask(task=str(path), device="cpu", memory_limit=LIMIT, precision=("fp32",))


@pytest.fixture(scope="module", autouse=True)
def _marked(as_forks):
    with as_forks(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_THESE_TESTS", MARK)
        yield
        assert_nobody_left()


@pytest.fixture
def real_starts(monkeypatch):
    """Groups are started as for a user, not forked from the tests' server."""
    monkeypatch.setattr(local, "subprocess", subprocess)


@pytest.fixture(scope="module")
def group(settings):
    with Worker(settings, RankLauncher(2, "ddp")) as group:
        yield group


def relatives() -> list[psutil.Process]:
    """Launchers and ranks of this module's groups."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OF_THESE_TESTS") == MARK and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks() -> list[int]:
    """The process numbers of this module's ranks."""
    return sorted(each.pid for each in relatives() if "batchtune.child.rank" in " ".join(each.cmdline()))


def assert_nobody_left() -> None:
    wait_until(lambda: not relatives(), 60)


def raised_by(do) -> list[BaseException]:
    try:
        do()
    except BatchtuneError as error:
        return [error]
    return []


def try_size(group: Worker, size: int, timeout: float = 60, **changes) -> dict:
    usual = {"steps": 1, "precision": "fp32", "verify": False}
    command = TryBatchSize(batch_size=size, **usual | changes)
    return group.call(command, timeout=timeout).attempt.model_dump()


@pytest.mark.parametrize("size", [FORWARD, BACKWARD, OPTIMIZER])
def test_memory_that_one_rank_lacks_is_the_groups_answer_and_the_group_goes_on(group, size):
    found = try_size(group, size)
    assert (found["outcome"], found["limiting_rank"]) == ("oom", 1)
    assert found["message"].startswith("rank 1: ")
    assert try_size(group, PLAIN)["outcome"] == "fit"


def test_memory_that_all_lack_leaves_the_processes_alive(group):
    group.start()
    before = ranks()
    found = try_size(group, EVERYWHERE)
    assert (found["outcome"], found["limiting_rank"]) == ("oom", None)
    assert try_size(group, PLAIN)["outcome"] == "fit"
    assert ranks() == before


def test_a_rank_that_dies_is_named_with_its_signal_and_the_group_starts_again(group):
    group.start()
    before = ranks()
    with pytest.raises(WorkerDied, match="rank 1: the process died by SIGKILL") as caught:
        try_size(group, KILL)
    assert (caught.value.outcome, caught.value.rank) == ("crash", 1)
    assert_nobody_left()
    assert try_size(group, PLAIN)["outcome"] == "fit"
    assert not set(before) & set(ranks())


def test_a_rank_that_hangs_ends_with_the_timeout(group):
    group.start()
    with pytest.raises(WorkerDied, match="no sign of life for 2 s") as caught:
        try_size(group, HANG, timeout=2.0)
    assert caught.value.outcome == "timeout"
    assert_nobody_left()


def test_an_error_of_the_code_on_one_rank_names_the_rank(group):
    found = try_size(group, RAISE)
    assert (found["outcome"], found["limiting_rank"]) == ("user_error", 1)
    assert "rank 1 has another opinion" in found["message"]


@pytest.mark.usefixtures("real_starts")
def test_a_probe_of_a_group_finds_the_size_that_fits_on_every_rank(settings):
    limited = settings.but(rank_memory_limits_bytes=(2 * LIMIT, LIMIT))
    options = ProbeOptions(tolerance=0.3, verify_steps=2, throughput=False)
    with Worker(limited, RankLauncher(2, "ddp")) as group:
        probe = Probe(group, options, "fp32", Observer())
        found = probe.run()
        assert group.settings.rank_memory_limits_bytes == (2 * LIMIT, LIMIT)  # of the group that came after the first
    assert found.memory_limit_bytes == LIMIT
    assert found.max_batch_size * ROW_BYTES < LIMIT
    assert 2 * found.first_failing_batch_size * ROW_BYTES > LIMIT - 40 * MIB  # two batches, and libraries
    ranks = found.data_parallel
    assert (ranks.world_size, ranks.limiting_rank, ranks.global_batch_size) == (2, 1, 2 * found.max_batch_size)


def test_sharded_ranks_accumulate_evaluate_and_save(settings):
    with Worker(settings, RankLauncher(2, "fsdp")) as group:
        found = try_size(group, PLAIN, steps=2, verify=True, accumulation_steps=2)
        assert (found["outcome"], found["steps"]) == ("fit", 2)
        point = group.call(TimeSteps(batch_size=PLAIN, precision="fp32", seconds=0.1), timeout=60)
        assert point.step_seconds > 0


BETWEEN_RANKS = """
import torch, torch.distributed as dist
from torch import nn

def build_model():
    return nn.Linear(8, 4)

def make_batch(batch_size):
    return torch.ones(batch_size, 8)

def compute_loss(model, batch):
    found = model(batch)
    if dist.is_initialized():
        parts = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, found.detach())
        parts[dist.get_rank()] = found
        found = torch.cat(parts)
    return nn.functional.cross_entropy(found, torch.zeros(len(found), dtype=torch.long))
"""


def test_a_loss_that_asks_other_ranks_is_timed_without_them_too_and_keeps_nobody_waiting(tmp_path):
    (tmp_path / "model.py").write_text(BETWEEN_RANKS)
    settings = OpenTask(task=str(tmp_path / "model.py"), device="cpu", memory_limit=LIMIT, precision=("fp32",))
    with Worker(settings, RankLauncher(2, "ddp")) as group:
        for ranks in ("together", "apart", "alone", "apart", "together"):  # they take unlike numbers of steps apart
            point = group.call(TimeSteps(batch_size=4, precision="fp32", seconds=0.3, ranks=ranks), timeout=20)
            assert point.step_seconds > 0


SHARED_STATES = """
from torch.distributed.optim import ZeroRedundancyOptimizer

def build_optimizer(model, lr):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)
"""


def test_an_optimizer_whose_states_ranks_share_is_saved_by_the_first(tmp_path):
    (tmp_path / "model.py").write_text(BETWEEN_RANKS + SHARED_STATES)
    settings = OpenTask(task=str(tmp_path / "model.py"), device="cpu", memory_limit=LIMIT, precision=("fp32",))
    with Worker(settings, RankLauncher(2, "ddp")) as group:
        found = try_size(group, PLAIN, steps=2, verify=True)
        assert (found["outcome"], found["steps"]) == ("fit", 2), found


@pytest.mark.parametrize("started", [True, False], ids=["that trains", "that starts"])
def test_a_group_whose_parent_is_killed_leaves_nobody_and_no_file(settings, tmp_path, started):
    program, temporary = tmp_path / "parent.py", tmp_path / "temporary"
    temporary.mkdir()
    program.write_text(
        "import json, sys, time\n"
        "from batchtune.processes.ranks import RankLauncher\n"
        "from batchtune.processes.worker import Worker\n"
        "from batchtune.protocol.commands import OpenTask\n"
        f"settings = OpenTask(task={settings.task!r}, device='cpu', precision=('fp32',))\n"
        "group = Worker(settings, RankLauncher(2, 'ddp'))\n"
        + ("group.start()\n" * started)
        + "print('ready', flush=True)\n"
        + ("time.sleep(600)\n" if started else "group.start()\n")
    )
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root, "TMPDIR": str(temporary)},
    ) as parent:
        assert parent.stdout.readline() == b"ready\n"
        count = 4 if started else 2  # each with the image that it is a fork of
        pids = wait_until(lambda: found if len(found := ranks()) == count else None)
        for pid in pids[-2:]:
            os.kill(pid, signal.SIGSTOP)  # they hear nothing any more
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(is_alive, pids)), 60)
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's cache


@pytest.mark.usefixtures("real_starts")  # a fork says it too soon
def test_ranks_that_are_stopped_before_they_can_say_who_they_are_end_with_their_group(settings):
    group = Worker(settings, RankLauncher(2, "ddp"))
    failed: list[BaseException] = []
    starting = threading.Thread(target=lambda: failed.extend(raised_by(group.start)))
    starting.start()
    pids = wait_until(lambda: found if len(found := ranks()) == 2 else None)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    group.close()
    starting.join()
    wait_until(lambda: not any(map(is_alive, pids)), 20)
    assert len(failed) == 1


@pytest.mark.long
def test_a_series_of_failures_on_one_rank_ends_each_in_time_and_leaves_the_boundary_right(
    settings, monkeypatch, capsys
):
    monkeypatch.setenv("FAILS_FROM", "37")
    options = ProbeOptions(maximum=64, tolerance=0.0, timeout=10.0, steps=2, verify_steps=2, throughput=False)
    failures, alone = [], 0
    for how in ("forward", "backward", "optimizer", "kill", "segfault", "hang"):
        monkeypatch.setenv("FAILS_BY", how)
        with Worker(settings, RankLauncher(2, "ddp")) as group:
            found = Probe(group, options, "fp32", Observer()).run()
        assert_nobody_left()
        assert (found.max_batch_size, found.first_failing_batch_size) == (36, 37)
        failed = [each for each in found.attempts if not each.fits]
        failures += failed
        assert all(each.limiting_rank == 1 for each in failed if how != "hang")
        if how == "forward":
            with Worker(settings) as worker:
                alone = len(Probe(worker, options, "fp32", Observer()).run().attempts)
            assert len(found.attempts) <= 1.5 * alone
        with capsys.disabled():
            slowest = max(each.seconds for each in failed)
            print(
                f"\n{how}: {len(found.attempts)} attempts ({alone} of one rank), {len(failed)} failures, the slowest "
                f"{slowest:.1f} s"
            )
    assert len(failures) >= 20

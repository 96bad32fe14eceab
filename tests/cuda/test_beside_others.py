"""An estimate beside a run that trains, and a search whose neighbour moves while it goes on."""

import json
import subprocess
import sys
import threading

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES, PERCEPTRON
from fake_gpu import forks
from fixtures.waiting import wait_until

import batchtune
from batchtune.errors import DeviceError
from batchtune.observer import Observer
from batchtune.processes import worker as worker_module

GiB, MiB = 2**30, 2**20
CONTEXT = 300 * MiB
NEIGHBOUR = 4242

TRAINS = (
    PERCEPTRON
    + """
import json, sys, threading
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
model, steps = build_model().cuda(), 0
optimizer = torch.optim.AdamW(model.parameters())
while not ended.is_set():
    loss = compute_loss(model, make_batch(64).cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps == 3:
        print(torch.cuda.max_memory_reserved(), flush=True)
print(json.dumps([steps, torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()["num_alloc_retries"]]))
"""
)


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_module, "BUSY_SECONDS", 0.5)
    (tmp_path / "model.py").write_text(PERCEPTRON)
    return tmp_path / "model.py"


@ESTIMATES
def test_an_estimate_is_the_same_beside_a_training_run_and_leaves_it_alone(task):
    with fake_gpu.machine(fake_gpu.Card("8GiB", context_bytes=CONTEXT)) as machine:
        card, seen, ended = machine.cards[0], set(), threading.Event()
        alone = batchtune.estimate(task, gpus="RTX 3090").estimates
        run = forks.Popen([sys.executable, "-c", TRAINS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with run:
            early = int(run.stdout.readline())

            def watch():
                while not ended.wait(0.01):
                    seen.update(card.processes)

            watching = threading.Thread(target=watch)
            watching.start()
            mallocs, launches = card.mallocs, card.launches
            beside = batchtune.estimate(task, gpus="RTX 3090").estimates
            ended.set()
            watching.join()
            assert card.launches > launches  # it went on meanwhile
            assert card.mallocs == mallocs
            steps, peak, retries = json.loads(run.communicate(timeout=60)[0])
    assert run.returncode == 0
    assert beside == alone
    assert seen == {run.pid}
    assert (peak, retries) == (early, 0)
    assert steps > 3


class Moves(Observer):
    """The neighbour holds something else from the second attempt of the search on."""

    def __init__(self, card, held):
        self._card, self._held, self.attempts = card, held, []

    def attempted(self, attempt):
        self.attempts.append(attempt)

    def attempting(self, batch_size, reason):
        if len(self.attempts) == 1:
            self._card.other = {NEIGHBOUR: self._held}


@pytest.mark.parametrize("limit", [{}, {"memory_limit": "6GiB"}], ids=["free memory", "a limit"])
@pytest.mark.parametrize("held", [4 * GiB, 0], ids=["grows", "goes"])
def test_an_answer_trains_beside_a_neighbour_that_moves_during_the_search(task, limit, held):
    before = 0 if limit else GiB
    with fake_gpu.machine(fake_gpu.Card("8GiB", context_bytes=CONTEXT, other={NEIGHBOUR: before})) as machine:
        watch = Moves(machine.cards[0], held)
        options = {"precision": "fp32", "tolerance": 0.1, "verify_steps": 2, "throughput": False}
        result = batchtune.probe(task, device="cuda", observer=watch, **options | limit)
        assert wait_until(lambda: machine.cards[0].processes == {})
    found = result.probe
    assert len(watch.attempts) > 2
    assert (found.limited_by, found.verified_in_fresh_process) == ("memory", True)
    assert found.memory_limit_bytes == (6 * GiB if limit else int((7 * GiB - CONTEXT) * 0.95))
    assert found.peak_reserved_bytes <= found.memory_limit_bytes
    assert found.peak_reserved_bytes + CONTEXT + held <= 8 * GiB
    assert any("free memory moved" in warning for warning in result.warnings) or held == before


def test_a_neighbour_that_takes_all_during_the_search_is_named_and_there_is_no_answer(task):
    with fake_gpu.machine(fake_gpu.Card("8GiB", context_bytes=CONTEXT)) as machine:
        watch = Moves(machine.cards[0], 8 * GiB)
        with pytest.raises(DeviceError, match="pid 4242") as caught:
            batchtune.probe(task, device="cuda", precision="fp32", observer=watch, verify_steps=2, throughput=False)
        assert wait_until(lambda: machine.cards[0].processes == {})
    assert caught.value.exit_code == 5


def test_steps_are_timed_by_the_device_where_a_busy_host_wakes_up_late(script):
    code = """
import json, time, torch
from batchtune.device.memory import open_device
memory, wait = open_device("cuda"), torch.cuda.synchronize
x = torch.empty(4096, 4096, device="cuda")
torch.mm(x, x)

def wait_and_oversleep(*device):
    wait(*device)
    time.sleep(0.3)

torch.cuda.synchronize = wait_and_oversleep
began, seconds = time.perf_counter(), memory.stopwatch()
for _ in range(10):
    torch.mm(x, x)
print(json.dumps([seconds(), time.perf_counter() - began]))
"""
    with fake_gpu.machine(fake_gpu.Card("4GiB", flops=10e12)):
        timed, on_the_wall = script(code)
    assert timed == pytest.approx(10 * 2 * 4096**3 / 10e12, abs=0.1)
    assert on_the_wall > 0.6

"""A child that loses its context, dies, hangs or raises, and a parent that is ended: nothing is left on the card."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_gpu
import psutil
import pytest
from cuda.tasks import PERCEPTRON
from fixtures.waiting import wait_until

import batchtune
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import OpenTask, TryBatchSize

MiB = 2**20
SIZES = {
    "user_error": 101,
    "device-side assert": 710,
    "illegal address": 700,
    "launch failure": 719,
    "dies": 103,
    "hangs": 104,
}
MISBEHAVES = (
    PERCEPTRON
    + """
import fake_gpu
in_peace = compute_loss

def compute_loss(model, batch):
    if len(batch) in {700, 710, 719}:
        fake_gpu.poison(len(batch))
    if len(batch) == 101:
        raise RuntimeError("CUDA out of memory, says the user")
    if len(batch) == 103:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(batch) == 104:
        time.sleep(600)
    return in_peace(model, batch)
"""
)


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_gpu.__file__).parents[1]))
    (tmp_path / "model.py").write_text(MISBEHAVES)
    return tmp_path / "model.py"


def test_a_child_is_kept_after_a_clean_failure_and_replaced_after_any_other(task):
    with fake_gpu.machine(fake_gpu.Card("4GiB", context_bytes=300 * MiB)) as machine:
        card, found, pids = machine.cards[0], {}, []
        settings = OpenTask(task=str(task), device="cuda", precision=("fp32",))
        with Worker(settings) as worker:

            def attempt(name, size, **different):
                try:
                    command = TryBatchSize(batch_size=size, steps=1, precision="fp32")
                    done = worker.call(command, **{"timeout": 60.0} | different).attempt
                    found[name] = done.outcome, done.message
                except WorkerDied as lost:
                    found[name] = lost.outcome, str(lost)
                if name not in {"dies", "hangs"}:
                    assert attempt_is_over(name)
                pids.append(card.contexts)

            def attempt_is_over(name):
                """A context that survived holds little; one that did not is gone with its process."""
                lost = name in {"device-side assert", "illegal address", "launch failure"}
                return wait_until(lambda: card.processes == {}) if lost else 300 * MiB <= card.used < 500 * MiB

            attempt("fits", 8)
            attempt("out of memory", 10**6)
            attempt("user_error", 101)
            assert pids[0] == pids[1] == pids[2]
            assert len(pids[0]) == 1
            for name in ("illegal address", "launch failure", "device-side assert"):
                attempt(name, SIZES[name])
            attempt("dies", SIZES["dies"])
            attempt("hangs", SIZES["hangs"], timeout=1.0)
            attempt("fits again", 8)
            assert len(pids[-1]) == 1
            assert pids[-1] != pids[0]
        assert wait_until(lambda: card.used == 0)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "fits": "fit",
        "out of memory": "oom",
        "user_error": "user_error",
        "illegal address": "kernel_limit",
        "launch failure": "kernel_limit",
        "device-side assert": "user_error",
        "dies": "crash",
        "hangs": "timeout",
        "fits again": "fit",
    }
    assert "device-side assert triggered" in found["device-side assert"][1]
    assert "says the user" in found["user_error"][1]


def test_an_answer_below_a_size_that_poisons_the_context_is_proven(task):
    task.write_text(task.read_text().replace("len(batch) in {700, 710, 719}", "len(batch) > 12").replace(
        "fake_gpu.poison(len(batch))", "fake_gpu.poison(710)"))  # fmt: skip
    with fake_gpu.machine(fake_gpu.Card("2GiB")) as machine:
        found = batchtune.probe(
            task, device="cuda", precision="fp32", min=10, max=14, tolerance=0, verify_steps=1, throughput=False
        ).probe
        assert wait_until(lambda: machine.cards[0].used == 0)
    assert (found.max_batch_size, found.first_failing_batch_size) == (12, 13)
    assert (found.limited_by, found.verified_in_fresh_process) == ("user_error", True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_a_parent_that_is_ended_leaves_nothing_on_the_card(task, number):
    with fake_gpu.machine(fake_gpu.Card("4GiB")) as machine:
        card = machine.cards[0]
        command = [sys.executable, "-m", "batchtune", "probe", task, "--device", "cuda", "--min", "104", "--json"]
        with subprocess.Popen(command, cwd=task.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
            wait_until(lambda: card.contexts or parent.poll() is not None)
            assert card.contexts
            assert parent.pid not in card.contexts
            family = psutil.Process(parent.pid).children(recursive=True)
            os.kill(parent.pid, number)
            out, err = parent.communicate(timeout=60)
        _, left = psutil.wait_procs(family, timeout=60)
        assert left == []
        assert wait_until(lambda: card.used == 0)
    assert parent.returncode == (-number if number == signal.SIGKILL else 130), (out, err)

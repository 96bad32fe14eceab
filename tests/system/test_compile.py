"""Models under torch.compile: what compiling costs is no step time, and compiling again is seen.

The backend is `eager`: dynamo captures, guards and compiles again as it does with any other, and no compiler is needed.
"""

import importlib
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from batchtune.child import heartbeat
from batchtune.child.attempt import attempt
from batchtune.child.heartbeat import MAX_WARM_UP_STEPS, CompileWatch, forget_compiled, warm_up
from batchtune.child.timing import StepTimes, time_steps
from batchtune.device._base import Peaks, stopwatch_on_the_wall
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import OpenTask, TimeSteps, TryBatchSize
from batchtune.task.contract import Task


class FakeMemory:
    """A CPU without a limit."""

    device = torch.device("cpu")

    def describe(self):
        return "a CPU", None, None

    def peaks(self):
        return Peaks(None, None)

    def attempt(self, batch_size):
        return nullcontext()

    def reset_peaks(self):
        pass

    synchronize = release = reset_peaks

    def stopwatch(self):
        return stopwatch_on_the_wall(self.synchronize)


class Restless(nn.Module):
    """Counts its calls in Python, which is a new program for torch.compile each time."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 1), 0

    def forward(self, batch):
        self.calls += 1
        return self.layer(batch) * self.calls


def task_of(build):
    return Task(
        SimpleNamespace(
            build_model=build,
            make_batch=lambda batch_size: torch.randn(batch_size, 4),
            compute_loss=lambda model, batch: model(batch).square().mean(),
        ),
        "model.py",
    )


PLAIN = task_of(lambda: nn.Linear(4, 1))
COMPILED = task_of(lambda: torch.compile(nn.Linear(4, 1), backend="eager"))
RESTLESS = task_of(lambda: torch.compile(Restless(), backend="eager"))


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    forget_compiled()


def run(task, batch_size=8, steps=6):
    return attempt(task, FakeMemory(), TryBatchSize(batch_size=batch_size, steps=steps, precision="fp32")).attempt


SLOW = """
import time
import torch
from torch import nn
from batchtune.child import heartbeat

heartbeat.PERIOD_SECONDS = 0.2

def patient(graph, _inputs):
    time.sleep(6)
    return graph.forward

def build_model():
    return torch.compile(nn.Linear(4, 1), backend=patient)

def make_batch(batch_size):
    return torch.randn(batch_size, 4)

def compute_loss(model, batch):
    if len(batch) == 13:
        time.sleep(600)
    if len(batch) == 3:
        time.sleep(0.8)
    return model(batch).square().mean()
"""


@pytest.fixture
def slow(tmp_path, as_forks):
    """A worker whose task, or the compiler of its model, takes its time."""

    def opened(text):
        (tmp_path / "model.py").write_text(text)
        return Worker(OpenTask(task=str(tmp_path / "model.py"), device="cpu", precision=("fp32",)))

    with as_forks():
        yield opened


def test_compiling_is_no_silence_and_a_hang_still_is(slow):
    with slow(SLOW) as worker:
        worker.start()
        begun = time.monotonic()
        answer = worker.call(TryBatchSize(batch_size=2, steps=1, precision="fp32"), timeout=5)
        assert answer.attempt.outcome == "fit"
        assert time.monotonic() - begun > 6
        with pytest.raises(WorkerDied, match="no sign of life for 2 s"):
            worker.call(TryBatchSize(batch_size=13, steps=1, precision="fp32"), timeout=2)


def test_compiling_is_no_silence_after_the_compiler_was_reset_either(monkeypatch, listen):
    heard, in_time = threading.Event(), []

    def patient(graph, _inputs):
        heard.clear()
        in_time.append(heard.wait(60))  # whoever watched another compilation may still wait for its period to end
        return graph.forward

    monkeypatch.setattr(heartbeat, "PERIOD_SECONDS", 0.05)
    listen(heard.set)
    importlib.import_module("torch._dynamo.callback")  # as torch.compile does
    heartbeat.watch_compiling()
    task = task_of(lambda: torch.compile(nn.Linear(4, 1), backend=patient))
    for size in (8, 16, 32):
        assert run(task, size, steps=1).outcome == "fit"
    assert in_time == [True] * 3


def test_many_long_steps_are_no_silence(slow):
    with slow(SLOW.replace("torch.compile(nn.Linear(4, 1), backend=patient)", "nn.Linear(4, 1)")) as worker:
        worker.start()
        answer = worker.call(TryBatchSize(batch_size=3, steps=8, precision="fp32"), timeout=5)
        assert answer.attempt.outcome == "fit"
        assert answer.attempt.seconds > 6


def test_without_torch_compile_nothing_is_said_about_it():
    assert run(PLAIN).recompiles is None


def test_a_model_that_compiles_once_has_no_recompiles():
    found = run(COMPILED)
    assert (found.outcome, found.recompiles) == ("fit", 0)


def test_a_model_that_compiles_in_every_step_is_seen():
    found = run(RESTLESS)
    assert found.outcome == "fit"
    assert found.recompiles == 4  # of six steps, the first two may compile


def test_compiling_is_no_part_of_the_step_time():
    first_compiling = run(COMPILED, steps=1)
    assert first_compiling.step_seconds is None
    assert run(COMPILED).step_seconds < first_compiling.seconds / 2


def test_every_size_is_compiled_for_itself():
    watch = CompileWatch()
    sizes = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    graphs = []
    for size in sizes:
        assert run(COMPILED, size, steps=2).outcome == "fit"
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert watch.new_graphs() == 1
    assert graphs == [1] * len(sizes)  # neither one graph for any size, nor none once torch gives up


def test_timed_steps_start_when_compiling_is_over():
    point = time_steps(COMPILED, FakeMemory(), TimeSteps(batch_size=8, precision="fp32", seconds=0.05))
    assert point.recompiles == 0


def test_timed_steps_of_a_plain_model_say_nothing_about_compiling():
    point = time_steps(PLAIN, FakeMemory(), TimeSteps(batch_size=8, precision="fp32", seconds=0.05))
    assert point.recompiles is None


def test_warming_up_ends_even_if_compiling_never_does():
    steps = []
    watch = SimpleNamespace(new_graphs=lambda: 1)
    warm_up(lambda: steps.append(1), watch)
    assert len(steps) == MAX_WARM_UP_STEPS


def test_warming_up_goes_on_for_two_steps_after_the_last_graph():
    graphs, steps = [1, 0, 1, 0, 0, 0], []
    watch = SimpleNamespace(new_graphs=lambda: graphs.pop(0))
    warm_up(lambda: steps.append(1), watch)
    assert len(steps) == 5


def test_the_median_leaves_out_the_first_step_and_those_that_compiled(monkeypatch):
    graphs = [1, 0, 1, 0]
    monkeypatch.setattr(CompileWatch, "new_graphs", lambda _: graphs.pop(0))
    times = StepTimes()
    for seconds in (9.0, 1.0, 7.0, 3.0):
        times.add(seconds)
    assert times.median() == 2.0


@pytest.mark.parametrize(("seconds", "median"), [([5.0], 5.0), ([5.0, 1.0], 1.0), ([], None)])
def test_the_median_of_few_steps(seconds, median):
    times = StepTimes()
    for each in seconds:
        times.add(each)
    assert times.median() == median

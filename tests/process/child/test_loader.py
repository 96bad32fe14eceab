"""The training set's loader timed for real, in this process and in a child under a memory limit."""

import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from fixtures.children import Recorded
from torch.utils.data import IterableDataset

from batchtune.child.timing import time_loader
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask, TimeLoader
from batchtune.task.contract import Task

MEMORY = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)


class Slow:
    """Samples that take 10 ms each, or what a busy machine makes of that."""

    def __init__(self):
        self.seconds = []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        began = time.perf_counter()
        time.sleep(0.01)
        self.seconds.append(time.perf_counter() - began)
        return torch.zeros(2)

    @property
    def samples_per_second(self):
        return len(self.seconds) / sum(self.seconds)


class Broken(Slow):
    def __getitem__(self, index):
        raise KeyError(f"no sample {index}")


class Once(IterableDataset):
    """Can be read once, as a stream."""

    def __init__(self, samples):
        self.left = [torch.zeros(2)] * samples

    def __iter__(self):
        while self.left:
            yield self.left.pop()


def rate_of(data, *, batch_size=4, num_workers=0, seconds=0.3):
    task = Task(SimpleNamespace(build_model=torch.nn.Identity, train_dataset=lambda: data), "model.py")
    command = TimeLoader(batch_size=batch_size, num_workers=num_workers, pin_memory=False, seconds=seconds)
    return time_loader(task, MEMORY, command)


def test_a_slow_data_set_gives_what_its_samples_take():
    found = rate_of(data := Slow())
    assert found.samples_per_second == pytest.approx(data.samples_per_second, rel=0.4)


def test_two_workers_load_faster_than_none_and_are_gone_afterwards():
    before = psutil.Process().children()
    found = rate_of(Slow(), num_workers=2, seconds=0.6)
    assert found.samples_per_second > 110  # one alone cannot load more than 100
    assert psutil.Process().children() == before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_the_data_set_raises_is_the_message(num_workers):
    found = rate_of(Broken(), num_workers=num_workers)
    assert found.samples_per_second is None
    assert "no sample" in found.message


def test_epochs_follow_one_another():
    short = rate_of(data := Slow(), batch_size=40, seconds=0.5)
    assert short.samples_per_second == pytest.approx(data.samples_per_second, rel=0.4)
    assert len(data.seconds) > len(data)


def test_a_stream_that_ends_is_timed_as_far_as_it_goes():
    assert rate_of(Once(40), seconds=60).samples_per_second > 0


def test_a_stream_that_is_empty_is_said_to_be():
    assert "too few samples" in rate_of(Once(0)).message


def test_the_memory_limit_of_a_cpu_child_does_not_stop_its_loaders_workers(tmp_path, as_forks):
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "class Data:\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index): return torch.zeros(1_000_000)\n"  # a batch of 16: 64 MB
        "def build_model(): return torch.nn.Linear(2, 1)\n"
        "def train_dataset(): return Data()\n"
        "def compute_loss(model, batch): return model(batch[:, :2]).mean()\n"
    )
    settings = OpenTask(task=str(tmp_path / "model.py"), device="cpu", memory_limit=50_000_000)
    with as_forks(), Worker(settings, launcher := Recorded()) as worker:
        alone = worker.call(TimeLoader(batch_size=16, num_workers=2, pin_memory=False, seconds=0.1), timeout=60)
        (fork,) = psutil.Process(launcher.pids[0]).children()
        children = fork.children()
    assert alone.message is None
    assert alone.samples_per_second > 0
    assert children == []

"""What the tests of training share: a device that runs out of memory on demand, and a small task."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from batchtune.device.memory import Peaks
from batchtune.task.contract import Task


class FakeDevice(TorchDispatchMode):
    """A CPU whose tensors count against a limit, as those of an accelerator do: a `DeviceMemory` without hardware."""

    device = torch.device("cpu")

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.live, self.peak, self.limit, self.released = {}, 0, limit_bytes, 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
        used = sum(self.live.values())
        if self.limit is not None and used > self.limit:
            raise torch.OutOfMemoryError(f"out of memory: {used} bytes are more than {self.limit}")
        self.peak = max(self.peak, used)

    def describe(self):
        return "a fake device", self.limit, None

    def default_limit(self, margin):
        return self.limit and int(self.limit * (1 - margin))

    def enforce(self, limit_bytes):
        self.limit = limit_bytes

    @contextmanager
    def attempt(self, batch_size):
        self.release()
        yield
        self.release()

    def reset_peaks(self):
        self.peak = sum(self.live.values())

    def peaks(self):
        return Peaks(self.peak, self.peak)

    def synchronize(self):
        pass

    def release(self):
        self.released += 1


def points(count: int, seed: int = 0) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def linear_task(**functions: object) -> Task:
    """A task that learns four numbers; a name set to None is left out."""
    usual = {
        "build_model": lambda: nn.Linear(4, 1),
        "compute_loss": squared_error,
        "train_dataset": lambda: points(64, seed=1),
        "val_dataset": lambda: points(32, seed=2),
        "build_optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
    }
    return Task(SimpleNamespace(**usual | functions), "model.py")


@pytest.fixture
def fake_device():
    return FakeDevice


@pytest.fixture(name="linear_task")
def make_linear_task():
    return linear_task

"""How fast the training set's batches come, at one setting of torch's data loader, without any training."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import platform
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils.data import DataLoader

from batchtune.child.training.batches import move, training_loader
from batchtune.device._base import DeviceMemory
from batchtune.document import LoaderPoint
from batchtune.protocol.commands import TimeLoader
from batchtune.task.contract import Task

_SEED = 0


def time_loader(
    task: Task, memory: DeviceMemory, command: TimeLoader, clock: Callable[[], float] = time.perf_counter
) -> LoaderPoint:
    """Brings batches from the training set to the device for about as long as asked.

    The clock starts once every worker has delivered a batch, so that neither their start nor what they had prepared
    counts; epochs follow one another, as in training. Workers are gone when this returns.

    Returns:
        Samples a second, or the message of what the loader or the user's data set raised.
    """
    num_workers, pin_memory = command.num_workers, command.pin_memory
    batches: Generator[object, None, None] | None = None
    try:
        context = _start_method(num_workers)
        loader = training_loader(
            task, command.batch_size, _SEED, num_workers=num_workers, pin_memory=pin_memory, context=context
        )
        batches = _epochs(loader)
        del loader
        rate = _rate(batches, lambda batch: _deliver(batch, memory), command, clock)
    except Exception as error:  # noqa: BLE001 - whatever the user's data set raises, or a worker's death
        message = str(error).strip().split("\n")[-1][:300] or type(error).__name__
        return LoaderPoint(num_workers=num_workers, pin_memory=pin_memory, message=message)
    finally:
        if batches is not None:
            batches.close()
        batches = None
        gc.collect()  # the loader ends its workers when it is collected
    return LoaderPoint(num_workers=num_workers, pin_memory=pin_memory, samples_per_second=rate)


def _rate(
    batches: Iterator[object], deliver: Callable[[object], None], command: TimeLoader, clock: Callable[[], float]
) -> float:
    first = clock()
    for batch in itertools.islice(batches, max(1, command.num_workers)):
        deliver(batch)
        if clock() - first > command.seconds:  # slow: what has come since the first says enough
            break
    began, count = clock(), 0
    for batch in batches:
        deliver(batch)
        count += 1
        if clock() - began >= command.seconds:
            break
    if not count:
        raise ValueError("train_dataset yields too few samples to time")
    return count * command.batch_size / (clock() - began)


def _epochs(loader: DataLoader[Any]) -> Generator[object, None, None]:
    """Batches without end, or until an epoch is empty (a data set that can be read once)."""
    more = True
    while more:
        more = False
        for batch in loader:
            more = True
            yield batch


def _deliver(batch: object, memory: DeviceMemory) -> None:
    move(batch, memory.device)
    memory.synchronize()


def _start_method(num_workers: int) -> str | None:
    """Forked workers on Linux, whatever Python's own choice: a task's module cannot be imported by name."""
    forks = platform.system() == "Linux" and "fork" in multiprocessing.get_all_start_methods()
    return "fork" if num_workers and forks else None

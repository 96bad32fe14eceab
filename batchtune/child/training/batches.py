"""Batches on their way to the device: shuffled from the training set, epoch after epoch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from batchtune.errors import UserCodeError
from batchtune.task.contract import Task


def move(value: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; whatever has no `.to` stays as it is."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(moved, field.name, move(getattr(value, field.name), device))
        return moved
    return value


def training_loader(
    task: Task,
    micro_batch_size: int,
    seed: int,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    context: str | None = None,
) -> DataLoader[Any]:
    """Shuffled batches of one epoch of the training set; an incomplete one is left out where it would count as whole.

    Args:
        task: the user's code.
        micro_batch_size: samples of a batch.
        seed: the order follows from it.
        num_workers: processes that load; they live as long as the loader.
        pin_memory: copy batches to page-locked memory, from which the device copies faster.
        context: how worker processes start; None: as torch does.
    """
    data: Any = task.train_data
    iterable = isinstance(data, IterableDataset)
    size = task.train_size()
    sampler = task.sampler(micro_batch_size)
    return DataLoader(
        data,
        batch_size=micro_batch_size,
        shuffle=None if iterable or sampler is not None else True,
        sampler=sampler,
        drop_last=size is None or size >= micro_batch_size,
        collate_fn=task.collate if task.has("collate") else None,
        generator=torch.Generator().manual_seed(seed),
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        multiprocessing_context=context,
    )


class TrainingBatches(Iterator[object]):
    """Batches of the training set without end, epoch after epoch.

    They are shuffled, and incomplete ones left out, unless the task has a train_loader of its own.

    Attributes:
        samples: of the batches so far.
    """

    def __init__(self, task: Task, micro_batch_size: int, seed: int) -> None:
        self._task, self._size, self.samples = task, micro_batch_size, 0
        self._loader = None if task.has("train_loader") else training_loader(task, micro_batch_size, seed)
        self._batches = self._epochs()

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.samples += self._task.samples_in(batch, self._size)
        return batch

    def _epochs(self) -> Iterator[object]:
        while True:
            empty = True
            for batch in self._task.loader(self._size) if self._loader is None else self._loader:
                empty = False
                yield batch
            if empty:
                which = "train_dataset" if self._loader is not None else "train_loader"
                raise UserCodeError(f"{self._task.where}: {which} yields no batch of {self._size} samples in an epoch")

"""Evaluation during a run: the user's metrics, or the mean loss over the validation set."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from batchtune.child.training import heartbeat
from batchtune.child.training.trainer import Trainer, move
from batchtune.device._base import DeviceMemory
from batchtune.device.failures import classify, free_frames, leaves_device_usable
from batchtune.errors import UsageError, UserCodeError
from batchtune.task.contract import Task
from batchtune.task.random_numbers import kept_random_numbers

ENDLESS_SECONDS = 300.0  # of one evaluation on a data set that does not tell its size: it has no end, or is of no use


def metric_value(trainer: Trainer, metric: str, batch_size: int, *, max_batches: int | None = None) -> float:
    """The value of one metric for the model as it stands; training state and random numbers are left as they were.

    Args:
        trainer: whose model is evaluated, in eval mode and without gradients.
        metric: a name that the task's `evaluate` returns; without `evaluate` there is `val_loss`.
        batch_size: samples in one forward pass of the default evaluation.
        max_batches: stop the default evaluation after so many batches.

    Raises:
        UsageError: the task does not return this metric.
    """
    task, model = trainer.task, trainer.model
    modes = {module: module.training for module in model.modules()}
    with kept_random_numbers(trainer.device), torch.no_grad():
        model.eval()
        try:
            if task.has("evaluate"):
                with trainer.precision.autocast():
                    return _pick(task.evaluate(model), metric, task)
            if metric != "val_loss":
                raise _only_val_loss(metric, task)
            return _mean_loss(trainer, batch_size, max_batches)
        finally:
            model.train()  # a train() of the user's own may undo more than modes; frozen modules stay in eval
            for module, training in modes.items():
                module.training = training


def fitting_metric_value(
    trainer: Trainer, memory: DeviceMemory, metric: str, batch_size: int, *, max_batches: int | None = None
) -> tuple[float, int]:
    """The same, in the default evaluation with half as many samples at a time, and so on, where more do not fit.

    Returns:
        The value, and the batch size that did fit.
    """
    while True:
        try:
            return metric_value(trainer, metric, batch_size, max_batches=max_batches), batch_size
        except Exception as error:
            chosen_here = batch_size > 1 and not trainer.task.has("evaluate")
            if not chosen_here or classify(error) != "oom" or not leaves_device_usable(error):
                raise
            free_frames(error)
        memory.release()
        batch_size //= 2


def require_metric(task: Task, device: torch.device, metric: str, precision: str) -> None:
    """Finds out now whether there is such a metric: by an evaluation of a new model, where the task has its own.

    Raises:
        UsageError: the task does not return this metric.
    """
    if task.has("evaluate"):
        metric_value(Trainer(task, device, precision), metric, 1)
    elif metric != "val_loss":
        raise _only_val_loss(metric, task)


def _only_val_loss(metric: str, task: Task) -> UsageError:
    return UsageError(f"objective.metric '{metric}': {task.where} has no evaluate(), so the only metric is 'val_loss'")


def _pick(found: dict[str, float] | float, metric: str, task: Task) -> float:
    if isinstance(found, float):
        return found
    if metric not in found:
        names = ", ".join(found) or "nothing"
        raise UsageError(f"objective.metric '{metric}' is not among what evaluate() in {task.where} returns: {names}")
    return found[metric]


def _mean_loss(trainer: Trainer, batch_size: int, max_batches: int | None) -> float:
    task = trainer.task
    data: Any = task.val_data
    began, has_end = time.monotonic(), hasattr(data, "__len__")
    total, samples = torch.zeros((), device=trainer.device), 0
    for size, batch in itertools.islice(_batches(task, batch_size), max_batches):
        on_device = move(batch, trainer.device)  # the last one and its loss are there until the next are
        with trainer.precision.autocast():
            loss = task.loss(trainer.model, on_device)
        total += loss.float() * size
        samples += size
        heartbeat.beat()
        if not has_end and time.monotonic() - began > ENDLESS_SECONDS:
            raise UserCodeError(
                f"{task.where}: val_dataset has given {samples:,} samples in {ENDLESS_SECONDS:g} s and goes on; "
                "give it an end, or write evaluate()"
            )
    if not samples:
        raise UserCodeError(f"{task.where}: val_dataset yields no samples")
    return float(total) / samples


def _batches(task: Task, batch_size: int) -> Iterator[tuple[int, Any]]:
    """The batches of the validation set, each with the number of its samples."""
    data: Any = task.val_data
    collate: Callable[[Any], Any] = task.collate if task.has("collate") else default_collate
    if isinstance(data, IterableDataset):  # only whoever puts a batch together knows how large it is
        yield from DataLoader(data, batch_size=batch_size, collate_fn=lambda found: (len(found), collate(found)))
        return
    left = len(data)
    for batch in DataLoader(data, batch_size=batch_size, collate_fn=collate):
        size = min(batch_size, left)
        left -= size
        yield size, batch

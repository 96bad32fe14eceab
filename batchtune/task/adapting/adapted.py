"""What adapters to other libraries share: how they refuse, read data loaders and set learning rates."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from batchtune.document import GradientClipping
from batchtune.errors import UsageError, kind_of
from batchtune.task.adapting.clipping import clip_gradients

Copied = TypeVar("Copied")
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


class Adapted:
    """Names of the task contract made from a library's objects; `batchtune.task.contract.Task` calls them.

    Where the forward pass of the library's evaluation is not that of training, it is `validate(model, batch)`.

    Args:
        where: how the user named the object, for messages.

    Attributes:
        samples_per_step: of an optimizer step of the model that is built next; None where that is not known.
        total_steps: optimizer steps that its schedule is laid out for; None where it is to have none.
        accumulation_steps: micro-batches of an optimizer step in the user's own training.
        gradient_clipping: what the library's own trainer would do.
        notes: sentences on what of the user's own training is not taken over, or had to be assumed.
        keeps_modes: the library trains with each module in the mode, training or eval, in which it was built.
    """

    samples_per_step: int | None = None
    total_steps: int | None = None
    accumulation_steps = 1
    gradient_clipping: GradientClipping | None = None
    keeps_modes = False
    notes: tuple[str, ...] = ()

    def __init__(self, where: str) -> None:
        self.where = where

    def refused(self, why: str) -> UsageError:
        """The one line for what the object has or lacks; it is no fault of the user's code."""
        return UsageError(f"{self.where}: {why}")

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        """Sets up the data, and raises UsageError for what `purpose` lacks or cannot be honoured."""
        raise NotImplementedError

    def clip_gradients(self, model: Any, optimizer: torch.optim.Optimizer, clipping: GradientClipping | None) -> None:
        """What the library's own trainer does to the gradients of an optimizer, unscaled, before its step."""
        del model
        clip_gradients([optimizer], clipping)

    def lacks(self, *names: str) -> None:
        """Says that this object does not carry these names of the contract, which others of its kind do."""
        vars(self).update(dict.fromkeys(names))

    def train_sampler(self, batch_size: int) -> Sampler[int] | None:
        """The order of the training set where it is not simply shuffled."""
        del batch_size
        return None


@dataclass(frozen=True)
class LoaderParts:
    """What a data loader was made of, so that it can be made again with another batch size.

    Attributes:
        dataset: what it reads.
        collate: makes a batch from samples.
        sampler: the order of a map-style data set; None where it is shuffled, and for an iterable one.
        batch_size: samples of a batch.
    """

    dataset: Any
    collate: Callable[[Sequence[object]], object]
    sampler: Sampler[int] | None
    batch_size: int

    def sampler_for(self, batch_size: int) -> Sampler[int] | None:
        """The sampler; one that sorts within batches is told their size."""
        if self.sampler is None or not hasattr(self.sampler, "batch_size"):
            return self.sampler
        told: Any = copy.copy(self.sampler)
        told.batch_size = batch_size
        return told  # type: ignore[no-any-return]


def loader_parts(loader: Any, where: str) -> LoaderParts:
    """The parts of a user's data loader.

    Args:
        loader: what their hook returned.
        where: the hook, for messages.

    Raises:
        UsageError: it is no torch DataLoader, or its batch size cannot be changed.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"{where} returned {kind_of(loader)}; batchtune takes a single torch DataLoader")
    batches: Any = loader.batch_sampler
    size = getattr(batches, "batch_size", None) or loader.batch_size
    plain = type(batches) is BatchSampler or type(batches).__module__.startswith("accelerate.")
    if batches is not None and not plain:
        raise UsageError(
            f"{where} has a batch sampler of its own ({type(batches).__name__}), so its batch size cannot be changed"
        )
    if not size:
        raise UsageError(f"{where} has no batch size (batch_size=None), so it cannot be changed")
    collate: Any = loader.collate_fn
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    sampler: Any = None if iterable else getattr(batches, "sampler", loader.sampler)
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    return LoaderParts(loader.dataset, collate, None if shuffled else sampler, int(size))


def resized(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """A data loader like this one, with another batch size.

    Raises:
        UsageError: its batch size cannot be changed.
    """
    parts = loader_parts(loader, "the data loader")
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    order: dict[str, Any] = {} if iterable else {"sampler": parts.sampler_for(batch_size) or loader.sampler}
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
            "prefetch_factor": loader.prefetch_factor,
        }
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        collate_fn=parts.collate,
        drop_last=bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **order,
        **workers,
    )


def set_learning_rate(
    optimizers: Sequence[torch.optim.Optimizer], learning_rate: float, schedulers: Iterable[Any] = (), *, where: str
) -> None:
    """Sets the highest of the groups' learning rates; the other groups and the schedulers keep their ratios to it.

    A schedule's learning rate is the one it is built around: what a warm-up leads to, the maximum of a cycle.

    Raises:
        UsageError: the optimizer has none that could be set.
    """
    groups = [group for each in optimizers for group in each.param_groups]
    try:
        highest = max(float(nominal_rate(group)) for group in groups)
    except (KeyError, TypeError, ValueError):
        highest = 0.0
    if highest <= 0:
        raise UsageError(
            f"{where}: {type(optimizers[0]).__name__} has no learning rate that could be set (is it 0 or None?)"
        )
    factor = learning_rate / highest
    for group in groups:
        group |= {key: group[key] * factor for key in _RATES_OF_GROUPS if key in group}
    for scheduler in _with_nested(schedulers):
        for key in _RATES_OF_SCHEDULERS:
            if isinstance(getattr(scheduler, key, None), list):
                setattr(scheduler, key, [rate * factor for rate in getattr(scheduler, key)])


def nominal_rate(group: Mapping[str, Any]) -> Any:
    """The learning rate that the schedule of a group of parameters is built around; without one, the group's own."""
    return group.get("max_lr", group.get("initial_lr", group["lr"]))


def _with_nested(schedulers: Iterable[Any]) -> Iterable[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_nested(getattr(scheduler, "_schedulers", ()))


def real_copy(value: Copied) -> Copied:
    """A deep copy of modules with their data, also while `estimate` makes every new tensor a fake one.

    Buffers cannot be copied into fakes; a copy with data becomes fake when it is moved to the device.
    """
    fakes: Any = sys.modules.get("torch._subclasses.fake_tensor")
    with fakes.unset_fake_temporarily() if fakes else contextlib.nullcontext():
        return copy.deepcopy(value)


def require_no_arguments(kind: type, where: str, wanted: str) -> None:
    """Raises UsageError for a class that cannot be made without arguments.

    Args:
        kind: the class.
        where: how the user named the task.
        wanted: what a function should return instead.
    """
    needed = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        names = ", ".join(needed)
        raise UsageError(f"{where}: {kind.__name__} needs arguments ({names}); name a function that returns {wanted}")

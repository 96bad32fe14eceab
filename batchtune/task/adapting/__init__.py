"""What adapters to other libraries share: reading data loaders, setting learning rates, applying a result."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from batchtune.document import GradientClipping, Recommendation
from batchtune.errors import UsageError, kind_of
from batchtune.protocol.data import CurrentSettings, TrainingLength

Copied = TypeVar("Copied")
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


class Adapted:
    """Names of the task contract made from a library's objects; `batchtune.task.contract.Task` calls them.

    Where the forward pass of the library's evaluation is not that of training, it is `validate(model, batch)`.

    Attributes:
        samples_per_step: of an optimizer step of the model that is built next; None where that is not known.
        total_steps: optimizer steps that its schedule is laid out for; None where it is to have none.
        asks_for_total_steps: whether the schedule made last has asked how many these are.
        accumulation_steps: micro-batches of an optimizer step in the user's own training.
        training_length: of the user's own training.
        optimizer_settings: what else is known of how it makes its optimizers, once it has.
        gradient_clipping: what the library's own trainer would do.
        notes: sentences on what of the user's own training is not taken over, or had to be assumed.
        keeps_modes: the library trains with each module in the mode, training or eval, in which it was built.
        frees_between: the last step's gradients are freed between forward pass and backward, or by a train_step itself.
    """

    samples_per_step: int | None = None
    total_steps: int | None = None
    asks_for_total_steps = True
    accumulation_steps = 1
    training_length = TrainingLength()
    optimizer_settings: Mapping[str, object] = {}
    gradient_clipping: GradientClipping | None = None
    keeps_modes = False
    frees_between = False
    keeps_rest = False
    notes: tuple[str, ...] = ()

    def __init__(self, where: str) -> None:
        self.where = where

    def refused(self, why: str) -> UsageError:
        """The one line for what the object has or lacks; it is no fault of the user's code."""
        return UsageError(f"{self.where}: {why}")

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        """Sets up the data, and raises UsageError for what `purpose` lacks or cannot be honoured."""
        raise NotImplementedError

    def current_settings(self) -> CurrentSettings:
        """What the user trains with today."""
        return CurrentSettings()

    def clip_gradients(self, model: object, optimizer: Optimizer, clipping: GradientClipping | None) -> None:
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

    The sampler is the order of a map-style data set; None where it is shuffled, and for an iterable one.
    """

    dataset: Dataset[object]
    collate: Callable[[Sequence[object]], object]
    sampler: Sampler[int] | None
    batch_size: int
    drop_last: bool = True

    def sampler_for(self, batch_size: int) -> Sampler[int] | None:
        """The sampler; one that sorts within batches is told their size."""
        if self.sampler is None or not hasattr(self.sampler, "batch_size"):
            return self.sampler
        told = copy.copy(self.sampler)
        told.batch_size = batch_size
        return told


class FromLoader(Adapted):
    """Such an object whose training data come from a data loader of the library's own."""

    @property
    def parts(self) -> LoaderParts:
        """What the training set's loader is made of."""
        raise NotImplementedError

    def train_dataset(self) -> object:
        """What the training set's loader reads."""
        return self.parts.dataset

    @property
    def keeps_rest(self) -> bool:  # type: ignore[override]
        """Whether an epoch ends with a smaller batch of what is left."""
        return not self.parts.drop_last

    def collate(self, samples: Sequence[object]) -> object:
        """A batch as the training set's loader makes it."""
        return self.parts.collate(samples)

    def train_sampler(self, batch_size: int) -> Sampler[int] | None:
        return self.parts.sampler_for(batch_size)


def loader_parts(loader: object, where: str) -> LoaderParts:
    """The parts of the data loader that the hook `where` returned; UsageError if its batch size cannot be changed."""
    if not isinstance(loader, DataLoader):
        raise UsageError(f"{where} returned {kind_of(loader)}; batchtune takes a single torch DataLoader")
    batches = loader.batch_sampler
    size = getattr(batches, "batch_size", None) or loader.batch_size
    plain = type(batches) is BatchSampler or type(batches).__module__.startswith("accelerate.")
    if batches is not None and not plain:
        raise UsageError(
            f"{where} has a batch sampler of its own ({type(batches).__name__}), so its batch size cannot be changed"
        )
    if not size:
        raise UsageError(f"{where} has no batch size (batch_size=None), so it cannot be changed")
    collate: Any = loader.collate_fn
    iterable = isinstance(loader.dataset, IterableDataset)
    sampler: Any = None if iterable else getattr(batches, "sampler", loader.sampler)
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    drop_last = bool(getattr(batches, "drop_last", loader.drop_last))
    return LoaderParts(loader.dataset, collate, None if shuffled else sampler, int(size), drop_last)


def resized(loader: DataLoader[object], batch_size: int) -> DataLoader[object]:
    """A data loader like this one, with another batch size; UsageError where that cannot be changed."""
    parts = loader_parts(loader, "the data loader")
    kept = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "generator"]
    if loader.num_workers:
        kept += ["multiprocessing_context", "persistent_workers", "prefetch_factor"]
    settings = {name: getattr(loader, name) for name in kept}
    if not isinstance(loader.dataset, IterableDataset):
        settings["sampler"] = parts.sampler_for(batch_size) or loader.sampler
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        collate_fn=parts.collate,
        drop_last=parts.drop_last,
        **settings,
    )


def read_from(loader: str, accumulated: str, steps: int) -> str:
    """Where today's batch size was read, and how one is measured that is accumulated in so many steps."""
    return loader if steps == 1 else f"{loader} x {accumulated}, at once where that fits"


def set_learning_rate(
    optimizers: Sequence[Optimizer], learning_rate: float, schedulers: Iterable[object] = (), *, where: str
) -> None:
    """Sets the highest of the groups' learning rates; the other groups and the schedulers keep their ratios to it.

    A schedule's learning rate is the one it is built around: what a warm-up leads to, the maximum of a cycle.
    UsageError where the optimizer has none that could be set.
    """
    try:
        highest = highest_rate(optimizers)
    except (KeyError, TypeError, ValueError):
        highest = 0.0
    if highest <= 0:
        raise UsageError(
            f"{where}: {type(optimizers[0]).__name__} has no learning rate that could be set (is it 0 or None?)"
        )
    factor = learning_rate / highest
    for group in (group for each in optimizers for group in each.param_groups):
        group |= {key: group[key] * factor for key in _RATES_OF_GROUPS if key in group}
    for scheduler in _with_nested(schedulers):
        for key in _RATES_OF_SCHEDULERS:
            if isinstance(getattr(scheduler, key, None), list):
                setattr(scheduler, key, [rate * factor for rate in getattr(scheduler, key)])


def highest_rate(optimizers: Iterable[Optimizer]) -> float:
    """The learning rate by which optimizers are known: the highest of their groups'."""
    return max(float(nominal_rate(group)) for each in optimizers for group in each.param_groups)


def nominal_rate(group: Mapping[str, Any]) -> Any:
    """The learning rate that the schedule of a group of parameters is built around; without one, the group's own."""
    return group.get("max_lr", group.get("initial_lr", group["lr"]))


def _with_nested(schedulers: Iterable[object]) -> Iterable[object]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_nested(getattr(scheduler, "_schedulers", ()))


def real_copy(value: Copied) -> Copied:
    """A deep copy of modules with their data, also while `estimate` makes every new tensor a fake one.

    Buffers cannot be copied into fakes; a copy with data becomes fake when it is moved to the device.
    """
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    with fakes.unset_fake_temporarily() if fakes else contextlib.nullcontext():
        return copy.deepcopy(value)


def require_no_arguments(kind: type, where: str, wanted: str) -> None:
    """Raises UsageError for a class that cannot be made without arguments; `wanted` is what to return instead."""
    needed = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        names = ", ".join(needed)
        raise UsageError(f"{where}: {kind.__name__} needs arguments ({names}); name a function that returns {wanted}")


def clip_gradients(optimizers: Sequence[Optimizer], clipping: GradientClipping | None) -> None:
    """Clips the gradients of all parameters of these optimizers, a norm over all of them together."""
    if clipping is None:
        return
    parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if clipping.norm is not None:
        nn.utils.clip_grad_norm_(parameters, clipping.norm)
    if clipping.value is not None:
        nn.utils.clip_grad_value_(parameters, clipping.value)


def recommended(path: str | os.PathLike[str]) -> Recommendation:
    """What a result file or run folder recommends; UsageError where it recommends nothing, or is not there."""
    from batchtune.result import load_result  # a child has no use for it

    result = load_result(path)
    if result.recommendation is None:
        raise UsageError(f"{os.fspath(path)}: a result of '{result.kind}' that recommends nothing; apply one of 'tune'")
    return result.recommendation


def say(difference: str) -> None:
    """Tells the user what a callback could not apply."""
    warnings.warn(f"batchtune: {difference}", stacklevel=3)


def require_world(found: Recommendation, world_size: int) -> None:
    """Says so where training runs on another number of ranks than the recommendation is for."""
    if world_size != found.world_size:
        batch = found.micro_batch_size * found.gradient_accumulation_steps * world_size
        say(
            f"the result is for {found.world_size} ranks and this is training on {world_size}, so the global "
            f"batch size is {batch} instead of {found.global_batch_size}"
        )

"""The task contract: the names the user's code carries, what they must return, and what stands in for the others."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from batchtune.document import GradientClipping
from batchtune.errors import UserCodeError, kind_of
from batchtune.protocol.commands import SamplesSeen
from batchtune.task.adapting.adapted import Adapted
from batchtune.task.optimizers import Optimizers, build_optimizers, build_schedulers, needs_closure
from batchtune.task.random_numbers import kept_random_numbers, seed_the_cpu, seeded
from batchtune.task.samples import LOOK_SECONDS, find_largest, in_random_order, longest_by_column, tensor_bytes
from batchtune.vocabulary import Purpose

NAMES = {
    "build_model": "build_model() returning an nn.Module or a dict of them",
    "train_dataset": "train_dataset() returning a torch Dataset",
    "train_loader": "train_loader(batch_size) returning the batches of an epoch, such as a DataLoader",
    "make_batch": "make_batch(batch_size) returning the worst-case batch",
    "compute_loss": "compute_loss(model, batch) returning a scalar tensor",
    "train_step": "train_step(model, batch, optimizers, context) returning a scalar tensor",
    "build_optimizer": "build_optimizer(model, lr) returning a torch Optimizer, or a list or dict of them",
    "val_dataset": "val_dataset() returning a torch Dataset",
    "evaluate": "evaluate(model) returning a float or a dict of floats",
    "build_scheduler": "build_scheduler(optimizer, total_steps)",
    "collate": "collate(samples) returning a batch",
    "batch_size_of": "batch_size_of(batch) returning its number of samples",
}
_SEEDS = {"train_dataset": 0, "val_dataset": 1}


@dataclass(eq=False)
class Task:
    """The user's code behind the names of the contract.

    Attributes:
        source: the module or object that carries the names.
        where: how the user named it, for messages.
        is_for_inference: only forward passes are asked of it.
    """

    source: Any
    where: str
    is_for_inference: bool = field(default=False, init=False)
    _trains_anew: bool = field(default=False, init=False)
    _latest_model: weakref.ref[nn.Module] | None = field(default=None, init=False)
    _worst_samples: list[Any] = field(default_factory=list, init=False)
    _samples_seen: SamplesSeen | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, what in NAMES.items():
            value = getattr(self.source, name, None)
            if value is not None and not callable(value):
                raise UserCodeError(f"{self.where}: '{name}' is {kind_of(value)}; it must be {what}")
            if value is not None:
                self._check_signature(name, value)
        self._need("build_model")

    def _check_signature(self, name: str, function: Callable[..., object]) -> None:
        """Raises UserCodeError where a function of the user's cannot be called as the contract says."""
        call, _, _ = NAMES[name].partition(" returning")
        arguments = [part for part in call.partition("(")[2].rstrip(")").split(", ") if part]
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # compiled code does not tell
            return
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UserCodeError(f"{self.where}: {name}{signature} cannot be called as {call}: {error}") from None

    def has(self, name: str) -> bool:
        """Whether the user's code carries this name."""
        return getattr(self.source, name, None) is not None

    def require(self, purpose: Purpose) -> None:
        """Raises UserCodeError naming the first piece that `purpose` lacks, or an adapter's UsageError."""
        self.is_for_inference = purpose == "inference"
        if isinstance(self.source, Adapted):
            self.source.require("tune" if purpose == "tune" else "probe")
        if purpose != "tune":
            self._need("make_batch", "train_dataset", "train_loader")
            if self.is_for_inference and self.has("train_step"):
                self._need("compute_loss")
        else:
            self._trains_anew = True
            self._need("train_dataset", "train_loader")
            self._need("val_dataset", "evaluate")
            if self.has("train_step") and not self.has("compute_loss"):
                self._need("evaluate")
            if self.train_size() == 1:
                raise UserCodeError(f"{self.where}: train_dataset has 1 sample; there is no batch size to choose")
            if not self.has("evaluate"):
                self.val_data  # noqa: B018 - an empty set is to be found now, not in the first evaluation

    def _need(self, *any_of: str) -> None:
        if not any(self.has(name) for name in any_of):
            missing = " or ".join(NAMES[name] for name in any_of)
            raise UserCodeError(f"{self.where}: no {missing}; 'batchtune init' writes a template with every function")

    def model(self) -> nn.Module:
        """A new model on the CPU; several modules that belong together, such as a criterion's, are a ModuleDict."""
        model = self.source.build_model()
        if isinstance(model, Mapping) and model:
            model = self._modules(model)
        if not isinstance(model, nn.Module):
            raise UserCodeError(
                f"{self.where}: build_model returned {kind_of(model)}, not an nn.Module or a dict of them"
                f"{_only(model, nn.Module)}"
            )
        if self._trains_anew and self._latest_model is not None and self._latest_model() is model:
            raise UserCodeError(
                f"{self.where}: build_model returned the same object again, which other runs have trained or will; "
                "make a new model each time, for example copy.deepcopy(model)"
            )
        self._latest_model = weakref.ref(model)
        if not _is_hugging_face(model):
            self._need("compute_loss", "train_step")
        return model

    def _modules(self, given: Mapping[str, Any]) -> nn.ModuleDict:
        for name, each in given.items():
            if not isinstance(each, nn.Module):
                raise UserCodeError(
                    f"{self.where}: build_model returned a dict in which {name!r} is {kind_of(each)}, not an "
                    "nn.Module; a train_step keeps anything else in context.state"
                )
        try:
            return nn.ModuleDict(given)
        except (KeyError, TypeError) as error:  # a name that a ModuleDict has for itself, or no text
            raise UserCodeError(f"{self.where}: build_model returned a dict with a wrong key: {error}") from None

    def optimizers(self, model: nn.Module, learning_rate: float, **arguments: Any) -> Optimizers:
        """The user's optimizers, or AdamW; see `build_optimizers`."""
        return build_optimizers(self.source, self.where, model, learning_rate, **arguments)

    def schedulers(self, optimizers: Optimizers, total_steps: int) -> list[Any]:
        """The user's schedulers, over so many optimizer steps; see `build_schedulers`."""
        return build_schedulers(self.source, self.where, optimizers, total_steps)

    @cached_property
    def gradient_clipping(self) -> GradientClipping | None:
        """What the user's code says is done to gradients before the optimizers' steps; None: nothing."""
        given = getattr(self.source, "gradient_clipping", None)
        if given is None or isinstance(given, GradientClipping):
            return given
        if isinstance(given, Mapping) and len(given) == 1 and given.keys() <= GradientClipping.model_fields.keys():
            with contextlib.suppress(ValueError):
                return GradientClipping.model_validate(given)
        raise UserCodeError(
            f"{self.where}: gradient_clipping is {str(given)[:60]}; write gradient_clipping = {{'norm': 1.0}}, or "
            "{'value': 0.5}"
        )

    def accumulates(self, optimizers: Optimizers) -> bool:
        """Whether a step may be made of several micro-batches."""
        manual = isinstance(self.source, Adapted) and self.has("train_step")
        return not manual and not any(needs_closure(each) for each in optimizers)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The scalar training loss of a batch."""
        loss = self.source.compute_loss(model, batch) if self.has("compute_loss") else model(**batch).loss
        return self._scalar(loss, "compute_loss")

    def train_step(self, model: nn.Module, batch: Any, optimizers: Optimizers, context: object) -> Tensor:
        """One pass of the user's own step; returns the loss to watch."""
        return self._scalar(self.source.train_step(model, batch, optimizers.given, context), "train_step")

    def _scalar(self, loss: Any, name: str) -> Tensor:
        """Checked, so that a wrong one is named and not met in backward."""
        if not isinstance(loss, Tensor):
            raise UserCodeError(f"{self.where}: {name} returned {kind_of(loss)}, not a tensor{_only(loss, Tensor)}")
        if loss.dim() != 0:
            shape = tuple(loss.shape)
            raise UserCodeError(f"{self.where}: {name} returned shape {shape}, not a scalar; take its .mean()")
        return loss

    def validate(self, model: nn.Module, batch: Any) -> object:
        """The forward pass of an evaluation: an adapted library's own where it has one, else the loss."""
        own = getattr(self.source, "validate", None) if isinstance(self.source, Adapted) else None
        return (own or self.loss)(model, batch)

    @cached_property
    def train_data(self) -> Dataset[object]:
        """The training set, built once."""
        return self._dataset("train_dataset")

    @cached_property
    def val_data(self) -> Dataset[object] | None:
        """The validation set, built once; None where the task has none."""
        return self._dataset("val_dataset") if self.has("val_dataset") else None

    def _dataset(self, name: str) -> Dataset[object]:
        with seeded(_SEEDS[name]):  # what is drawn at random is the same in every process, and not in both sets
            data = getattr(self.source, name)()
        if not isinstance(data, IterableDataset) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            kind = kind_of(data)
            raise UserCodeError(f"{self.where}: {name} returned {kind}, not a Dataset with __getitem__ and __len__")
        if isinstance(data, Sized) and len(data) == 0:
            raise UserCodeError(f"{self.where}: {name} returned a data set of 0 samples")
        return cast("Dataset[object]", data)

    def loader(self, batch_size: int) -> Iterable[object]:
        """The batches of an epoch as the user makes them."""
        found = self.source.train_loader(batch_size)
        if not hasattr(found, "__iter__"):
            raise UserCodeError(f"{self.where}: train_loader returned {kind_of(found)}, not batches to go through")
        return cast("Iterable[object]", found)

    def samples_in(self, batch: object, batch_size: int) -> int:
        """Samples of a batch of about this size: as many as the user counts, where they do."""
        if not self.has("batch_size_of"):
            return batch_size
        found = self.source.batch_size_of(batch)
        if not isinstance(found, int) or found < 1:
            raise UserCodeError(f"{self.where}: batch_size_of returned {found!r}, not a number of samples from 1 up")
        return found

    def train_size(self) -> int | None:
        """Samples in the training set; None where there is no set or it does not tell."""
        if not self.has("train_dataset"):
            return None
        return len(self.train_data) if isinstance(self.train_data, Sized) else None

    def collate(self, samples: Sequence[object]) -> object:
        """A batch from samples, by the user's function or torch's."""
        return self.source.collate(list(samples)) if self.has("collate") else default_collate(list(samples))

    def sampler(self, batch_size: int) -> Sampler[int] | None:
        """The order of the training set where an adapted data loader has one of its own; None: shuffled."""
        return self.source.train_sampler(batch_size) if isinstance(self.source, Adapted) else None

    def worst_batch(self, batch_size: int) -> object:
        """The batch that an attempt runs: the user's `make_batch`, or the largest samples of the training set.

        The largest of all is repeated; those that are larger in a dimension come once, so that padding meets them.
        """
        if self.has("make_batch"):
            return self.source.make_batch(batch_size)
        if self.has("train_loader"):
            return self._largest_batch(batch_size)
        if not self._worst_samples:
            self.find_worst_samples()
        largest, *others = self._worst_samples
        others = others[: batch_size - 1]
        return self.collate([largest] * (batch_size - len(others)) + others)

    def _largest_batch(self, batch_size: int) -> object:
        """The largest of the first batches of an epoch, as many as there is time for."""
        deadline, found = time.monotonic() + LOOK_SECONDS / 4, None  # each attempt looks
        with kept_random_numbers(torch.device("cpu")):
            seed_the_cpu(0)
            for batch in self.loader(batch_size):
                if found is None or tensor_bytes(batch) > tensor_bytes(found):
                    found = batch
                if time.monotonic() >= deadline:
                    break
        if found is None:
            raise UserCodeError(f"{self.where}: train_loader({batch_size}) yields no batch")
        size = self.samples_in(found, batch_size)
        if size != batch_size:
            raise UserCodeError(
                f"{self.where}: train_loader({batch_size}) yields batches of {size} samples, says batch_size_of; they "
                "must be as large as asked for"
            )
        return found

    def find_worst_samples(self, known: SamplesSeen | None = None) -> SamplesSeen | None:
        """Looks for the samples of the worst batch, or takes those that another process has found.

        Returns:
            What was seen; None where the user makes the batches.
        """
        if self.has("make_batch") or self.has("train_loader"):
            return None
        if self._worst_samples:
            return self._samples_seen
        longest = [] if known or self._is_stream() else longest_by_column(self.train_data)
        seconds, total = (math.inf, None) if known else (LOOK_SECONDS, self.train_size())
        with kept_random_numbers(torch.device("cpu")):
            samples = self._samples(known.places if known else (), longest)
            seen, self._worst_samples = find_largest(samples, total, seconds=seconds)
        if not self._worst_samples:
            raise UserCodeError(f"{self.where}: train_dataset returned a data set of 0 samples")
        self._samples_seen = known or seen.model_copy(update={"is_all": seen.is_all or bool(longest)})
        return self._samples_seen

    def _is_stream(self) -> bool:
        return isinstance(self.train_data, IterableDataset) or not isinstance(self.train_data, Sized)

    def _samples(self, places: Sequence[int], first: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The samples at these places, or all at random, each with its place, from which its random numbers follow."""
        data: Any = self.train_data
        if self._is_stream():
            seed_the_cpu(0)
            some = zip(range(max(places) + 1), data, strict=False) if places else enumerate(data)
            yield from (each for each in some if each[0] in places or not places)
            return
        for place in places or itertools.chain(first, in_random_order(len(data))):
            seed_the_cpu(place % 2**32)
            yield place, data[place]

    def evaluate(self, model: nn.Module, max_batches: int | None = None) -> dict[str, float] | float:
        """The user's metrics; a plain float is whatever metric the configuration names.

        Args:
            model: in eval mode, on its device.
            max_batches: enough for a look at memory; an `evaluate` of the user's own is not told.
        """
        brief = {"max_batches": max_batches} if isinstance(self.source, Adapted) else {}
        found = self.source.evaluate(model, **brief)
        if isinstance(found, Mapping):
            return {str(name): self._number(value, f"evaluate()[{name!r}]") for name, value in found.items()}
        return self._number(found, "evaluate()")

    def _number(self, value: Any, what: str) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserCodeError(
                f"{self.where}: {what} is {kind_of(value)}; evaluate must return a float or a dict of floats"
            ) from None


def _is_hugging_face(model: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in inspect.getmro(type(model)))


def _only(found: Any, kind: type) -> str:
    """Where to find what was asked for, if a tuple, list or mapping has it; of several tensors, the only scalar."""
    places = (
        found.items() if isinstance(found, Mapping) else enumerate(found) if isinstance(found, list | tuple) else ()
    )
    fitting = [(place, each) for place, each in places if isinstance(each, kind)]
    if len(fitting) > 1:
        fitting = [(place, each) for place, each in fitting if isinstance(each, Tensor) and each.dim() == 0]
    return f"; return its [{fitting[0][0]!r}] alone" if len(fitting) == 1 else ""

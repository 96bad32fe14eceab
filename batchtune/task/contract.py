"""The task contract: the names the user's code carries, what they must return, and what stands in for the others."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from batchtune.errors import UsageError, UserCodeError, kind_of
from batchtune.task.adapting.adapted import Adapted
from batchtune.task.random_numbers import seeded

NAMES = {
    "build_model": "build_model() returning an nn.Module",
    "train_dataset": "train_dataset() returning a torch Dataset",
    "make_batch": "make_batch(batch_size) returning the worst-case batch",
    "compute_loss": "compute_loss(model, batch) returning a scalar tensor",
    "build_optimizer": "build_optimizer(model, lr) returning a torch Optimizer",
    "val_dataset": "val_dataset() returning a torch Dataset",
    "evaluate": "evaluate(model) returning a float or a dict of floats",
    "build_scheduler": "build_scheduler(optimizer, total_steps)",
    "collate": "collate(samples) returning a batch",
}
_SAMPLED_FOR_LARGEST = 64
_NO_SAMPLE: Any = object()  # None may be one
_SEEDS = {"train_dataset": 0, "val_dataset": 1}


@dataclass(eq=False)
class Task:
    """The user's code behind the names of the contract.

    Attributes:
        source: the module or object that carries the names.
        where: how the user named it, for messages.
    """

    source: Any
    where: str
    _trains_anew: bool = field(default=False, init=False)
    _latest_model: weakref.ref[nn.Module] | None = field(default=None, init=False)

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

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        """Raises UserCodeError naming the first piece that `purpose` lacks, or an adapter's UsageError."""
        if isinstance(self.source, Adapted):
            self.source.require(purpose)
        if purpose == "probe":
            self._need("make_batch", "train_dataset")
        else:
            self._trains_anew = True
            self._need("train_dataset")
            self._need("val_dataset", "evaluate")
            if self.train_size() == 1:
                raise UserCodeError(f"{self.where}: train_dataset has 1 sample; there is no batch size to choose")
            if not self.has("evaluate"):
                self.val_data  # noqa: B018 - an empty set is to be found now, not in the first evaluation

    def _need(self, *any_of: str) -> None:
        if not any(self.has(name) for name in any_of):
            missing = " or ".join(NAMES[name] for name in any_of)
            raise UserCodeError(f"{self.where}: no {missing}; 'batchtune init' writes a template with every function")

    def model(self) -> nn.Module:
        """A new model on the CPU."""
        model = self.source.build_model()
        if not isinstance(model, nn.Module):
            raise UserCodeError(f"{self.where}: build_model returned {kind_of(model)}, not an nn.Module")
        if self._trains_anew and self._latest_model is not None and self._latest_model() is model:
            raise UserCodeError(
                f"{self.where}: build_model returned the same object again, which other runs have trained or will; "
                "make a new model each time, for example copy.deepcopy(model)"
            )
        self._latest_model = weakref.ref(model)
        if not self.has("compute_loss") and not _is_hugging_face(model):
            self._need("compute_loss")
        return model

    def optimizer(self, model: nn.Module, learning_rate: float, **arguments: Any) -> torch.optim.Optimizer:
        """The user's optimizer, or AdamW, with whatever arguments of its maker are not left at their defaults."""
        if not self.has("build_optimizer"):
            return torch.optim.AdamW(model.parameters(), lr=learning_rate, **arguments)
        optimizer = self.source.build_optimizer(model, learning_rate, **arguments)
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = kind_of(optimizer)
            raise UserCodeError(f"{self.where}: build_optimizer returned {kind}, not a torch.optim.Optimizer")
        if _needs_closure(optimizer):
            raise UserCodeError(
                f"{self.where}: build_optimizer returned {kind_of(optimizer)}, whose step() needs a closure; batchtune "
                "trains with optimizers whose step() needs none, such as SGD or AdamW"
            )
        return optimizer

    def optimizer_defaults(self, names: Iterable[str]) -> dict[str, bool | int | float | str]:
        """What these arguments of build_optimizer are today: their defaults.

        Raises:
            UsageError: it takes no such argument, or one that has no default, or one that is no plain value.
        """
        maker = self.source.build_optimizer if self.has("build_optimizer") else torch.optim.AdamW
        what = "build_optimizer" if self.has("build_optimizer") else "torch.optim.AdamW (there is no build_optimizer)"
        parameters = inspect.signature(maker).parameters
        taken = [name for name, each in parameters.items() if isinstance(each.default, bool | int | float | str)]
        found = {}
        for name in names:
            if name in taken:
                found[name] = parameters[name].default
            elif name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                raise UsageError(
                    f"space.{name}: {what} has no number, switch or text as default of '{name}'; give it one, the "
                    f"value you run today: def build_optimizer(model, lr, {name}=...)"
                )
            else:
                known = ", ".join(each for each in taken if each not in {"lr", "maximize"})
                remedy = f"it takes {known}" if known else f"write def build_optimizer(model, lr, {name}=...)"
                raise UsageError(f"space.{name}: {what} takes no argument '{name}'; {remedy}")
        return found

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        """The user's scheduler, or None. It is stepped once after each optimizer step.

        Args:
            optimizer: whose learning rates it sets.
            total_steps: its horizon: the optimizer steps that fit into budget.run at this configuration's pace. That
                is part of the configuration: a run that is capped, stopped early or confirmed for longer has the same.
        """
        if not self.has("build_scheduler"):
            return None
        scheduler = self.source.build_scheduler(optimizer, total_steps)
        if scheduler is not None and not hasattr(scheduler, "step"):
            raise UserCodeError(f"{self.where}: build_scheduler returned {kind_of(scheduler)}, which has no step()")
        if isinstance(scheduler, ReduceLROnPlateau):
            why = "which waits for a metric at the end of an epoch; use a schedule by steps, or none"
            raise UserCodeError(f"{self.where}: build_scheduler returned {kind_of(scheduler)}, {why}")
        return scheduler

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The scalar training loss of a batch; checked, so that a wrong one is named and not met in backward."""
        loss: Any = self.source.compute_loss(model, batch) if self.has("compute_loss") else model(**batch).loss
        if not isinstance(loss, Tensor):
            raise UserCodeError(f"{self.where}: compute_loss returned {kind_of(loss)}, not a tensor")
        if loss.dim() != 0:
            shape = tuple(loss.shape)
            raise UserCodeError(f"{self.where}: compute_loss returned shape {shape}, not a scalar; take its .mean()")
        return loss

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
        """The batch that an attempt runs: the user's `make_batch`, or the largest of the first samples, repeated."""
        if self.has("make_batch"):
            return self.source.make_batch(batch_size)
        return self.collate([self._largest_sample] * batch_size)

    @cached_property
    def _largest_sample(self) -> Any:
        data: Any = self.train_data
        size = self.train_size()
        samples: Iterable[Any]
        if size is None or isinstance(data, IterableDataset):
            samples = (sample for sample, _ in zip(data, range(_SAMPLED_FOR_LARGEST), strict=False))
        else:
            samples = (data[index] for index in range(0, size, max(1, size // _SAMPLED_FOR_LARGEST)))
        largest = max(samples, key=tensor_bytes, default=_NO_SAMPLE)
        if largest is _NO_SAMPLE:
            raise UserCodeError(f"{self.where}: train_dataset returned a data set of 0 samples")
        return largest

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


def tensor_bytes(value: object) -> int:
    """Bytes of the tensors in a sample or batch of nested lists, tuples and dicts.

    Arrays count by their nbytes, numbers (a tokenizer's lists of them) as what torch makes of them.
    """
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(item) for item in value)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int | float):
        return 8
    return int(getattr(value, "nbytes", 0))


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class says so: a schedule puts something else in the place of the optimizer's own step()."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except ValueError:  # compiled code does not tell
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_hugging_face(model: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in inspect.getmro(type(model)))

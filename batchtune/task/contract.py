"""The task contract: the names the user's code carries, what they must return, and what stands in for the others."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, SupportsFloat

from torch import Tensor, nn

from batchtune.document import GradientClipping
from batchtune.errors import UsageError, UserCodeError, kind_of
from batchtune.task.lengths import offers, takes
from batchtune.task.optimizers import STEPS_PER_EPOCH, Optimizers, TaskOptimizers
from batchtune.task.own_loader import WHOLE
from batchtune.vocabulary import Purpose

NAMES = {
    "build_model": "build_model() returning an nn.Module or a dict of them",
    "train_dataset": "train_dataset() returning a torch Dataset",
    "train_loader": "train_loader(batch_size) returning the batches of an epoch, such as a DataLoader",
    "make_batch": "make_batch(batch_size) returning the worst-case batch",
    "sample_length": "sample_length(sample) returning a whole number, or a tuple of them",
    "compute_loss": "compute_loss(model, batch) returning a scalar tensor",
    "train_step": "train_step(model, batch, optimizers, context) returning a scalar tensor",
    "build_optimizer": "build_optimizer(model, lr) returning a torch Optimizer, or a list or dict of them",
    "val_dataset": "val_dataset() returning a torch Dataset",
    "evaluate": "evaluate(model) returning a float or a dict of floats",
    "build_scheduler": "build_scheduler(optimizer, total_steps)",
    "collate": "collate(samples) returning a batch",
    "batch_size_of": "batch_size_of(batch) returning its number of samples",
}

CHECKPOINTING = "activation_checkpointing"
"""The parameter of build_model by which a task offers to compute activations again in backward."""


@dataclass(eq=False)
class Task(TaskOptimizers):
    """The user's code behind the names of the contract.

    Attributes:
        is_for_inference: only forward passes are asked of it.
        activation_checkpointing: of models for which nothing else is asked; None: as the user's code has it.
        differentiates: evaluation was seen to take gradients of its own, as of a differential equation's residual.
    """

    is_for_inference: bool = field(default=False, init=False)
    activation_checkpointing: bool | None = field(default=None, init=False)
    differentiates: bool = field(default=False, init=False)
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
        asked = {STEPS_PER_EPOCH: 1} if name == "build_scheduler" and offers(function, STEPS_PER_EPOCH) else {}
        try:
            signature.bind(*arguments, **asked)
        except TypeError as error:
            if name == "make_batch" and takes(function, 2):
                return
            raise UserCodeError(f"{self.where}: {name}{signature} cannot be called as {call}: {error}") from None

    def require(self, purpose: Purpose, world_size: int = 1) -> None:
        """Raises UserCodeError naming the first piece that `purpose` lacks, or UsageError: ranks cannot train it."""
        self.is_for_inference = purpose == "inference"
        if world_size > 1 and self.has("train_step"):
            told = f"{world_size}: {self.where} has a train_step, which trains on one device; leave it out"
            raise UsageError(told, setting="ranks")
        if self.adapted:
            self.adapted.require("tune" if purpose == "tune" else "probe")
        if purpose != "tune":
            self._need("make_batch", "train_dataset", "train_loader")
            if self.is_for_inference and self.has("train_step"):
                self._need("compute_loss")
            return
        self._trains_anew = True
        self._need("train_dataset", "train_loader")
        self._need("val_dataset", "evaluate")
        if self.has("train_step") and not self.has("compute_loss"):
            self._need("evaluate")
        if self.train_size() == 1 and not self.has("batch_size_of"):
            whole = f"where it is a whole graph, say so: {WHOLE}"
            raise UserCodeError(f"{self.where}: train_dataset has 1 sample; there is no batch size to choose; {whole}")
        if not self.has("evaluate"):
            self.val_data  # noqa: B018 - an empty set is to be found now, not in the first evaluation

    def _need(self, *any_of: str) -> None:
        if not any(self.has(name) for name in any_of):
            missing = " or ".join(NAMES[name] for name in any_of)
            raise UserCodeError(f"{self.where}: no {missing}; 'batchtune init' writes a template with every function")

    def model(self, activation_checkpointing: bool | None = None) -> nn.Module:
        """A new model on the CPU; several modules that belong together, such as a criterion's, are a ModuleDict.

        Raises:
            UsageError: activation checkpointing is asked for, or the lack of it, and the task does not offer it.
        """
        again = self.activation_checkpointing if activation_checkpointing is None else activation_checkpointing
        model = self.source.build_model() if again is None else _built(self.source.build_model, self.where, again=again)
        if isinstance(model, Mapping) and model:
            model = self._modules(model)
        if not isinstance(model, nn.Module):
            raise UserCodeError(
                f"{self.where}: build_model returned {kind_of(model)}, not an nn.Module or a dict of them"
                f"{_only(model, nn.Module)}"
            )
        odd = [kind.__name__ for kind in {type(each) for each in model.modules()} if not takes(kind.train, 2)]
        if odd:
            why = "takes other arguments than torch's, which sets the mode; give yours another name"
            raise UserCodeError(f"{self.where}: train() of {odd[0]} {why}")
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserCodeError(
                f"{self.where}: build_model leaves parameters on the meta device, where they have no values; build it "
                "on the CPU (with --ranks N --strategy fsdp no process holds all of it even so)"
            )
        if self._trains_anew and self._latest_model is not None and self._latest_model() is model:
            raise UserCodeError(
                f"{self.where}: build_model returned the same object again, which other runs have trained or will; "
                "make a new model each time, for example copy.deepcopy(model)"
            )
        self._latest_model = weakref.ref(model)
        if all(base.__name__ != "PreTrainedModel" for base in inspect.getmro(type(model))):  # which has its loss
            self._need("compute_loss", "train_step")
        return model

    def _modules(self, given: Mapping[str, object]) -> nn.ModuleDict:
        modules: dict[str, nn.Module] = {}
        for name, each in given.items():
            if not isinstance(each, nn.Module):
                raise UserCodeError(
                    f"{self.where}: build_model returned a dict in which {name!r} is {kind_of(each)}, not an "
                    "nn.Module; a train_step keeps anything else in context.state"
                )
            modules[name] = each
        try:
            return nn.ModuleDict(modules)
        except (KeyError, TypeError) as error:  # a name that a ModuleDict has for itself, or no text
            raise UserCodeError(f"{self.where}: build_model returned a dict with a wrong key: {error}") from None

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

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The scalar training loss of a batch."""
        loss = self.source.compute_loss(model, batch) if self.has("compute_loss") else model(**batch).loss
        return self._scalar(loss, "compute_loss")

    def train_step(self, model: nn.Module, batch: object, optimizers: Optimizers, context: object) -> Tensor:
        """One pass of the user's own step; returns the loss to watch."""
        return self._scalar(self.source.train_step(model, batch, optimizers.given, context), "train_step")

    def _scalar(self, loss: object, name: str) -> Tensor:
        """Checked, so that a wrong one is named and not met in backward."""
        if not isinstance(loss, Tensor):
            raise UserCodeError(f"{self.where}: {name} returned {kind_of(loss)}, not a tensor{_only(loss, Tensor)}")
        if loss.dim() != 0:
            shape = tuple(loss.shape)
            raise UserCodeError(f"{self.where}: {name} returned shape {shape}, not a scalar; take its .mean()")
        return loss

    def validate(self, model: nn.Module, batch: object) -> object:
        """The forward pass of an evaluation: an adapted library's own where it has one, else the loss."""
        own = getattr(self.adapted, "validate", None)
        return (own or self.loss)(model, batch)

    def evaluate(self, model: nn.Module, max_batches: int | None = None, *, rank: int = 0) -> dict[str, float] | float:
        """The user's metrics for a model in eval mode; a plain float is whatever metric the configuration names.

        An adapter is told of `max_batches`, which are enough for a look at memory. Ranks but the first may have none.
        """
        found = self.source.evaluate(model, **({"max_batches": max_batches} if self.adapted else {}))
        if rank and found is None:
            return {}
        if isinstance(found, Mapping):
            return {str(name): self._number(value, f"evaluate()[{name!r}]") for name, value in found.items()}
        return self._number(found, "evaluate()")

    def _number(self, value: SupportsFloat, what: str) -> float:
        try:
            return float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError):
            raise UserCodeError(
                f"{self.where}: {what} is {kind_of(value)}; evaluate must return a float or a dict of floats"
            ) from None


def _built(build: Callable[..., object], where: str, *, again: bool) -> object:
    """What the user's build_model makes with activation checkpointing or without, as asked."""
    if offers(build, CHECKPOINTING):
        return build(**{CHECKPOINTING: again})
    model = build()
    own = [f"{kind}_checkpointing_{'enable' if again else 'disable'}" for kind in ("activation", "gradient")]
    switch = next((getattr(model, name) for name in own if hasattr(model, name)), None)
    if switch is None or not getattr(model, "supports_gradient_checkpointing", False):  # as Hugging Face's models have
        raise UsageError(
            f"{CHECKPOINTING} {str(again).lower()}: {where}: build_model does not offer it; give it a parameter "
            f"{CHECKPOINTING}=False, by which blocks go through torch.utils.checkpoint.checkpoint, or leave "
            "that key out"
        )
    switch()
    return model


def _only(found: object, kind: type) -> str:
    """Where to find what was asked for, if a tuple, list or mapping has it; of several tensors, the only scalar."""
    places: Iterable[tuple[object, object]] = ()
    if isinstance(found, Mapping | list | tuple):
        places = found.items() if isinstance(found, Mapping) else enumerate(found)
    fitting = [(place, each) for place, each in places if isinstance(each, kind)]
    if len(fitting) > 1:
        fitting = [(place, each) for place, each in fitting if isinstance(each, Tensor) and each.dim() == 0]
    return f"; return its [{fitting[0][0]!r}] alone" if len(fitting) == 1 else ""

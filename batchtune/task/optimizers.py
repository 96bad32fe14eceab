"""The optimizers and schedulers of a task: one of each, or several that train together."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchtune.document import OptimizerSettings
from batchtune.errors import UsageError, UserCodeError, kind_of

_OF_TORCH = {"lr", "foreach", "fused", "capturable", "differentiable"}  # how it computes, not what


class Optimizers(Sequence[Optimizer]):
    """The optimizers of a run, in the user's order.

    Args:
        given: one optimizer, or a list, tuple or dict of them.

    Attributes:
        given: as the user's build_optimizer returned it.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self._each = list(several(given))

    def __getitem__(self, index: Any) -> Any:
        return self._each[index]

    def __len__(self) -> int:
        return len(self._each)

    @property
    def name(self) -> str:
        """Their classes, as a reader knows them: `AdamW`, `Muon + AdamW`."""
        return " + ".join(dict.fromkeys(type(each).__name__ for each in self._each))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all."""
        return [group for each in self._each for group in each.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What they train."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def settings(self) -> OptimizerSettings:
        """What they are made with, as far as plain values say so; of several optimizers, what none has otherwise."""
        groups = [
            {name: _plain(group[name]) for name in inspect.signature(type(each)).parameters if name in group}
            for each in self._each
            for group in each.param_groups
        ]
        names = [name for name in dict.fromkeys(name for group in groups for name in group) if name not in _OF_TORCH]
        first = groups[0]
        differing = [name for name in [*names, "lr"] if any(each.get(name) != first.get(name) for each in groups)]
        alike = {name: first[name] for name in names if name not in differing}
        known = {name: value for name, value in alike.items() if value is not None}
        if known.get("maximize") is False:  # other libraries' optimizers do not know the word
            del known["maximize"]
        return OptimizerSettings(values=known, differing=differing)

    def zero_grad(self) -> None:
        """Frees the gradients of all."""
        for each in self._each:
            each.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """As a checkpoint keeps them."""
        return [each.state_dict() for each in self._each]


def _plain(value: Any) -> bool | int | float | str | list[float] | None:
    """A setting as JSON has it; None for what is no plain value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
        return [float(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def several(given: Any) -> Iterator[Any]:
    """One object by itself, or those in a list, tuple or dict."""
    yield from given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else (given,)


def build_optimizers(source: Any, where: str, model: nn.Module, learning_rate: float, **arguments: Any) -> Optimizers:
    """The user's optimizers, or AdamW, with whatever arguments of their maker are not left at their defaults.

    Raises:
        UserCodeError: it is something else, or one that only a train_step can step.
    """
    if not _has(source, "build_optimizer"):
        return Optimizers(torch.optim.AdamW(model.parameters(), lr=learning_rate, **arguments))
    given = source.build_optimizer(model, learning_rate, **arguments)
    found = list(several(given))
    for each in found or [given]:
        if not isinstance(each, Optimizer):
            what = kind_of(given) if each is given or not found else f"{kind_of(given)} with {kind_of(each)} in it"
            raise UserCodeError(
                f"{where}: build_optimizer returned {what}, not a torch.optim.Optimizer or a list or dict of them"
            )
        if needs_closure(each) and not _has(source, "train_step"):
            raise UserCodeError(
                f"{where}: build_optimizer returned {kind_of(each)}, whose step() needs a closure: write a train_step("
                "model, batch, optimizers, context) that calls context.step(optimizers, closure)"
            )
    return Optimizers(given)


def optimizer_defaults(source: Any, names: Iterable[str]) -> dict[str, bool | int | float | str]:
    """What these arguments of build_optimizer are today: their defaults.

    Raises:
        UsageError: it takes no such argument, or one that has no default, or one that is no plain value.
    """
    has = _has(source, "build_optimizer")
    maker = source.build_optimizer if has else torch.optim.AdamW
    what = "build_optimizer" if has else "torch.optim.AdamW (there is no build_optimizer)"
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


def build_schedulers(source: Any, where: str, optimizers: Optimizers, total_steps: int) -> list[Any]:
    """The user's schedulers. Each is stepped once after each optimizer step.

    Args:
        source: what carries the names of the contract.
        where: how the user named it.
        optimizers: whose learning rates they set.
        total_steps: their horizon: the optimizer steps that fit into budget.run at this configuration's pace. That
            is part of the configuration: a run that is capped, stopped early or confirmed for longer has the same.

    Raises:
        UserCodeError: something that is no scheduler, or one that does not go by steps.
    """
    if not _has(source, "build_scheduler"):
        return []
    found = [each for each in several(source.build_scheduler(optimizers.given, total_steps)) if each is not None]
    for each in found:
        if not hasattr(each, "step"):
            raise UserCodeError(f"{where}: build_scheduler returned {kind_of(each)}, which has no step()")
        if isinstance(each, ReduceLROnPlateau):
            why = "which waits for a metric at the end of an epoch; use a schedule by steps, or none"
            raise UserCodeError(f"{where}: build_scheduler returned {kind_of(each)}, {why}")
    return found


def _has(source: Any, name: str) -> bool:
    return getattr(source, name, None) is not None


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its class says so: a schedule puts something else in the place of the optimizer's own step()."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except ValueError:  # compiled code does not tell
        return False
    return closure is not None and closure.default is inspect.Parameter.empty

"""The optimizers and schedulers of a task: one of each, or several that train together."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, ReduceLROnPlateau
from torch.utils._pytree import tree_map

from batchtune.document import OptimizerSettings, Value
from batchtune.errors import UsageError, UserCodeError, kind_of
from batchtune.task.adapting.plateau import OnPlateau
from batchtune.task.lengths import TaskLengths, offers, reads, takes
from batchtune.vocabulary import Goal, together

STEPS_PER_EPOCH = "steps_per_epoch"
"""The parameter of build_scheduler by which it is told how many optimizer steps an epoch has."""

_SOME_STEPS = 1000  # of a schedule that is only looked at
_COMING_BACK = (CosineAnnealingWarmRestarts, CyclicLR)
_SPENT = 0.01  # of the highest learning rate
_A_HIGH_RATE = 0.1
_ANOTHER_RATE = 1e-4  # than that of the optimizers whose schedule is looked at, and below what one may be cut to
_PLAIN = (bool, int, float, str)
_OF_TORCH = {"lr", "foreach", "fused", "capturable", "differentiable"}  # how it computes, not what


class Optimizers(list[Optimizer]):
    """The optimizers of a run, in the user's order; `given` is what their build_optimizer returned."""

    def __init__(self, given: object) -> None:
        self.given = tree_map(_unwrapped, given)
        super().__init__(several(self.given))

    @property
    def name(self) -> str:
        """Their classes, as a reader knows them: `AdamW`, `Muon + AdamW`, `2 x Adam`."""
        return together(type(each).__name__ for each in self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all."""
        return [group for each in self for group in each.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What they train."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [float(group["lr"]) for group in self.param_groups if group.get("lr") is not None]

    def settings(self) -> OptimizerSettings:
        """What they are made with, as far as plain values say so; of several optimizers, what none has otherwise."""
        groups = [
            {name: _plain(group[name]) for name in inspect.signature(type(each)).parameters if name in group}
            for each in self
            for group in each.param_groups
        ]
        names = [name for name in dict.fromkeys(name for group in groups for name in group) if name not in _OF_TORCH]
        first = groups[0]
        differing = [name for name in [*names, "lr"] if any(each.get(name) != first.get(name) for each in groups)]
        known = {name: value for name in names if name not in differing and (value := first[name]) is not None}
        if known.get("maximize") is False:  # other libraries' optimizers do not know the word
            del known["maximize"]
        return OptimizerSettings(values=known, differing=differing)

    def zero_grad(self) -> None:
        """Frees the gradients of all."""
        for each in self:
            each.zero_grad(set_to_none=True)

    def state_dict(self, rank: int = 0) -> list[dict[str, object]]:
        """As a checkpoint keeps them; one whose states ranks share (ZeroRedundancyOptimizer) is the first rank's."""
        shared = {each: gather for each in self if (gather := getattr(each, "consolidate_state_dict", None))}
        for gather in shared.values():
            gather(to=0)
        return [each.state_dict() for each in self if not (rank and each in shared)]


def _unwrapped(given: object) -> object:
    """Without what Accelerate's `prepare` has wrapped an optimizer in: batchtune steps it itself."""
    return getattr(given, "optimizer", given) if type(given).__module__.startswith("accelerate.") else given


def _plain(value: object) -> Value | list[float] | None:
    """A setting as JSON has it; None for what is no plain value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
        return [float(each) for each in value]
    return value if isinstance(value, _PLAIN) else None


def several(given: object) -> Iterator[Any]:
    """One object by itself, or those in a list, tuple or dict."""
    yield from given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else (given,)


def _unwrap(given: object) -> str:
    """What to do with an object of the user's that steps an optimizer and sets its rates, such as a NoamOpt."""
    name = next((name for name, each in getattr(given, "__dict__", {}).items() if isinstance(each, Optimizer)), None)
    if name is None:
        return ""
    return f"; return its {name}, and the learning rates that it sets from build_scheduler(optimizer, total_steps)"


class TaskOptimizers(TaskLengths):
    """The optimizers and schedulers behind the names of the contract."""

    def optimizers(self, model: nn.Module, learning_rate: float, **arguments: Any) -> Optimizers:
        """The user's optimizers, or AdamW, with whatever arguments of their maker are not left at their defaults.

        Raises:
            UserCodeError: it is something else, or one that only a train_step can step.
        """
        if not self.has("build_optimizer"):
            return Optimizers(torch.optim.AdamW(model.parameters(), lr=learning_rate, **arguments))
        try:
            given = self.source.build_optimizer(model, learning_rate, **arguments)
        except TypeError as error:
            if re.search(f"only optimize Tensors|^'{type(model).__name__}' object is not iterable", str(error)):
                error.args = (f"{error}; build_optimizer is given the model: take model.parameters()",)
            raise
        found = list(several(given))
        for each in found or [given]:
            if not isinstance(each, Optimizer):
                what = kind_of(given) if each is given or not found else f"{kind_of(given)} with {kind_of(each)} in it"
                raise UserCodeError(
                    f"{self.where}: build_optimizer returned {what}, not a torch.optim.Optimizer or a list or dict of "
                    f"them{_unwrap(each)}"
                )
            if needs_closure(each) and not self.has("train_step"):
                raise UserCodeError(
                    f"{self.where}: build_optimizer returned {kind_of(each)}, whose step() needs a closure: write a "
                    "train_step(model, batch, optimizers, context) that calls context.step(optimizers, closure)"
                )
        return Optimizers(given)

    def optimizer_defaults(self, names: Iterable[str]) -> dict[str, Value]:
        """The defaults of these arguments of build_optimizer; UsageError where one has none that is a plain value."""
        has = self.has("build_optimizer")
        maker = self.source.build_optimizer if has else torch.optim.AdamW
        what = "build_optimizer" if has else "torch.optim.AdamW (there is no build_optimizer)"
        parameters = inspect.signature(maker).parameters
        taken = {name: each.default for name, each in parameters.items() if isinstance(each.default, _PLAIN)}
        for name in names:
            if name in taken:
                continue
            if name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                raise UsageError(
                    f"space.{name}: {what} has no number, switch or text as default of '{name}'; give it one, the "
                    f"value you run today: def build_optimizer(model, lr, {name}=...)"
                )
            known = ", ".join(each for each in taken if each not in {"lr", "maximize"})
            remedy = f"it takes {known}" if known else f"write def build_optimizer(model, lr, {name}=...)"
            raise UsageError(f"space.{name}: {what} takes no argument '{name}'; {remedy}")
        return {name: taken[name] for name in names}

    def schedulers(self, optimizers: Optimizers, total_steps: int, samples_per_step: int | None = None) -> list[Any]:
        """The user's schedulers, to be stepped once after each optimizer step; UserCodeError where they cannot be.

        Those on a plateau are stepped at the end of each epoch instead, with the metric.

        Their horizon, `total_steps`, is what fits into budget.run at this configuration's pace. It is part of the
        configuration: a run that is capped, stopped early or confirmed for longer has the same. Without the samples of
        a step all of it is one epoch, for a schedule that is only looked at.
        """
        if not self.has("build_scheduler"):
            return []
        build, told = self.source.build_scheduler, {}
        if offers(build, STEPS_PER_EPOCH):
            steps = self._steps_per_epoch(samples_per_step or 1)
            told[STEPS_PER_EPOCH] = steps if samples_per_step else total_steps
        made = several(build(optimizers.given, total_steps, **told))
        found = [OnPlateau(each) if isinstance(each, ReduceLROnPlateau) else each for each in made if each is not None]
        for each in found:
            if not hasattr(each, "step") or not takes(each.step, 0):
                what = f"the class {each.__name__}" if isinstance(each, type) else kind_of(each)
                raise UserCodeError(
                    f"{self.where}: build_scheduler returned {what}, which has no step() without arguments"
                )
            if isinstance(each, OnPlateau) and self.train_size() is None and not self.has("train_loader"):
                why = "waits for the end of an epoch, and train_dataset has no length; use one by steps"
                raise UserCodeError(f"{self.where}: ReduceLROnPlateau {why}")
        return found

    @property
    def has_horizon(self) -> bool:
        """Whether the schedule is made for a number of steps; an adapted object's: of the optimizers made last."""
        if not self.has("build_scheduler"):
            return False
        return reads(self.source.build_scheduler, 1) if self.adapted is None else self.adapted.asks_for_total_steps

    def look_at_schedule(
        self, model: nn.Module, optimizers: Optimizers, metric: str | None = None, goal: Goal | None = None
    ) -> tuple[dict[str, object], list[str]]:
        """What `OptimizerSettings` have of the user's schedulers, and what to say of them; it spends the optimizers.

        That is where the schedule is over long before training is, as one is that was written for epochs.

        Raises:
            UserCodeError: they cannot be stepped, or have learning rates of their own, whatever the optimizer's is; or
                one waits for the study's metric to fall whose `goal` is to rise, or the other way about.
        """
        told = _unused_rate(self, model, optimizers)
        given, schedulers = optimizers.rates, self.schedulers(optimizers, _SOME_STEPS)
        names = together(name for each in schedulers for name in getattr(each, "names", [type(each).__name__]))
        known: dict[str, object] = {"scheduler": names or None}
        if self.adapted is not None or not schedulers:
            return known, told
        if len(schedulers) == 1 and isinstance(schedulers[0], OnPlateau):
            known["arguments"] = schedulers[0].arguments(metric or "val_loss")
        for each in schedulers:
            if goal is not None and isinstance(each, OnPlateau) and each.scheduler.mode != goal[:3]:
                raise UserCodeError(
                    f"{self.where}: ReduceLROnPlateau(mode='{each.scheduler.mode}') is stepped with objective.metric, "
                    f"and the study is to {goal} {metric}: use mode='{goal[:3]}', or the metric that it is to wait for"
                )
        rates = _scheduled(schedulers, optimizers)
        if self._are_alike_at_another_rate(model, given, rates):
            raise UserCodeError(
                f"{self.where}: build_scheduler sets learning rates of its own ({names}), whatever build_optimizer was "
                "given: take them from the optimizer, as in max_lr=optimizer.param_groups[0]['lr']"
            )
        after = None if any(isinstance(each, _COMING_BACK) for each in schedulers) else _spent_after(rates)
        text = f"{names} takes the learning rate below a hundredth within {after} of {_SOME_STEPS:,} optimizer steps"
        spent = (
            f"{text}; if it counts epochs, multiply by {STEPS_PER_EPOCH}: schedules are stepped after each optimizer "
            f"step, and build_scheduler(optimizer, total_steps, {STEPS_PER_EPOCH}) is told an epoch's"
        )
        return known, told if after is None else [*told, spent]

    def _are_alike_at_another_rate(self, model: nn.Module, given: list[float], rates: list[list[float]]) -> bool:
        """Whether optimizers of another learning rate are given the same by their schedule."""
        if len(rates) < 2 or not any(map(any, rates)):  # noqa: PLR2004 - it cannot be stepped, or all are 0
            return False
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # whatever cannot be built twice
            warnings.simplefilter("ignore")
            others = self.optimizers(model, _ANOTHER_RATE)
            return others.rates != given and _scheduled(self.schedulers(others, _SOME_STEPS), others) == rates
        return False

    def _steps_per_epoch(self, samples_per_step: int) -> int:
        """Optimizer steps until the training set has been gone through, 1 at least."""
        size = None if self.has("train_loader") or self.lengths is not None else self.train_size()
        if size is None:
            raise UserCodeError(
                f"{self.where}: build_scheduler asks for {STEPS_PER_EPOCH}, which is known where train_dataset has a "
                "length and batches count samples; use total_steps alone"
            )
        return max(1, size // samples_per_step)

    def accumulates(self, optimizers: Optimizers) -> bool:
        """Whether a step may be made of several micro-batches."""
        manual = self.adapted is not None and self.has("train_step")
        return not manual and not any(needs_closure(each) for each in optimizers)


def _scheduled(schedulers: Sequence[Any], optimizers: Optimizers) -> list[list[float]]:
    """All groups' learning rates before each of the first steps, as many as the schedulers' step() takes."""
    rates = [optimizers.rates]
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # whatever one needs, or its end
        warnings.simplefilter("ignore")  # of schedulers that are stepped without their optimizers
        while len(rates) <= _SOME_STEPS // 2:
            for each in schedulers:
                each.step()
            rates.append(optimizers.rates)
    return rates


def _spent_after(rates: Sequence[Sequence[float]]) -> int | None:
    """After how many steps the learning rate has come down to a hundredth of its highest; None: not in these."""
    highest = 0.0
    for step, each in enumerate(max(groups, default=0.0) for groups in rates):
        highest = max(highest, each)
        if each < _SPENT * highest:
            return step
    return None


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its class says so: a schedule puts something else in the place of the optimizer's own step()."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except ValueError:  # compiled code does not tell
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def _unused_rate(task: TaskOptimizers, model: nn.Module, optimizers: Optimizers) -> list[str]:
    """A warning where build_optimizer makes the same of any lr, as one may whose rates are set in step()."""
    given = _settings_of_groups(optimizers)
    if task.adapted is not None or not task.has("build_optimizer") or not all("lr" in group for group in given):
        return []
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # whatever cannot be built twice
        warnings.simplefilter("ignore")
        others = [_settings_of_groups(task.optimizers(model, rate)) for rate in (_ANOTHER_RATE, _A_HIGH_RATE)]
        text = "build_optimizer makes the same whatever lr it is given, by its param_groups"
        remedy = "hand it on, and leave what changes it in training to build_scheduler(optimizer, total_steps)"
        fixed = "if the optimizer finds its own, set learning_rate.min and max to one value"
        told = f"{text}, so that the learning rates of this study change nothing: {remedy}; {fixed}"
        return [told] if all(each == given for each in others) else []
    return []


def _settings_of_groups(optimizers: Optimizers) -> list[dict[str, object]]:
    return [{name: each for name, each in group.items() if name != "params"} for group in optimizers.param_groups]

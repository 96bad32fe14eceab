"""What a task's own `train_step` is given, so that precision, accumulation, clipping and counting stay the tool's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from batchtune.child.training.clipping import Clipper
from batchtune.child.training.precision import Precision
from batchtune.errors import UserCodeError, kind_of
from batchtune.task.optimizers import Optimizers


class StepContext:
    """Computes and steps for a `train_step(model, batch, optimizers, context)`, which is called for each micro-batch.

    Gradients of all optimizers are freed before the first micro-batch of a step, so that a `train_step` needs no
    `zero_grad` but between two losses that reach the same parameters.

    Args:
        device: where the model and the batch are.
        precision: of autocast and loss scale.
        optimizers: those of the run.
        clipper: clips before a step.

    Attributes:
        device: where the model and the batch are.
        state: whatever is to be kept from one call to the next, such as a hidden state; empty when a run begins.
        accumulation_steps: micro-batches of an optimizer step.
        micro_batch: number of this one in its optimizer step, from 0.
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        optimizers: Optimizers,
        clipper: Clipper,
    ) -> None:
        self.device = device
        self.state: dict[str, Any] = {}
        self.accumulation_steps, self.micro_batch = 1, 0
        self._precision, self._optimizers, self._clipper = precision, optimizers, clipper
        self._stepped: list[torch.optim.Optimizer] = []
        self._backward_passes = 0
        self._is_stepping = False
        for each in optimizers:
            each.register_step_pre_hook(self._require_step_by_context)

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the optimizers step after this one; an average of weights is updated then."""
        return self.micro_batch + 1 == self.accumulation_steps

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward passes: computes in the precision that is measured."""
        return self._precision.autocast()

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None, **arguments: Any) -> None:
        """Adds this micro-batch's gradients, in place of `loss.backward()`.

        Args:
            loss: a scalar.
            optimizer: only its parameters get gradients; None: all that lead to the loss.
            arguments: of `Tensor.backward`, such as retain_graph.
        """
        self._backward_passes += 1
        if (
            optimizer is None
            and self._backward_passes > 1
            and self.accumulation_steps > 1
            and len(self._optimizers) > 1
        ):
            raise UserCodeError(
                "train_step has several backward passes, whose gradients mix when micro-batches are accumulated; say "
                "whose each is: context.backward(loss, optimizer)"
            )
        if optimizer is not None:
            groups = optimizer.param_groups
            arguments["inputs"] = [each for group in groups for each in group["params"] if each.requires_grad]
        self._precision.scaler.scale(loss / self.accumulation_steps).backward(**arguments)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees an optimizer's gradients, unless they are of earlier micro-batches of the same step."""
        if self.micro_batch == 0:
            optimizer.zero_grad(set_to_none=True)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Steps an optimizer after the last micro-batch, in place of `optimizer.step()`: unscales, clips and steps.

        Args:
            optimizer: one of the run's.
            closure: computes the loss and its gradients anew, as LBFGS asks for; it calls `context.backward`.

        Raises:
            UserCodeError: it cannot be stepped so.
        """
        if not any(optimizer is each for each in self._optimizers):
            raise UserCodeError(f"context.step was given {kind_of(optimizer)} that build_optimizer has not returned")
        if not self.is_last_micro_batch:
            return
        again, scaled = any(optimizer is each for each in self._stepped), self._precision.scaler.is_enabled()
        if scaled and (closure is not None or again):
            why = "with a closure" if closure is not None else "twice in one train_step"
            raise UserCodeError(f"fp16's loss scale does not go with an optimizer stepped {why}; use bf16 or fp32")
        if closure is not None and self.accumulation_steps > 1:
            raise UserCodeError("an optimizer stepped with a closure sees one micro-batch; do not accumulate")
        self._stepped.append(optimizer)
        self._is_stepping = True
        try:
            if closure is None:
                self._clipper.clip([optimizer])
                self._precision.scaler.step(optimizer)
            else:
                optimizer.step(closure)
        finally:
            self._is_stepping = False

    def begin(self, micro_batch: int, accumulation_steps: int) -> None:
        """What `train_step` is called for next."""
        self.micro_batch, self.accumulation_steps = micro_batch, accumulation_steps
        self._backward_passes, self._stepped = 0, []

    def require_stepped(self) -> None:
        """Raises UserCodeError where train_step has stepped nothing after the last micro-batch."""
        if self.is_last_micro_batch and not self._stepped:
            raise UserCodeError("train_step stepped no optimizer; call context.step(optimizer) after the gradients")

    def _require_step_by_context(self, *_: object) -> None:
        if not self._is_stepping:
            raise UserCodeError(
                "train_step called optimizer.step(); call context.step(optimizer), which knows precision, clipping and "
                "accumulation, and context.backward(loss) for loss.backward()"
            )

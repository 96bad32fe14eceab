"""One optimizer step as the user trains it: precision, accumulation, loss scaling, scheduler, and moving batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from batchtune.child.training import heartbeat
from batchtune.child.training.batches import move
from batchtune.child.training.clipping import Clipper
from batchtune.child.training.context import StepContext
from batchtune.child.training.parallel import Parallel
from batchtune.child.training.precision import LOSS_SCALE, Precision
from batchtune.document import GradientClipping
from batchtune.errors import UserCodeError
from batchtune.task.adapting.adapted import Adapted
from batchtune.task.contract import Task
from batchtune.task.random_numbers import seed_everything


class NonFiniteLossError(UserCodeError):
    """The loss was NaN or infinite before any weight had changed: no batch size or learning rate can help."""


class Trainer:
    """A model with its optimizer on one device, taking optimizer steps.

    Args:
        task: the user's code.
        device: where the model lives.
        precision: bf16, fp16, fp32 or tf32.
        learning_rate: handed to the user's `build_optimizer`.
        seed: weights and data order follow from it.
        total_steps: the horizon handed to the user's `build_scheduler`.
        optimizer_arguments: handed to the user's `build_optimizer` on top.
        parallel: the ranks that train together; None: this process trains alone.
        loss_scale: of fp16 to begin with; with 1.0 no step is skipped, whose memory and time are all that counts.
        samples_per_step: of the optimizer steps to come, for adapters whose users may ask; None: not known.
        gradient_clipping: before the optimizers' steps; None: what the task does by itself.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        precision: str,
        *,
        learning_rate: float = 1e-3,
        seed: int = 0,
        total_steps: int | None = None,
        optimizer_arguments: Mapping[str, Any] | None = None,
        parallel: Parallel | None = None,
        loss_scale: float = LOSS_SCALE,
        samples_per_step: int | None = None,
        gradient_clipping: GradientClipping | None = None,
    ) -> None:
        seed_everything(seed)
        self.task, self.device = task, device
        self.precision = Precision(precision, device, loss_scale)
        self._adapted = task.source if isinstance(task.source, Adapted) else None
        if self._adapted:
            self._adapted.samples_per_step, self._adapted.total_steps = samples_per_step, total_steps
        self.model: nn.Module = parallel.place(task.model()) if parallel else task.model().to(device)
        if not (self._adapted and self._adapted.keeps_modes):
            self.model.train()
        self._replica = parallel.replica(self.model, task.loss) if parallel else None
        self._micro_batches = 0
        self.optimizers = task.optimizers(self.model, learning_rate, **optimizer_arguments or {})
        self.schedulers = task.schedulers(self.optimizers, total_steps) if total_steps else []
        self.scheduled_steps = total_steps or 0
        self._clipper = Clipper(
            self.model, gradient_clipping or task.gradient_clipping, self._adapted, self.precision.scaler
        )
        own_step = task.has("train_step")
        self._context = StepContext(device, self.precision, self.optimizers, self._clipper) if own_step else None
        self._batch: Any = None
        self._last_loss: Tensor | None = None
        self._has_old_gradients = False

    def forward_backward(self, batch: object, accumulation_steps: int = 1) -> Tensor:
        """Adds one micro-batch's gradients, each weighted by 1 / accumulation steps.

        As with the variables `batch` and `loss` of a loop, the last ones live until the next are there: their memory
        is a part of what training takes.

        Returns:
            The detached loss, still on the device.
        """
        self._batch = move(batch, self.device)
        if self._has_old_gradients:
            self._free_gradients()
        loss = self._last_loss = self._gradients(self._batch, accumulation_steps)
        heartbeat.beat()
        return loss.detach()

    def _gradients(self, batch: object, accumulation_steps: int) -> Tensor:
        number = self._micro_batches % accumulation_steps
        self._micro_batches += 1
        if self._context is not None:
            self._context.begin(number, accumulation_steps)
            loss = self.task.train_step(self.model, batch, self.optimizers, self._context)
            self._context.require_stepped()
            return loss
        with self.precision.autocast():
            if self._replica is None:
                loss = self.task.loss(self.model, batch)
            else:
                loss = self._replica.loss(batch, synchronize=number + 1 == accumulation_steps)
        if not loss.requires_grad:
            raise UserCodeError(
                "compute_loss returned a tensor without a graph; no parameter of the model leads to it "
                "(is it under torch.no_grad, detached, or made by .item()?)"
            )
        self.precision.scaler.scale(loss / accumulation_steps).backward()
        return loss

    def update(self, *, free_late: bool = False) -> None:
        """The optimizers' and schedulers' steps; gradients are freed afterwards.

        Args:
            free_late: as in loops that call `zero_grad` before the forward pass: once the next batch is there, which
                cuts the memory up in another way. A task's own train_step always leaves them so long.
        """
        if self._context is None:
            self._clipper.clip(self.optimizers)
            for optimizer in self.optimizers:
                self.precision.scaler.step(optimizer)
        self.precision.scaler.update()
        self._has_old_gradients = free_late or self._context is not None
        if not self._has_old_gradients:
            self._free_gradients()
        if self.schedulers and self.scheduled_steps > 0:  # some raise when stepped past their horizon
            self.scheduled_steps -= 1
            for scheduler in self.schedulers:
                scheduler.step()

    def _free_gradients(self) -> None:
        self.optimizers.zero_grad()
        self._has_old_gradients = False

    def step(self, batches: Iterator[object], accumulation_steps: int = 1) -> Tensor:
        """One optimizer step over `accumulation_steps` micro-batches; returns the last one's loss."""
        for batch in itertools.islice(batches, accumulation_steps):
            loss = self.forward_backward(batch, accumulation_steps)
        self.update()
        return loss


def require_finite(loss: Tensor, micro_batch_size: int) -> None:
    """Raises NonFiniteLossError for a first loss of NaN or infinity."""
    if not bool(torch.isfinite(loss).all()):
        raise NonFiniteLossError(
            f"compute_loss returned {float(loss):g} in the very first step, at batch size {micro_batch_size}, before "
            "any weight had changed; check the model's initialisation and the data for NaN, zero variance or log(0)"
        )

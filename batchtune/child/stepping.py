"""What steps are taken with: precision, clipping, and the context that a task's own `train_step` is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchtune.document import GradientClipping
from batchtune.errors import DeviceError, HalfPrecisionError, UserCodeError, kind_of
from batchtune.task.adapting import Adapted, clip_gradients
from batchtune.task.optimizers import Optimizers

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AMPERE, _VOLTA = 8, 7  # major compute capabilities with bf16 and with fp16 matrix units
Clip: TypeAlias = Callable[[Sequence[Optimizer]], None]
_MIXED = (
    "train_step has several backward passes, whose gradients mix when micro-batches are accumulated; say "
    "whose each is: context.backward(loss, optimizer)"
)
_NOT_ADDED_UP = (
    "train_step made gradients without context.backward(loss), which adds up those of all micro-batches; call it, or "
    "add them up yourself, each divided by context.accumulation_steps, or keep baseline.batch_size and batch_size.max "
    "within what fits at once"
)
_STEPPED = (
    "train_step called optimizer.step(); call context.step(optimizer), which knows precision, clipping and "
    "accumulation, and context.backward(loss) for loss.backward()"
)
LOSS_SCALE = 2.0**16  # torch's own to begin with; the first steps may be skipped until it is low enough


def choose(name: str, device: torch.device) -> tuple[str, str]:
    """The precision for `auto` (or the one named) and the reason for it; DeviceError where the device has it not."""
    if name != "auto":
        if name == "tf32" and device.type != "cuda":
            raise DeviceError(f"precision tf32 exists on CUDA devices only, not on {device.type}; use fp32 or bf16")
        return name, "asked for"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "bf16", "this accelerator has bf16 matrix units"
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"compute capability {major}.{minor}"
        if major >= _AMPERE:
            return "bf16", f"{capability} has bf16 matrix units"
        if major >= _VOLTA:
            return "fp16", f"{capability} has fp16 matrix units and no bf16"
        return "fp32", f"{capability} has no half-precision matrix units"
    return "fp32", f"half precision is not reliably faster on {device.type}"


def every_precision(device: torch.device) -> list[str]:
    """The precisions that a device can train in."""
    return ["fp32", "tf32", "bf16", "fp16"] if device.type == "cuda" else ["fp32", "bf16", "fp16"]


def tf32_allowed() -> tuple[bool, bool]:
    """Whether matrix products and convolutions of fp32 tensors may compute in TF32; torch begins with (False, True)."""
    # by torch's newer names: it raises for the older ones where somebody used both
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return torch.backends.cuda.matmul.fp32_precision == "tf32", convolutions == "tf32"


class Precision:
    """How a run computes (bf16, fp16, fp32 or tf32): an autocast context, fp16's loss scaler, TF32 everywhere.

    All but tf32 leave to torch and to the user's code what fp32 tensors are multiplied in.
    """

    _tf32_before: ClassVar[tuple[bool, bool] | None] = None  # while tf32 has changed it

    def __init__(self, name: str, device: torch.device, loss_scale: float = LOSS_SCALE) -> None:
        self._name, self._device = name, device
        self.scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=name == "fp16")
        before = Precision._tf32_before
        if name == "tf32":
            Precision._tf32_before = before or tf32_allowed()
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        elif before is not None:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
            Precision._tf32_before = None

    def computed_in(self, flops: Counter[str]) -> str:
        """What matrix units do most of a step's operations in, counted by operator: fp32 may mean TF32."""
        device = self._device
        if self._name != "fp32" or device.type != "cuda" or torch.version.hip is not None:
            return self._name
        if torch.cuda.get_device_capability(device)[0] < _AMPERE:  # it has no matrix units for TF32
            return self._name
        products, convolutions = tf32_allowed()
        in_tf32 = sum(count for name, count in flops.items() if (convolutions if "convolution" in name else products))
        return "tf32" if 2 * in_tf32 > flops.total() else self._name

    def autocast(self) -> AbstractContextManager[object]:
        """The context that forward passes run in."""
        if self._name not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=_AUTOCAST[self._name])


def clip(
    model: nn.Module,
    clipping: GradientClipping | None,
    adapted: Adapted | None,
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[Optimizer],
) -> None:
    """Clips what optimizers are about to step with, all of their parameters together, or as the library does.

    Gradients are unscaled before, by fp16's `scaler`.
    """
    if adapted is None and clipping is None:
        return
    for each in optimizers:
        scaler.unscale_(each)
    if adapted is None:
        clip_gradients(optimizers, clipping)
        return
    for each in optimizers:
        adapted.clip_gradients(model, each, clipping)


class StepContext:
    """Computes and steps for a `train_step(model, batch, optimizers, context)`, which is called for each micro-batch.

    Gradients of all optimizers are freed before the first micro-batch of a step, so that a `train_step` needs no
    `zero_grad` but between two losses that reach the same parameters.

    Attributes:
        device: where the model and the batch are.
        state: whatever is to be kept from one call to the next, such as a hidden state; empty when a run begins.
        micro_batch: number of this one in its optimizer step, from 0.
    """

    def __init__(self, device: torch.device, precision: Precision, optimizers: Optimizers, clip_for: Clip) -> None:
        self.device = device
        self.state: dict[str, Any] = {}
        self._accumulation_steps, self.micro_batch = 1, 0
        self._adds_up = False  # the task's code, by itself
        self._precision, self._optimizers, self._clip_for = precision, optimizers, clip_for
        self._stepped: list[Optimizer] = []
        self._losses: dict[Optimizer, list[Tensor]] = {}
        self._unclaimed: list[Tensor] = []  # until an optimizer steps by them
        self._backward_passes, self._has_backward = 0, False  # of this micro-batch; whether any of the step has one
        self._is_stepping = False
        for each in optimizers:
            each.register_step_pre_hook(self._require_step_by_context)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step, by which gradients of the task's own making are to be divided."""
        self._adds_up = True
        return self._accumulation_steps

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the optimizers step after this one; an average of weights is updated then."""
        return self.micro_batch + 1 == self._accumulation_steps

    @property
    def losses(self) -> dict[object, float]:
        """What each optimizer was trained on with this micro-batch: the mean of its losses.

        Losses whose optimizer `backward` was not told are the next one's to step.
        """
        return {each: sum(map(float, losses)) / len(losses) for each, losses in self._losses.items()}

    def autocast(self) -> AbstractContextManager[object]:
        """For forward passes: computes in the precision that is measured."""
        return self._precision.autocast()

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None, **arguments: object) -> None:
        """Adds this micro-batch's gradients, in place of `loss.backward()`.

        With an optimizer only its parameters get gradients; `arguments` are those of `Tensor.backward`.
        """
        self._backward_passes, self._has_backward = self._backward_passes + 1, True
        mixes = self._backward_passes > 1 and self._accumulation_steps > 1 and len(self._optimizers) > 1
        if optimizer is None and mixes:
            raise UserCodeError(_MIXED)
        if optimizer is not None:
            arguments["inputs"] = _trained_by(optimizer)
        if loss.numel() == 1:  # what else there may be is no loss, and large
            told = self._unclaimed if optimizer is None else self._losses.setdefault(optimizer, [])
            told.append(loss.detach())
        self._precision.scaler.scale(loss / self._accumulation_steps).backward(**arguments)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Frees an optimizer's gradients, unless they are of earlier micro-batches of the same step."""
        if self.micro_batch == 0:
            optimizer.zero_grad(set_to_none=True)

    def step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        """Steps an optimizer after the last micro-batch, in place of `optimizer.step()`: unscales, clips and steps.

        A closure computes the loss and its gradients anew, as LBFGS asks for; it calls `context.backward`, and what it
        leaves is clipped each time.

        Returns:
            What the optimizer's step returns: with a closure usually its loss.

        Raises:
            UserCodeError: it cannot be stepped so.
        """
        if not any(optimizer is each for each in self._optimizers):
            raise UserCodeError(f"context.step was given {kind_of(optimizer)} that build_optimizer has not returned")
        self._claim(optimizer)
        if not self.is_last_micro_batch:
            return None
        is_its_own = closure is None and self._accumulation_steps > 1 and not (self._has_backward or self._adds_up)
        if is_its_own and any(each.grad is not None for each in _trained_by(optimizer)):
            raise UserCodeError(_NOT_ADDED_UP)
        again, scaled = any(optimizer is each for each in self._stepped), self._precision.scaler.is_enabled()
        if scaled and (closure is not None or again):
            why = "with a closure" if closure is not None else "twice in one train_step"
            raise HalfPrecisionError(f"fp16's loss scale does not go with an optimizer stepped {why}; use bf16 or fp32")
        if closure is not None and self._accumulation_steps > 1:
            raise UserCodeError("an optimizer stepped with a closure sees one micro-batch; do not accumulate")
        self._stepped.append(optimizer)
        with self._stepping():
            if closure is None:
                self._clip_for([optimizer])
                return self._precision.scaler.step(optimizer)

            def clipped() -> object:
                loss = closure()
                self._claim(optimizer)
                self._clip_for([optimizer])
                return loss

            return optimizer.step(clipped)  # type: ignore[arg-type]  # what torch calls a loss may be anything

    def step_without_loss(self, optimizer: Optimizer) -> None:
        """Steps an optimizer for the memory that it takes: gradients that nobody has computed are zero."""
        without = [each for each in _trained_by(optimizer) if each.grad is None]
        for each in without:
            each.grad = torch.zeros_like(each)
        with self._stepping():
            optimizer.step()
        for each in without:
            each.grad = None

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def begin(self, micro_batch: int, accumulation_steps: int) -> None:
        """What `train_step` is called for next."""
        self.micro_batch, self._accumulation_steps = micro_batch, accumulation_steps
        self._backward_passes, self._stepped = 0, []
        self._has_backward = self._has_backward and micro_batch > 0
        self._losses, self._unclaimed = {}, []

    def require_stepped(self) -> None:
        """Raises UserCodeError where train_step has stepped nothing after the last micro-batch."""
        if self.is_last_micro_batch and not self._stepped:
            call = "call context.step(optimizer) after the gradients"
            closure = "context.step(optimizer, closure) where its step calculates them itself, as LBFGS or SAM"
            raise UserCodeError(f"train_step stepped no optimizer; {call}, or {closure}")

    def _claim(self, optimizer: Optimizer) -> None:
        """Puts the losses that were nobody's so far down to an optimizer."""
        if self._unclaimed:
            self._losses.setdefault(optimizer, []).extend(self._unclaimed)
            self._unclaimed = []

    def _require_step_by_context(self, *_: object) -> None:
        if not self._is_stepping:
            raise UserCodeError(_STEPPED)


def _trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]

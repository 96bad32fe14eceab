"""Gradient clipping as torch has it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from batchtune.document import GradientClipping


def clip_gradients(optimizers: Sequence[Optimizer], clipping: GradientClipping | None) -> None:
    """Clips the gradients of all parameters of these optimizers, a norm over all of them together."""
    if clipping is None:
        return
    parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if clipping.norm is not None:
        nn.utils.clip_grad_norm_(parameters, clipping.norm)
    if clipping.value is not None:
        nn.utils.clip_grad_value_(parameters, clipping.value)

"""What is done to gradients before the optimizers' steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from batchtune.document import GradientClipping
from batchtune.task.adapting.adapted import Adapted
from batchtune.task.adapting.clipping import clip_gradients


class Clipper:
    """Clips what some optimizers are about to step with.

    Args:
        model: whose gradients they are.
        clipping: what to do; None: nothing.
        adapted: the library's objects that the task was made from; None: it is plain PyTorch.
        scaler: of fp16's loss; gradients are unscaled before they are clipped.
    """

    def __init__(
        self, model: nn.Module, clipping: GradientClipping | None, adapted: Adapted | None, scaler: Any
    ) -> None:
        self._model, self._clipping, self._adapted, self._scaler = model, clipping, adapted, scaler

    def clip(self, optimizers: Sequence[Optimizer]) -> None:
        """Clips the gradients of all of their parameters together, or as the library does."""
        if self._adapted is None and self._clipping is None:
            return
        for each in optimizers:
            self._scaler.unscale_(each)
        if self._adapted is None:
            clip_gradients(optimizers, self._clipping)
            return
        for each in optimizers:
            self._adapted.clip_gradients(self._model, each, self._clipping)

"""One forward pass as evaluation takes it: eval mode, the precision of training, no gradients and no optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchtune.child.training import heartbeat
from batchtune.child.training.precision import Precision
from batchtune.child.training.trainer import move
from batchtune.task.contract import Task
from batchtune.task.random_numbers import seed_everything


def without_gradients(step: Callable[[int], Any]) -> Callable[[int], Any]:
    """A step of the user's own under `torch.inference_mode`."""
    return torch.inference_mode()(step)


class Inference:
    """A model in eval mode on one device, taking forward passes.

    Args:
        task: the user's code.
        device: where the model lives.
        precision: bf16, fp16, fp32 or tf32.
    """

    def __init__(self, task: Task, device: torch.device, precision: str) -> None:
        seed_everything(0)
        self._task, self._device, self._precision = task, device, Precision(precision, device)
        self.model: nn.Module = task.model().to(device).eval()
        self._batch: Any = None
        self._output: Any = None

    def forward(self, batch: object) -> None:
        """One forward pass; as in a loop, the last batch and output live until the next are there."""
        self._batch = move(batch, self._device)
        with torch.inference_mode(), self._precision.autocast():
            self._output = self._task.validate(self.model, self._batch)
        heartbeat.beat()

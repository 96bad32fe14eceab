"""What a LightningModule in manual optimization calls to go backward, clip and step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from batchtune.task.lightning.trainer import not_there


class ManualSteps:
    """Stands in for `trainer.strategy`: the module's `manual_backward` and the steps of its optimizers come here.

    Args:
        module: the LightningModule.
        optimizers: those of its `configure_optimizers`.
        library: its Lightning, `lightning.pytorch` or `pytorch_lightning`.
        where: how the user named it, for messages.

    Attributes:
        context: of the running `train_step`; None before the first.
        latest_loss: that went backward last; None before the first.
    """

    def __init__(self, module: Any, optimizers: Sequence[torch.optim.Optimizer], library: str, where: str) -> None:
        parts = importlib.import_module(f"{library}.core.optimizer")
        self._where, self.lightning_module = where, module
        self.context: Any = None
        self.latest_loss: Tensor | None = None
        self._no_closure = parts.do_nothing_closure
        self._lightning_optimizers = [parts.LightningOptimizer(each) for each in optimizers]
        for each in self._lightning_optimizers:
            each._strategy = self  # noqa: SLF001 - as Lightning's own strategies do

    def backward(self, loss: Tensor, optimizer: object = None, *_: object, **arguments: Any) -> None:
        """`manual_backward`."""
        del optimizer  # Lightning gives none
        self.latest_loss = loss.detach()
        self.lightning_module.on_before_backward(loss)
        self.context.backward(loss, **arguments)
        self.lightning_module.on_after_backward()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **_: object) -> None:
        """The step of one of `self.optimizers()`."""
        self.context.step(optimizer, None if closure is self._no_closure else closure)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_there(self._where, f"strategy.{name}")

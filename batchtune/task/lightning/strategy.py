"""What a LightningModule finds in `self.trainer.strategy` while batchtune, not Lightning, trains it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from batchtune.errors import UsageError

LightningModule: TypeAlias = Any  # Lightning is no dependency, so its types are not looked at


class NotInTrainerError(UsageError, AttributeError):
    """The module asks its Trainer for something that batchtune has not got; to `hasattr` it is not there."""


def not_there(where: str, name: str) -> NotInTrainerError:
    """What is said of `self.trainer.name` where there is no such thing."""
    return NotInTrainerError(
        f"{where} uses self.trainer.{name}: batchtune trains the module without a Lightning Trainer, and "
        "stands in for its model, progress, datamodule and logger only"
    )


class StrategyView:
    """Stands in for `trainer.strategy`: the module's `manual_backward` and the steps of its optimizers come here."""

    def __init__(self, module: LightningModule, optimizers: Sequence[Optimizer], library: str, where: str) -> None:
        parts = importlib.import_module(f"{library}.core.optimizer")
        self._where, self.lightning_module = where, module
        self._fabric = "lightning.fabric" if library.startswith("lightning.") else "lightning_fabric"
        self.context: Any = None
        self.losses: list[Tensor] = []
        self._no_closure = parts.do_nothing_closure
        self._lightning_optimizers = [parts.LightningOptimizer(each) for each in optimizers]
        for each in self._lightning_optimizers:
            each._strategy = self  # noqa: SLF001 - as Lightning's own strategies do

    def backward(self, loss: Tensor, optimizer: object = None, *_: object, **arguments: object) -> None:
        """`manual_backward`."""
        del optimizer  # Lightning gives none
        self.losses.append(loss.detach().mean())
        self.lightning_module.on_before_backward(loss)
        self.context.backward(loss, **arguments)
        self.lightning_module.on_after_backward()

    def all_gather(self, tensor: Tensor, group: object = None, sync_grads: bool = False) -> Tensor:
        """`self.all_gather`: that of all ranks, where there are several."""
        parts = importlib.import_module(f"{self._fabric}.utilities.distributed")
        return parts._all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)  # type: ignore[no-any-return]  # noqa: SLF001

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], object], **_: object) -> None:
        """The step of one of `self.optimizers()`."""
        self.context.step(optimizer, None if closure is self._no_closure else closure)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_there(self._where, f"strategy.{name}")

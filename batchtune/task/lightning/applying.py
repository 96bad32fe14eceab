"""A Lightning `Trainer` that trains with a result."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from torch.utils.data import DataLoader

from batchtune.task.adapting import loader_parts, recommended, require_world, resized, say, set_learning_rate
from batchtune.task.lightning.strategy import LightningModule
from batchtune.task.lightning.trainer import clip_arguments

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # the user's spelling, or the one there is
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "tf32": "32-true"}


class ApplyResult(Callback):  # type: ignore[misc]  # Lightning is no dependency, so its types are not looked at
    """Trains with what `batchtune tune` recommends: `Trainer(callbacks=[ApplyResult("result.json")])`, or a run folder.

    Sets the batch size of the training data loader (and a `batch_size` attribute of DataModule or module, where there
    is one), `accumulate_grad_batches`, gradient clipping and the learning rate; groups of parameters and schedules keep
    their ratios. Precision cannot be changed once there is a Trainer: a warning says what to give it.

    Raises:
        UsageError: it recommends nothing, or the data loader's batch size cannot be changed.
    """

    def __init__(self, result: str | os.PathLike[str]) -> None:
        self._found = recommended(result)
        self._wrapped: Any = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Before the data loaders are made."""
        if stage != "fit":
            return
        found = self._found
        trainer.accumulate_grad_batches = found.gradient_accumulation_steps
        if found.gradient_clipping is not None:
            vars(trainer).update(clip_arguments(found.gradient_clipping))
        require_world(found, trainer.world_size)
        wanted = _PRECISIONS[found.precision]
        if trainer.precision != wanted:
            say(f"measured in {found.precision}, this Trainer has precision={trainer.precision!r}; give it {wanted!r}")
        for owner in (trainer.datamodule, pl_module):
            if isinstance(getattr(owner, "batch_size", None), int):
                owner.batch_size = found.micro_batch_size
        source = trainer.fit_loop._data_source  # noqa: SLF001 - the only way to a loader that was handed to fit()
        if source.is_module():
            self._wrap(source.instance)
        else:
            source.instance = self._sized(source.instance)

    def _wrap(self, owner: Any) -> None:
        original = owner.train_dataloader

        @functools.wraps(original)
        def train_dataloader() -> object:
            return self._sized(original())

        owner.train_dataloader, self._wrapped = train_dataloader, owner

    def _sized(self, loader: DataLoader[object]) -> object:
        size = self._found.micro_batch_size
        if loader_parts(loader, "the training data loader").batch_size == size:
            return loader
        return resized(loader, size)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """When there are optimizers."""
        if self._found.learning_rate is None or not trainer.optimizers:
            say("the learning rate was not set: the result has none, or there is no optimizer")
            return
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        set_learning_rate(trainer.optimizers, self._found.learning_rate, schedulers, where=type(pl_module).__name__)

    def teardown(self, trainer: object, pl_module: LightningModule, stage: str) -> None:
        """Gives the user's hook back."""
        del trainer, pl_module, stage
        if self._wrapped is not None:
            del self._wrapped.train_dataloader
            self._wrapped = None

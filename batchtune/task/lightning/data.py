"""Where a LightningModule's batches come from: its own loaders or a DataModule's, and the hooks on their way."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence, Sized
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from batchtune.errors import UsageError
from batchtune.task.adapting.adapted import LoaderParts, loader_parts, require_no_arguments
from batchtune.task.lightning.trainer import TrainerView


class LightningData:
    """The data of a module, set up once for all the modules that are trained on it.

    Args:
        namespace: the user's file, in which a DataModule is looked for.
        where: how the user named the module, for messages.

    Attributes:
        module: the DataModule, or None.
        train: the training loader; None before `set_up`.
        val_loaders: as the user's hook returned them.
    """

    def __init__(self, namespace: ModuleType, where: str) -> None:
        self._namespace, self._where = namespace, where
        self.module: Any = None
        self.train: LoaderParts | None = None
        self.val_loaders: list[DataLoader[Any]] = []
        self._transfers: dict[str, bool] = {}

    def prepare(self, view: TrainerView, module: Any, given: Sequence[object]) -> None:
        """Finds the DataModule and downloads and splits the data, in Lightning's order.

        Args:
            view: what stands in for the Trainer.
            module: the first LightningModule.
            given: what the user's function returned beside the module.
        """
        self.module = next((each for each in given if _is_datamodule(each)), None) or self._found()
        for part in (self.module, module):
            if part is not None:
                part.trainer = view
                part.prepare_data()
        if self.module is not None:
            self.module.setup("fit")

    def _found(self) -> Any:
        """The DataModule of the user's file; one that is defined there takes precedence over imported ones."""
        found = [each for each in vars(self._namespace).values() if _is_datamodule(each)]
        own = [each for each in found if getattr(each, "__module__", "") == self._namespace.__name__] or found
        if len(own) > 1:
            names = ", ".join(getattr(each, "__name__", type(each).__name__) for each in own)
            raise UsageError(
                f"{self._where}: several DataModules in the file ({names}); name a function that returns "
                "(module, datamodule)"
            )
        if not own:
            return None
        if not inspect.isclass(own[0]):
            return own[0]
        require_no_arguments(own[0], self._where, "(module, datamodule)")
        return own[0]()

    def read_loaders(self, module: Any) -> None:
        """Asks the DataModule, or the module where there is none, for its loaders."""
        owner = self.module if self.module is not None else module
        if not overrides(owner, "train_dataloader"):
            raise UsageError(
                f"{self._where}: no training data; write a train_dataloader(), put one LightningDataModule into the "
                "file, or name a function that returns (module, datamodule)"
            )
        loader = owner.train_dataloader()
        single = loader[0] if isinstance(loader, list | tuple) and len(loader) == 1 else loader
        self.train = loader_parts(single, f"{self._where}: train_dataloader()")
        found = owner.val_dataloader() if overrides(owner, "val_dataloader") else None
        self.val_loaders = list(found) if isinstance(found, list | tuple) else [found] if found is not None else []

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of the training set; None where it does not tell."""
        data = self.train.dataset if self.train else None
        return len(data) if isinstance(data, Sized) and not isinstance(data, IterableDataset) else None

    def transferred(self, module: Any, batch: object, loader: int) -> Any:
        """The batch after the transfer hooks; those of a DataModule override the module's."""
        if not self._transfers:
            self._transfers = {
                name: self.module is not None and overrides(self.module, name)
                for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
            }
        for name, in_data in self._transfers.items():
            where = (module.device,) if name == "transfer_batch_to_device" else ()
            batch = getattr(self.module if in_data else module, name)(batch, *where, loader)
        return batch


def library_of(owner: object) -> str:
    """`lightning.pytorch` or `pytorch_lightning`, whichever a module or DataModule is written for."""
    bases = [
        each for each in inspect.getmro(type(owner)) if each.__name__ in {"LightningModule", "LightningDataModule"}
    ]
    roots = {each.__module__.partition(".")[0] for each in bases}
    return "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"


def overrides(owner: object, name: str) -> bool:
    """Whether a user's module or DataModule has a hook of its own."""
    helpers = importlib.import_module(f"{library_of(owner)}.utilities.model_helpers")
    return bool(helpers.is_overridden(name, owner))


def _is_datamodule(value: object) -> bool:
    kind = value if inspect.isclass(value) else type(value)
    names = [each.__name__ for each in inspect.getmro(kind)]
    return "LightningDataModule" in names[1:]

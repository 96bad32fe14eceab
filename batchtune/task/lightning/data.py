"""What a LightningModule brings: its batches, a validation epoch on them, optimizers, and its user's own Trainer."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence, Sized
from types import ModuleType
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from batchtune.errors import UsageError
from batchtune.task.adapting import Adapted, LoaderParts, loader_parts, require_no_arguments, resized
from batchtune.task.lightning.strategy import LightningModule
from batchtune.task.lightning.trainer import SchedulerConfig, TrainerView


class LightningData:
    """The data of a module, set up once for all the modules that are trained on it.

    Attributes:
        module: the DataModule, or None; it is looked for in the user's file, `namespace`.
        train: the training loader; None before `read_loaders`.
    """

    def __init__(self, namespace: ModuleType, where: str) -> None:
        self._namespace, self._where = namespace, where
        self.module: Any = None
        self.train: LoaderParts | None = None
        self.val_loaders: list[Iterable[object]] = []
        self._transfers: dict[str, bool] = {}

    def prepare(self, view: TrainerView, module: LightningModule, given: Sequence[object]) -> None:
        """Finds the DataModule, maybe among what the user's function returned beside the module, and has it set up."""
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

    def read_loaders(self, module: LightningModule) -> None:
        """Asks the DataModule, or the module where there is none, for its loaders."""
        owner = self.module if self.module is not None else module
        if not overrides(owner, "train_dataloader"):
            raise UsageError(
                f"{self._where}: no training data; write a train_dataloader(), put one LightningDataModule into the "
                "file, or name a function that returns (module, datamodule)"
            )
        loaders = _each(owner.train_dataloader(), module)
        if len(loaders) > 1:
            raise UsageError(
                f"{self._where}: train_dataloader() returned {len(loaders)} data loaders; batchtune takes one: join "
                "their data sets, or write the functions of a task with train_loader(batch_size) instead of the module"
            )
        self.train = loader_parts(loaders[0] if loaders else None, f"{self._where}: train_dataloader()")
        self.val_loaders = _each(owner.val_dataloader() if overrides(owner, "val_dataloader") else None, module)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of the training set; None where it does not tell."""
        data = self.train.dataset if self.train else None
        return len(data) if isinstance(data, Sized) and not isinstance(data, IterableDataset) else None

    def transferred(self, module: LightningModule, batch: object, loader: int) -> object:
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


def configured(module: LightningModule, task: Adapted) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Optimizers and schedulers of `configure_optimizers`, read by Lightning's parser; UsageError if there is none."""
    parser = importlib.import_module(f"{library_of(module)}.core.optimizer")
    made = module.configure_optimizers()
    if made is None:
        raise task.refused("configure_optimizers returned None")
    optimizers, schedulers, monitor = parser._configure_optimizers(made)  # noqa: SLF001
    if not module.automatic_optimization:
        return optimizers, parser._configure_schedulers_manual_opt(schedulers)  # noqa: SLF001
    if len(optimizers) != 1:
        raise task.refused(
            f"configure_optimizers returned {len(optimizers)} optimizers, which Lightning trains by manual "
            "optimization only: set self.automatic_optimization = False"
        )
    return optimizers, parser._configure_schedulers_automatic_opt(schedulers, monitor)  # noqa: SLF001


def require_schedule(schedulers: Sequence[SchedulerConfig], samples_per_epoch: int | None, task: Adapted) -> None:
    """Raises UsageError for schedulers that cannot step in a study."""
    if any(config.reduce_on_plateau and config.interval != "epoch" for config in schedulers):
        raise task.refused("ReduceLROnPlateau waits for the end of an epoch here; leave out its interval")
    if any(config.interval == "epoch" for config in schedulers) and samples_per_epoch is None:
        raise task.refused("its scheduler steps at the end of an epoch, but the training set has no length")


def library_of(owner: object) -> str:
    """`lightning.pytorch` or `pytorch_lightning`, whichever a module or DataModule is written for."""
    bases = [
        each for each in inspect.getmro(type(owner)) if each.__name__ in {"LightningModule", "LightningDataModule"}
    ]
    roots = {each.__module__.partition(".")[0] for each in bases}
    return "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"


def _each(loaders: object, module: LightningModule) -> list[Iterable[object]]:
    """The data loaders in whatever a hook returned, as Lightning counts them; none where it returned None."""
    if loaders is None:
        return []
    combined = importlib.import_module(f"{library_of(module)}.utilities.combined_loader").CombinedLoader
    return list((loaders if isinstance(loaders, combined) else combined(loaders, "sequential")).flattened)


def overrides(owner: object, name: str) -> bool:
    """Whether a user's module or DataModule has a hook of its own."""
    helpers = importlib.import_module(f"{library_of(owner)}.utilities.model_helpers")
    return bool(helpers.is_overridden(name, owner))


def _is_datamodule(value: object) -> bool:
    kind = value if inspect.isclass(value) else type(value)
    names = [each.__name__ for each in inspect.getmro(kind)]
    return "LightningDataModule" in names[1:]


def validation_epoch(
    module: LightningModule,
    data: LightningData,
    loaders: Sequence[Iterable[object]],
    max_batches: int | None = None,
    batch_size: int = 0,
) -> dict[str, float]:
    """Validates a module, which is in the mode in which it is to be; returns what it logged, by name.

    Where only `max_batches` of each loader are looked at, one of the same batch size as the training set's is given
    that of training, `batch_size`.
    """
    view: TrainerView = module.trainer
    was_training, view.training, view.validating = view.training, False, True
    view.logged.start_validation()
    module.on_validation_start()
    module.on_validation_epoch_start()
    for number, loader in enumerate(loaders):
        used, training = loader, data.train.batch_size if data.train and max_batches is not None else None
        if isinstance(loader, DataLoader) and training and loader.batch_size == training < batch_size:
            used = resized(loader, batch_size)
        batches = itertools.islice(used, max_batches)
        _validate(module, data, batches, number if len(data.val_loaders) > 1 else None)
    view.logged.see_batch(None)
    module.on_validation_epoch_end()
    module.on_validation_end()
    view.training, view.validating = was_training, False
    return view.logged.finish_validation()


def _validate(module: LightningModule, data: LightningData, batches: Iterable[object], number: int | None) -> None:
    which = () if number is None else (number,)
    for index, batch in enumerate(batches):
        there = data.transferred(module, batch, number or 0)
        module.trainer.logged.see_batch(there, number)
        module.on_validation_batch_start(there, index, *which)
        output = called(module.validation_step, there, index, *which)
        module.on_validation_batch_end(output, there, index, *which)


def called(step: Callable[..., object], *arguments: object) -> object:
    """A step with as many of batch, batch_idx and dataloader_idx as it takes."""
    method = getattr(step, "__func__", None)
    most = _most_arguments(method or step)
    return step(*arguments[: None if most is None else most - (method is not None)])


@functools.cache
def _most_arguments(function: Callable[..., object]) -> int | None:
    """How many arguments a function takes; None: any number."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(each.kind is each.VAR_POSITIONAL for each in parameters) else len(parameters)

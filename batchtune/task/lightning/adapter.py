"""A LightningModule, with its DataModule where there is one, behind the names of the task contract."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from batchtune.document import GradientClipping
from batchtune.task.adapting.adapted import Adapted, LoaderParts, nominal_rate, real_copy, resized, set_learning_rate
from batchtune.task.lightning.data import LightningData, library_of, overrides
from batchtune.task.lightning.manual import ManualSteps
from batchtune.task.lightning.trainer import TrainerView, samples_in

_OWN_LOOP = ("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")


class LightningTask(Adapted):
    """A LightningModule as a task.

    Args:
        make: makes the module, or a pair of module and DataModule, with fresh weights; a module itself is copied.
        namespace: the user's file, in which a DataModule is looked for.
        where: how the user named it.
    """

    keeps_modes = True

    def __init__(self, make: Any, namespace: ModuleType, where: str) -> None:
        super().__init__(where)
        self._make: Callable[[], Any] = (
            make if callable(make) and not isinstance(make, nn.Module) else functools.partial(real_copy, make)
        )
        self._data = LightningData(namespace, where)
        self._micro_batch_size = 0
        self._optimized: weakref.ref[Any] | None = None

    def build_model(self) -> nn.Module:
        """A new module with a stand-in for its Trainer, set up as Lightning does before training."""
        made = self._make()
        module, *given = made if isinstance(made, tuple) else (made,)
        view = TrainerView(self.where, library_of(module), self.samples_per_step)
        module.trainer, module.log = view, view.logged.log
        first = self._data.train is None
        if first:
            self._take_over(self._data.trainer(given))
            self._data.prepare(view, module, given)
        if self.gradient_clipping is not None:
            view.gradient_clip_val = self.gradient_clipping.norm or self.gradient_clipping.value
            view.gradient_clip_algorithm = "value" if self.gradient_clipping.value else "norm"
        if module.automatic_optimization:
            self.lacks("train_step")
        view.datamodule = self._data.module
        module.setup("fit")
        module.configure_model()
        if first:
            self._data.read_loaders(module)
        view.samples_per_epoch = self._data.samples_per_epoch
        return module  # type: ignore[no-any-return]

    def _take_over(self, trainer: Any) -> None:
        """What the user's own Trainer does in each step; None: there is none to be seen."""
        if trainer is None:
            return
        self.accumulation_steps = int(trainer.accumulate_grad_batches)
        if trainer.gradient_clip_val:
            kind = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) or "norm")
            self.gradient_clipping = GradientClipping.model_validate({kind: float(trainer.gradient_clip_val)})

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        module: Any = self.build_model()
        for name in _OWN_LOOP:
            if overrides(module, name):
                raise self.refused(f"it overrides {name}(), which batchtune's own loop cannot honour")
        if overrides(module, "configure_callbacks"):
            raise self.refused("it overrides configure_callbacks(), and batchtune trains without callbacks")
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise self.refused("training_step(dataloader_iter) is not supported; let it take the batch")
        _, schedulers = self._configured(module)
        if not schedulers:
            self.lacks("build_scheduler")
        if purpose == "tune":
            self._require_schedule(schedulers)
            if not overrides(module, "validation_step") or not self._data.val_loaders:
                raise self.refused("tune needs a validation_step that logs the metric, and a val_dataloader")

    def _require_schedule(self, schedulers: Sequence[Any]) -> None:
        if any(config.reduce_on_plateau for config in schedulers):
            raise self.refused("ReduceLROnPlateau waits for a metric at the end of an epoch; use a schedule by steps")
        if any(config.interval == "epoch" for config in schedulers) and self._data.samples_per_epoch is None:
            raise self.refused("its scheduler steps at the end of an epoch, but the training set has no length")

    @property
    def _parts(self) -> LoaderParts:
        if self._data.train is None:
            self.build_model()
        assert self._data.train is not None  # noqa: S101 - build_model reads it or raises
        return self._data.train

    def train_dataset(self) -> object:
        """What the train_dataloader reads."""
        return self._parts.dataset

    def collate(self, samples: Sequence[object]) -> object:
        """A batch as the train_dataloader makes it."""
        return self._parts.collate(samples)

    def train_sampler(self, batch_size: int) -> Sampler[int] | None:
        return self._parts.sampler_for(batch_size)

    def compute_loss(self, module: Any, batch: object) -> Tensor:
        """`training_step`, with the hooks that Lightning calls before it and before backward."""
        output = self._training_step(module, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise self.refused(f"training_step returned {type(loss).__name__} instead of a loss")
        module.on_before_backward(loss)
        return loss

    def _training_step(self, module: Any, batch: object) -> Any:
        view: TrainerView = module.trainer
        if not view.training:
            view.training = True
            for name in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
                getattr(module, name)()
        batch = self._data.transferred(module, batch, 0)
        if module.on_train_batch_start(batch, view.batch_idx) == -1:
            raise self.refused("on_train_batch_start returned -1 to skip the epoch, which is not supported")
        output = _called(module.training_step, batch, view.batch_idx)
        self._micro_batch_size = samples_in(batch) or 0
        view.saw(batch, output, self._micro_batch_size)
        return output

    def _configured(self, module: Any) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """What `configure_optimizers` returned, read by Lightning's own parser."""
        parser = importlib.import_module(f"{library_of(module)}.core.optimizer")
        made = module.configure_optimizers()
        if made is None:
            raise self.refused("configure_optimizers returned None")
        optimizers, schedulers, monitor = parser._configure_optimizers(made)  # noqa: SLF001
        if not module.automatic_optimization:
            return optimizers, parser._configure_schedulers_manual_opt(schedulers)  # noqa: SLF001
        if len(optimizers) != 1:
            raise self.refused(
                f"configure_optimizers returned {len(optimizers)} optimizers, which Lightning trains by manual "
                "optimization only: set self.automatic_optimization = False"
            )
        return optimizers, parser._configure_schedulers_automatic_opt(schedulers, monitor)  # noqa: SLF001

    def build_optimizer(self, module: Any, lr: float) -> list[torch.optim.Optimizer]:
        """Those of `configure_optimizers` at this learning rate, with the module's hooks around their steps.

        The rate is the highest of theirs, the others keep their ratios to it. It is not what a schedule starts with
        unless there is to be one.
        """
        view: TrainerView = module.trainer
        view.total_steps = self.total_steps
        optimizers, schedulers = self._configured(module)
        set_learning_rate(optimizers, lr, (config.scheduler for config in schedulers), where=self.where)
        if self.total_steps is None:
            for group in (group for each in optimizers for group in each.param_groups):
                group["lr"] = nominal_rate(group)
        view.optimizers, view.lr_scheduler_configs = optimizers, schedulers
        view.strategy = ManualSteps(module, optimizers, library_of(module), self.where)
        view.schedule = Schedule(schedulers, view) if schedulers and module.automatic_optimization else None
        self._optimized = weakref.ref(module)

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            module.on_before_zero_grad(optimizer)
            view.global_step += 1
            if module.automatic_optimization:
                view.step_ended(module)

        for each in optimizers:
            each.register_step_post_hook(after)
        return optimizers

    def clip_gradients(self, module: Any, optimizer: torch.optim.Optimizer, clipping: GradientClipping | None) -> None:
        """The hooks between backward and an optimizer's step, of which clipping is one in automatic optimization."""
        if not module.automatic_optimization:
            module.on_before_optimizer_step(optimizer)
            return
        module.on_after_backward()
        module.on_before_optimizer_step(optimizer)
        value, algorithm = (None, None) if clipping is None else (clipping.norm or clipping.value, "norm")
        if clipping is not None and clipping.norm is None:
            algorithm = "value"
        module.configure_gradient_clipping(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    def build_scheduler(self, optimizers: object, total_steps: int) -> Schedule | None:
        """What steps the schedulers of `configure_optimizers`; in manual optimization `training_step` does."""
        del optimizers, total_steps
        module: Any = self._optimized() if self._optimized else None
        return module.trainer.schedule  # type: ignore[no-any-return]

    def train_step(self, module: Any, batch: object, optimizers: object, context: Any) -> Tensor:
        """A `training_step` that optimizes by itself."""
        del optimizers
        view: TrainerView = module.trainer
        view.strategy.context = context
        self._training_step(module, batch)
        view.step_ended(module)
        loss: Tensor | None = view.strategy.latest_loss
        if loss is None:
            raise self.refused("training_step called no manual_backward(loss)")
        return loss

    def evaluate(self, module: Any, max_batches: int | None = None) -> dict[str, float]:
        """The validation epoch: what it logs, by name.

        A run is measured on the user's own batches, whatever it trains with. A look at memory, `max_batches` long, sees
        them as large as in training where the user's loaders have the same batch size.
        """
        return self._validation(module, self._data.val_loaders, max_batches)

    def validate(self, module: Any, batch: object) -> object:
        """A validation epoch of this batch alone; without a validation_step, its training_step."""
        if not overrides(module, "validation_step"):
            return self.compute_loss(module, batch)
        return self._validation(module, [[batch]], None)

    def _validation(self, module: Any, loaders: Sequence[Any], max_batches: int | None) -> dict[str, float]:
        view: TrainerView = module.trainer
        was_training, view.training, view.validating = view.training, False, True
        view.logged.start_validation()
        module.on_validation_start()
        module.on_validation_epoch_start()
        for number, loader in enumerate(loaders):
            self._validate(module, loader, number if len(self._data.val_loaders) > 1 else None, max_batches)
        view.logged.end_validation_steps()
        module.on_validation_epoch_end()
        module.on_validation_end()
        view.training, view.validating = was_training, False
        return view.logged.finish_validation()

    def _validate(self, module: Any, loader: Any, number: int | None, max_batches: int | None) -> None:
        equal = isinstance(loader, DataLoader) and loader.batch_size == self._parts.batch_size
        if max_batches is not None and equal and loader.batch_size < self._micro_batch_size:
            loader = resized(loader, self._micro_batch_size)
        which = () if number is None else (number,)
        for index, batch in enumerate(itertools.islice(loader, max_batches)):
            there = self._data.transferred(module, batch, number or 0)
            module.trainer.logged.see_batch(there, number)
            module.on_validation_batch_start(there, index, *which)
            output = _called(module.validation_step, there, index, *which)
            module.on_validation_batch_end(output, there, index, *which)


class Schedule:
    """Schedulers stepped as Lightning steps them: after each step, or at the end of an epoch."""

    def __init__(self, configs: Sequence[Any], view: TrainerView) -> None:
        self._configs, self._view = configs, view
        self._epoch = view.current_epoch

    def step(self) -> None:
        """Called after each optimizer step."""
        epoch, self._epoch = self._epoch, self._view.current_epoch
        for config in self._configs:
            by_step = config.interval == "step"
            moved = by_step or self._epoch != epoch
            if moved and (self._view.global_step if by_step else self._epoch) % config.frequency == 0:
                config.scheduler.step()


def _called(step: Callable[..., Any], *arguments: Any) -> Any:
    """A step with as many of batch, batch_idx and dataloader_idx as it takes."""
    method = getattr(step, "__func__", None)
    most = _most_arguments(method or step)
    return step(*arguments[: None if most is None else most - (method is not None)])


@functools.cache
def _most_arguments(function: Callable[..., Any]) -> int | None:
    """How many arguments a function takes; None: any number."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(each.kind is each.VAR_POSITIONAL for each in parameters) else len(parameters)

"""A LightningModule and its DataModule behind the names of the task contract."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchtune.document import GradientClipping
from batchtune.protocol.data import CurrentSettings
from batchtune.task.adapting import (
    FromLoader,
    LoaderParts,
    highest_rate,
    nominal_rate,
    read_from,
    real_copy,
    set_learning_rate,
)
from batchtune.task.adapting.plateau import OnPlateau
from batchtune.task.lightning.data import (
    LightningData,
    called,
    configured,
    library_of,
    overrides,
    require_schedule,
    validation_epoch,
)
from batchtune.task.lightning.own_trainer import take_over_trainer
from batchtune.task.lightning.strategy import LightningModule, StrategyView
from batchtune.task.lightning.trainer import (
    Schedule,
    TrainerView,
    clip_arguments,
    samples_in,
    schedules,
)

_OWN_LOOP = ("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")


class LightningTask(FromLoader):
    """A LightningModule as a task.

    Args:
        make: makes the module, or a pair of module and DataModule, with fresh weights; a module itself is copied.
        namespace: the user's file, in which a DataModule is looked for.
        where: how the user named it.
    """

    keeps_modes = True
    frees_between = True  # Lightning's loop; in manual optimization training_step does, wherever it wants

    def __init__(self, make: object, namespace: ModuleType, where: str) -> None:
        super().__init__(where)
        self._make: Callable[[], Any] = (
            make if callable(make) and not isinstance(make, nn.Module) else functools.partial(real_copy, make)
        )
        self._namespace, self._data = namespace, LightningData(namespace, where)
        self._micro_batch_size = 0
        self._monitored: list[str] = []
        self._optimized: weakref.ref[nn.Module] | None = None

    def build_model(self) -> nn.Module:
        """A new module with a stand-in for its Trainer, set up as Lightning does before training."""
        made = self._make()
        module, *given = made if isinstance(made, tuple) else (made,)
        view = TrainerView(self.where, module, library_of(module), self.samples_per_step)
        module.trainer, module.log = view, view.logged.log
        first = self._data.train is None
        if first:
            take_over_trainer(self, given, self._namespace)
            self._data.prepare(view, module, given)
        vars(view).update(clip_arguments(self.gradient_clipping))
        if module.automatic_optimization:
            self.lacks("train_step")
        view.datamodule = self._data.module
        module.setup("fit")
        module.configure_model()
        if first:
            self._data.read_loaders(module)
        view.samples_per_epoch = self._data.samples_per_epoch
        return module  # type: ignore[no-any-return]

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        module: LightningModule = self.build_model()
        for name in _OWN_LOOP:
            if overrides(module, name):
                raise self.refused(f"it overrides {name}(), which batchtune's own loop cannot honour")
        if overrides(module, "configure_callbacks"):
            raise self.refused("it overrides configure_callbacks(), and batchtune trains without callbacks")
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise self.refused("training_step(dataloader_iter) is not supported; let it take the batch")
        _, schedulers = configured(module, self)
        if not schedulers:
            self.lacks("build_scheduler")
        if purpose == "tune":
            require_schedule(schedulers, self._data.samples_per_epoch, self)
            self._monitored = [str(config.monitor) for config in schedulers if config.reduce_on_plateau]
            if not overrides(module, "validation_step") or not self._data.val_loaders:
                raise self.refused("tune needs a validation_step that logs the metric, and a val_dataloader")

    def current_settings(self) -> CurrentSettings:
        optimizers, _ = configured(self.build_model(), self)
        where = read_from("train_dataloader", "accumulate_grad_batches", self.accumulation_steps)
        return CurrentSettings(
            batch_size=(self.parts.batch_size * self.accumulation_steps, where),
            learning_rate=(highest_rate(optimizers), "configure_optimizers"),
        )

    @property
    def parts(self) -> LoaderParts:
        """What the train_dataloader is made of."""
        if self._data.train is None:
            self.build_model()
        assert self._data.train is not None  # noqa: S101 - build_model reads it or raises
        return self._data.train

    def compute_loss(self, module: LightningModule, batch: object) -> Tensor:
        """`training_step`, with the hooks that Lightning calls before it and before backward."""
        output = self._training_step(module, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise self.refused(f"training_step returned {type(loss).__name__} instead of a loss")
        module.on_before_backward(loss)
        return loss

    def _training_step(self, module: LightningModule, batch: object) -> object:
        view: TrainerView = module.trainer
        if not view.training:
            view.training = True
            for name in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
                getattr(module, name)()
        batch = self._data.transferred(module, batch, 0)
        if module.on_train_batch_start(batch, view.batch_idx) == -1:
            raise self.refused("on_train_batch_start returned -1 to skip the epoch, which is not supported")
        output = called(module.training_step, batch, view.batch_idx)
        self._micro_batch_size = samples_in(batch) or 0
        view.saw(batch, output, self._micro_batch_size)
        return output

    def build_optimizer(self, module: LightningModule, lr: float) -> list[Optimizer]:
        """Those of `configure_optimizers` at this learning rate, with the module's hooks around their steps.

        The rate is the highest of theirs, the others keep their ratios to it. It is not what a schedule starts with
        unless there is to be one.
        """
        view: TrainerView = module.trainer
        view.total_steps, view.was_asked_for_steps = self.total_steps, False
        optimizers, schedulers = configured(module, self)
        self.asks_for_total_steps = view.was_asked_for_steps
        own = module.hparams.get("lr")
        ratio = highest_rate(optimizers) / own if isinstance(own, float) and own > 0 else None
        self.optimizer_settings = {"made_by": "configure_optimizers", "lr_ratio": ratio}
        set_learning_rate(optimizers, lr, (config.scheduler for config in schedulers), where=self.where)
        if self.total_steps is None:
            for group in (group for each in optimizers for group in each.param_groups):
                group["lr"] = nominal_rate(group)
        view.optimizers, view.lr_scheduler_configs = optimizers, schedulers
        view.strategy = StrategyView(module, optimizers, library_of(module), self.where)
        self._optimized = weakref.ref(module)

        def after(optimizer: Optimizer, *_: object) -> None:
            module.on_before_zero_grad(optimizer)
            view.global_step += 1
            if module.automatic_optimization:
                view.step_ended(module)

        for each in optimizers:
            each.register_step_post_hook(after)
        return optimizers

    def clip_gradients(self, module: LightningModule, optimizer: Optimizer, clipping: GradientClipping | None) -> None:
        """The hooks between backward and an optimizer's step, of which clipping is one in automatic optimization."""
        if not module.automatic_optimization:
            module.on_before_optimizer_step(optimizer)
            return
        module.on_after_backward()
        module.on_before_optimizer_step(optimizer)
        module.configure_gradient_clipping(optimizer, **clip_arguments(clipping))

    def build_scheduler(self, optimizers: object, total_steps: int) -> list[Schedule | OnPlateau]:
        """What steps the schedulers of `configure_optimizers`; in manual optimization `training_step` does."""
        del optimizers, total_steps
        module: LightningModule = self._optimized() if self._optimized else None
        return schedules(module.trainer) if module.automatic_optimization else []

    def train_step(self, module: LightningModule, batch: object, optimizers: object, context: object) -> Tensor:
        """A `training_step` that optimizes by itself; its loss is the mean of all, so that none hides another's NaN."""
        del optimizers
        view: TrainerView = module.trainer
        assert view.strategy is not None  # noqa: S101 - build_optimizer has set it
        view.strategy.context, view.strategy.losses = context, []
        self._training_step(module, batch)
        view.step_ended(module)
        if not view.strategy.losses:
            raise self.refused("training_step called no manual_backward(loss)")
        return torch.stack(view.strategy.losses).mean()

    def evaluate(self, module: LightningModule, max_batches: int | None = None) -> dict[str, float]:
        """The validation epoch: what it logs, by name.

        A run is measured on the user's own batches, whatever it trains with. A look at memory, `max_batches` long, sees
        them as large as in training where the user's loaders have the same batch size.
        """
        found = validation_epoch(module, self._data, self._data.val_loaders, max_batches, self._micro_batch_size)
        for monitor in self._monitored:
            module.trainer.logged.validated(monitor)
        return found

    def validate(self, module: LightningModule, batch: object) -> object:
        """A validation epoch of this batch alone; without a validation_step, its training_step."""
        if not overrides(module, "validation_step"):
            return self.compute_loss(module, batch)
        return validation_epoch(module, self._data, [[batch]])

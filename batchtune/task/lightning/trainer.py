"""What a LightningModule finds in `self.trainer` and behind `self.log` while batchtune, not Lightning, trains it."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from batchtune.document import GradientClipping
from batchtune.errors import UsageError
from batchtune.task.adapting.plateau import OnPlateau
from batchtune.task.lightning.strategy import LightningModule, StrategyView, not_there

SchedulerConfig: TypeAlias = Any  # its LRSchedulerConfig: a scheduler and when it steps, as its parser has it
Metric: TypeAlias = Any  # what is computed over an epoch, such as a torchmetrics.Metric
_REDUCTIONS = ("mean", "sum", "max", "min")


class TrainerView:
    """Stands in for `self.trainer`: progress and facts that are true in batchtune; what is None is not known.

    Args:
        where: how the user named the module, for messages.
        module: what is trained, also as the Trainer's `model`, which no strategy wraps here.
        library: the module's Lightning, `lightning.pytorch` or `pytorch_lightning`.
        samples_per_step: of an optimizer step.
    """

    accumulate_grad_batches = check_val_every_n_epoch = 1
    training = validating = sanity_checking = testing = predicting = evaluating = False
    fast_dev_run = overfit_batches = barebones = should_stop = False
    log_every_n_steps = 50
    progress_bar_callback = checkpoint_callback = early_stopping_callback = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    ckpt_path = default_root_dir = log_dir = None

    def __init__(self, where: str, module: LightningModule, library: str, samples_per_step: int | None = None) -> None:
        self._where = where
        self.model = self.lightning_module = module
        self.datamodule: object = None
        self.global_step, self.current_epoch, self.batch_idx = 0, 0, 0
        self.samples_per_epoch: int | None = None
        self.samples_per_step = samples_per_step
        self.total_steps: int | None = None
        self.was_asked_for_steps = False
        self._samples = {"step": 0, "epoch": 0}
        self._last: tuple[object, object] = (None, None)
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.callbacks: list[object] = []
        self.strategy: StrategyView | None = None
        self.precision_plugin = importlib.import_module(f"{library}.plugins.precision").Precision()
        self.logger = importlib.import_module(f"{library}.loggers.logger").DummyLogger()
        self.loggers = [self.logger]
        self.logged = Logged(where)

    @property
    def world_size(self) -> int:
        """Ranks that train as one."""
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    @property
    def num_devices(self) -> int:
        """Those of them on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) if self.world_size > 1 else 1

    @property
    def num_nodes(self) -> int:
        """The machines that they are on."""
        return self.world_size // self.num_devices

    @property
    def global_rank(self) -> int:
        """This one's number among them."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        """Its number among those on this machine."""
        return self.global_rank % self.num_devices

    @property
    def node_rank(self) -> int:
        """The number of its machine."""
        return self.global_rank // self.num_devices

    @property
    def is_global_zero(self) -> bool:
        """Whether it is the first."""
        return self.global_rank == 0

    @property
    def num_training_batches(self) -> int | float:
        """Optimizer steps of an epoch; infinite for a data set without length."""
        if self.samples_per_epoch is None:
            return math.inf
        return max(1, self.samples_per_epoch // (self.samples_per_step or 1))

    @property
    def is_last_batch(self) -> bool:
        """Whether the epoch ends with this batch."""
        return self.batch_idx + 1 >= self.num_training_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the run, as predicted from its time limit."""
        self.was_asked_for_steps = True
        return self.total_steps if self.total_steps is not None else self.num_training_batches

    @property
    def max_steps(self) -> int:
        """As `estimated_stepping_batches`; -1 where it is not known."""
        self.was_asked_for_steps = True
        return self.total_steps if self.total_steps is not None else -1

    @property
    def max_epochs(self) -> int:
        """Epochs that the run's steps make, at least one."""
        steps, epoch = self.estimated_stepping_batches, self.num_training_batches
        return max(1, math.ceil(steps / epoch)) if math.isfinite(epoch) else 1

    @property
    def callback_metrics(self) -> Mapping[str, object]:
        """What was logged last, by name."""
        return self.logged.latest

    logged_metrics = progress_bar_metrics = callback_metrics

    def saw(self, batch: object, output: object, samples: int) -> None:
        """A micro-batch of so many samples has been through the training step, on each rank one."""
        samples *= self.world_size
        self._last = (batch, tree_map_only(Tensor, Tensor.detach, output))
        self._samples = {name: count + samples for name, count in self._samples.items()}

    def step_ended(self, module: LightningModule) -> None:
        """A step is over: the hooks of batch and epoch, and the counts they may look at."""
        batch, output = self._last
        self._last = (None, None)
        self.samples_per_step, self._samples["step"] = self._samples["step"], 0
        module.on_train_batch_end(output, batch, self.batch_idx)
        self.batch_idx += 1
        left = None if self.samples_per_epoch is None else self.samples_per_epoch - self._samples["epoch"]
        if left is not None and left < self.samples_per_step:
            module.on_train_epoch_end()
            self.logged.end_training_epoch()
            self.current_epoch, self.batch_idx, self._samples["epoch"] = self.current_epoch + 1, 0, 0
            module.on_train_epoch_start()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_there(self._where, name)


class Logged:
    """What `self.log` is given: in validation reduced over the epoch as Lightning does it, in training remembered."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.latest: dict[str, object] = {}
        self._validated: dict[str, float] = {}
        self._validating = False
        self._batch_size: int | None = None
        self._suffix = ""
        self._sums: dict[str, tuple[Tensor | float, float]] = {}  # each with its weight
        self._metrics: dict[str, Metric] = {}
        self._training_metrics: dict[str, Metric] = {}

    def start_validation(self) -> None:
        """Forgets the last validation."""
        self._validating, self._sums, self._metrics = True, {}, {}

    def see_batch(self, batch: object, loader: int | None = None) -> None:
        """The batch that is logged for from now on (None: the whole epoch), and its loader's number, if of several."""
        self._batch_size, self._suffix = samples_in(batch), "" if loader is None else f"/dataloader_idx_{loader}"

    def finish_validation(self) -> dict[str, float]:
        """Name and value of everything that was logged since the start."""
        self._validating = False
        found = {name: float(total / weight) for name, (total, weight) in self._sums.items() if weight}
        for name, metric in self._metrics.items():
            value = metric.compute()
            metric.reset()
            if isinstance(value, float | int) or value.numel() == 1:
                found[name] = float(value)
        self.latest |= found
        self._validated = found
        return found

    def validated(self, name: str) -> float:
        """What the last validation logged by this name; UsageError where there is no such thing."""
        if name not in self._validated:
            logged = ", ".join(self._validated) or "nothing"
            text = f"ReduceLROnPlateau monitors '{name}', which validation does not log; monitor one of {logged}"
            raise UsageError(f"{self._where}: {text}")
        return self._validated[name]

    def end_training_epoch(self) -> None:
        """Metrics that training logs start over, as they do in Lightning."""
        for metric in self._training_metrics.values():
            metric.reset()

    def log(
        self,
        name: str,
        value: Metric | Tensor | float,
        *flags: object,
        reduce_fx: object = "mean",
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        **_: object,
    ) -> None:
        """`LightningModule.log`."""
        del flags
        if hasattr(value, "compute") and hasattr(value, "reset"):  # a torchmetrics.Metric
            if self._validating:
                self._metrics[f"{name}{self._suffix}"] = value
            else:
                self._training_metrics[name] = value
            return
        value = value.detach() if isinstance(value, Tensor) else value
        if not self._validating:
            self.latest[name] = value
            return
        self._add(f"{name}{self._suffix}" if add_dataloader_idx else name, value, reduce_fx, batch_size)

    def _add(self, name: str, value: Tensor | float, reduce_fx: object, batch_size: int | None) -> None:
        how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if how not in _REDUCTIONS:
            raise UsageError(f"{self._where}: self.log({name!r}, reduce_fx={reduce_fx!r}): use mean, sum, max or min")
        value = value.float().mean() if isinstance(value, Tensor) else float(value)
        weight = float(batch_size or self._batch_size or 1)
        before = self._sums.get(name)
        if how == "mean":
            total, weighed = before or (0.0, 0.0)
            self._sums[name] = (total + value * weight, weighed + weight)
        elif before is None:
            self._sums[name] = (value, 1.0)
        else:
            both = torch.stack([torch.as_tensor(before[0]), torch.as_tensor(value)])
            self._sums[name] = (getattr(both, how)(), 1.0)


def schedules(view: TrainerView) -> list[Schedule | OnPlateau]:
    """What steps the view's schedulers; those on a plateau with what they monitor, which the validation logs."""
    configs = [config for config in view.lr_scheduler_configs if not config.reduce_on_plateau]
    found: list[Schedule | OnPlateau] = [Schedule(configs, view)] if configs else []
    for config in view.lr_scheduler_configs:
        if config.reduce_on_plateau:
            metric = functools.partial(view.logged.validated, str(config.monitor))
            found.append(OnPlateau(config.scheduler, metric, config.frequency))
    return found


class Schedule:
    """Schedulers stepped as Lightning steps them: after each step, or at the end of an epoch."""

    def __init__(self, configs: Sequence[SchedulerConfig], view: TrainerView) -> None:
        self._configs, self._view = configs, view
        self.names = [type(config.scheduler).__name__ for config in configs]
        self._epoch = view.current_epoch

    def step(self) -> None:
        """Called after each optimizer step."""
        epoch, self._epoch = self._epoch, self._view.current_epoch
        for config in self._configs:
            by_step = config.interval == "step"
            moved = by_step or self._epoch != epoch
            if moved and (self._view.global_step if by_step else self._epoch) % config.frequency == 0:
                config.scheduler.step()


def clip_arguments(clipping: GradientClipping | None) -> dict[str, float | str | None]:
    """Gradient clipping as arguments of Lightning's own Trainer."""
    if clipping is None:
        return {"gradient_clip_val": None, "gradient_clip_algorithm": None}
    algorithm = "value" if clipping.value else "norm"
    return {"gradient_clip_val": clipping.norm or clipping.value, "gradient_clip_algorithm": algorithm}


def samples_in(batch: object) -> int | None:
    """Samples of a batch: the first dimension of its first tensor; None where there is none."""
    sizes = (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, None)

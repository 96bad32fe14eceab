"""A Hugging Face `Trainer` behind the names of the task contract."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from batchtune.document import GradientClipping
from batchtune.protocol.data import CurrentSettings, TrainingLength
from batchtune.task.adapting import (
    FromLoader,
    LoaderParts,
    highest_rate,
    loader_parts,
    read_from,
    real_copy,
    set_learning_rate,
)
from batchtune.task.adapting.plateau import OnPlateau
from batchtune.task.transformers.beside import Beside, HuggingFaceTrainer

_OF_OPTIMIZERS = ("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_SCHEDULES = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
_OF_EVALUATION = ("eval_strategy", "metric_for_best_model")  # for which a schedule may wait
_STEPS_IN_BACKWARD = ("layerwise", "lomo")


class TrainerTask(FromLoader):
    """A Hugging Face Trainer as a task: its model, data, collator, loss, optimizer, clipping, schedule and metrics.

    A new model is what the Trainer's `model_init` makes, else a copy of its model with the weights that it came with.
    The Trainer's callbacks are taken off: what they wait for does not happen.
    """

    def __init__(self, trainer: HuggingFaceTrainer, where: str) -> None:
        super().__init__(where)
        self._trainer, self._args = trainer, trainer.args
        if self._args.n_gpu > 1:  # or it evaluates on all of them
            self._args._n_gpu = 1  # noqa: SLF001
        taken = inspect.signature(trainer.compute_loss).parameters
        self._counts_items = hasattr(trainer, "_get_num_items_in_batch") and (
            "num_items_in_batch" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
        )
        self.accumulation_steps = int(self._args.gradient_accumulation_steps)
        steps, epochs = self._args.max_steps, self._args.num_train_epochs
        self.training_length = TrainingLength(steps=int(steps)) if steps > 0 else TrainingLength(epochs=float(epochs))
        if self._args.max_grad_norm:
            self.gradient_clipping = GradientClipping(norm=self._args.max_grad_norm)
        trainer.callback_handler.callbacks = []
        self._beside = Beside(trainer)
        self._given = (trainer.model.to("cpu"), trainer.optimizer)
        rate = highest_rate([trainer.optimizer]) if trainer.optimizer is not None else float(self._args.learning_rate)
        self._current_rate = rate, "optimizers of the Trainer" if trainer.optimizer is not None else "learning_rate"
        self._has_scheduler = trainer.lr_scheduler is not None
        fields = _OF_SCHEDULES if trainer.optimizer is not None else (*_OF_OPTIMIZERS, *_OF_SCHEDULES)
        self.optimizer_settings: dict[str, Any] = {"made_by": "Trainer", "arguments": _plain(self._args, fields)}
        self._optimizer: Optimizer | None = None
        self._waits_for_metric, self._evaluated = False, dict[str, float]()
        self._let_go()

    def _let_go(self) -> None:
        """Forgets the model in training, whose memory the next attempt needs."""
        self._trainer.model = self._trainer.model_wrapped = self._given[0]
        self._trainer.optimizer = self._trainer.lr_scheduler = None
        self._beside.leave()

    @contextlib.contextmanager
    def _holding(self, model: nn.Module) -> Iterator[HuggingFaceTrainer]:
        self._trainer.model = self._trainer.model_wrapped = model
        self._beside.follow(model)
        try:
            yield self._trainer
        finally:
            self._let_go()

    @property
    def _evaluates(self) -> bool:
        return self._trainer.eval_dataset is not None or _has_own(self._trainer, "evaluate")

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        refusals = _not_honoured(self._trainer)
        if purpose == "tune":
            kind, evaluates = (_value(getattr(self._args, name)) for name in ("lr_scheduler_type", "eval_strategy"))
            self._waits_for_metric = kind == "reduce_lr_on_plateau"
            self.asks_for_total_steps = not self._waits_for_metric
            if kind == "constant" and not _has_own(self._trainer, "create_scheduler"):
                self.lacks("build_scheduler")
            if self._waits_for_metric:
                self.optimizer_settings["arguments"] |= _plain(self._args, _OF_EVALUATION)
            refusals |= {"tune needs an eval_dataset": not self._evaluates}
            refusals |= _not_honoured_of_schedules(kind, evaluates, made=self._has_scheduler)
        for why, holds in refusals.items():
            if holds:
                raise self.refused(why)
        self.parts  # noqa: B018 - a loader that cannot be made again is to be found now

    def current_settings(self) -> CurrentSettings:
        size, steps = self.parts.batch_size, self.accumulation_steps
        where = read_from("per_device_train_batch_size", "gradient_accumulation_steps", steps)
        return CurrentSettings(batch_size=(size * steps, where), learning_rate=self._current_rate)

    @cached_property
    def parts(self) -> LoaderParts:
        """What the Trainer's data loader is made of, which reads no columns that the model does not take."""
        return loader_parts(self._trainer.get_train_dataloader(), f"{self.where}: get_train_dataloader()")

    def build_model(self) -> nn.Module:
        """A new model with what the training arguments do to it before training."""
        args, model = self._args, None
        self._beside.put_back()
        if self._trainer.model_init is not None:
            model, self._optimizer = self._trainer.call_model_init(), None
            if getattr(model, "config", None) is not None:
                model.config.use_cache = getattr(args, "use_cache", False)
        else:  # an optimizer handed to the Trainer is copied with its parameters
            model, self._optimizer = real_copy(self._given)
        if getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None):
            _checkpoint_activations(model, args)
        if args.torch_compile:
            model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        return model  # type: ignore[no-any-return]

    def compute_loss(self, model: nn.Module, batch: Mapping[str, object]) -> Tensor:
        """The Trainer's own: label smoothing, `compute_loss_func`, or what a subclass makes of it."""
        with self._holding(model) as trainer:
            counted = {}
            if self._counts_items:  # None where neither the model nor `compute_loss_func` asks for it
                device = next(model.parameters()).device
                counted["num_items_in_batch"] = trainer._get_num_items_in_batch([batch], device)  # noqa: SLF001
            return trainer.compute_loss(model, dict(batch), **counted)  # type: ignore[no-any-return]

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """What `create_optimizer` makes at this learning rate."""
        with self._holding(model) as trainer:
            trainer.optimizer, self._optimizer = self._optimizer, None
            self._args.learning_rate = lr
            trainer.create_optimizer()
            optimizer: Optimizer = trainer.optimizer
        set_learning_rate([optimizer], lr, where=self.where)
        progress = self._trainer.state
        progress.global_step = 0

        def after(*_: object) -> None:
            progress.global_step += 1

        optimizer.register_step_post_hook(after)
        return optimizer

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> object:
        """What `create_scheduler` makes for so many steps; on a plateau it waits for `metric_for_best_model`."""
        try:
            made = self._trainer.create_scheduler(num_training_steps=total_steps, optimizer=optimizer)
        finally:
            self._let_go()
        return OnPlateau(made, lambda: self._evaluated[self._best_metric]) if self._waits_for_metric else made

    @property
    def _best_metric(self) -> str:
        name = str(self._args.metric_for_best_model)
        return name if name.startswith("eval_") else f"eval_{name}"

    def evaluate(self, model: nn.Module, max_batches: int | None = None) -> dict[str, float]:
        """The Trainer's own `evaluate`: `eval_loss` (also as `val_loss`) and what `compute_metrics` returns.

        Nothing, where it has nothing to evaluate on: such a Trainer trains, and can be probed.
        """
        if not self._evaluates:
            return {}
        device = next(model.parameters()).device
        if device.type == self._args.device.type:  # it takes the first of them otherwise
            vars(self._args)["_setup_devices"] = self._trainer.accelerator.state.device = device
        if device != self._args.device:
            raise self.refused(
                f"the model is on {device}, and the Trainer evaluates on {self._args.device}; choose the same with "
                "--device (or use_cpu in its arguments)"
            )
        data, most = self._trainer.eval_dataset, (max_batches or 0) * self._args.eval_batch_size
        few = {"eval_dataset": _first(data, most)} if max_batches is not None and data is not None else {}
        with self._holding(model) as trainer:
            trainer.accelerator._models[:] = [model]  # noqa: SLF001 - or it wraps it in a precision of its own
            trainer.is_in_train = True
            try:
                found = trainer.evaluate(**few)
            finally:
                trainer.is_in_train = False
                trainer.accelerator._models.clear()  # noqa: SLF001
        numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        if self._waits_for_metric and self._best_metric not in numbers:
            what = f"metric_for_best_model={self._args.metric_for_best_model}"
            raise self.refused(f"{what} is not among what it evaluates: {', '.join(numbers)}")
        self._evaluated = numbers
        return ({"val_loss": numbers["eval_loss"]} if "eval_loss" in numbers else {}) | numbers


def _not_honoured(trainer: HuggingFaceTrainer) -> dict[str, bool]:
    """What a Trainer may have or lack that batchtune's own loop has no place for, and whether this one does."""
    args, optim = trainer.args, _value(trainer.args.optim)
    own_step = _has_own(trainer, "training_step")
    return {
        "the Trainer has no train_dataset": trainer.train_dataset is None,
        "it overrides training_step(), which batchtune's own loop cannot honour": own_step,
        "neftune_noise_alpha is not supported": args.neftune_noise_alpha is not None,
        "use_liger_kernel is not supported": bool(getattr(args, "use_liger_kernel", False)),
        **_ranks_of_its_own(vars(args)),
        "a model spread over several devices is not supported": bool(trainer.is_model_parallel),
        f"optim={optim} steps within backward, which is not supported": any(
            word in optim for word in _STEPS_IN_BACKWARD
        ),
    }


def _not_honoured_of_schedules(kind: str, evaluates: str, *, made: bool) -> dict[str, bool]:
    """The same of a `lr_scheduler_type`, beside an `eval_strategy`, and of a scheduler that is `made` already."""
    by_epochs = kind == "reduce_lr_on_plateau"
    return {
        "lr_scheduler_type=greedy waits for a metric; use one that goes by steps": kind == "greedy",
        f"lr_scheduler_type={kind} goes by epochs here; set eval_strategy='epoch'": by_epochs and evaluates != "epoch",
        "the scheduler of optimizers=(…, …) counts on a fixed number of steps; use lr_scheduler_type": made,
    }


def _ranks_of_its_own(arguments: Mapping[str, object]) -> dict[str, bool]:
    """What of them, or of the environment that `accelerate launch` makes of its file, shares the work otherwise."""
    names = {name: bool(arguments[name]) for name in ("fsdp", "deepspeed")}
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        variable = f"ACCELERATE_USE_{name}"
        names[variable] = os.environ.get(variable, "").lower() in {"1", "true", "yes", "y", "t", "on"}
    instead = "leave it out and tune with --ranks N --strategy fsdp (as ZeRO-3) or ddp"
    return {f"its {name} is not taken over: {instead}": given for name, given in names.items()}


def _plain(arguments: object, names: Iterable[str]) -> dict[str, bool | int | float | str]:
    """Those of the arguments that are plain values, or a dict in JSON, as TrainingArguments takes it, too."""
    given = {name: getattr(arguments, name, None) for name in names}
    plain = {name: getattr(each, "value", each) for name, each in given.items()}
    written = {name: json.dumps(each) if isinstance(each, dict) else each for name, each in plain.items()}
    return {name: each for name, each in written.items() if isinstance(each, bool | int | float | str)}


def _value(argument: object) -> str:
    """What an argument is called, which may be an enum's member."""
    return str(getattr(argument, "value", argument))


def _has_own(trainer: object, name: str) -> bool:
    ours = next(each for each in inspect.getmro(type(trainer)) if each.__module__ == "transformers.trainer")
    return getattr(type(trainer), name) is not getattr(ours, name)


def _first(data: Any, samples: int) -> object:
    """The first samples of a set or of each of several; all where it has no length."""
    if isinstance(data, dict):
        return {name: _first(each, samples) for name, each in data.items()}
    if not hasattr(data, "__len__"):
        return data
    order = range(min(samples, len(data)))
    return data.select(order) if hasattr(data, "select") else Subset(data, order)


def _checkpoint_activations(model: Any, args: Any) -> None:
    """As Trainer.train does it; transformers 5 has it under another name."""
    if hasattr(model, "activation_checkpointing_enable"):
        how = dict(args.activation_checkpointing_kwargs or {})
        own = {name: how.pop(name) for name in ("every_n_layers", "offload") if name in how}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how or None, **own)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)

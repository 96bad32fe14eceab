"""A Hugging Face `Trainer`, or a model of transformers by itself, behind the names of the task contract."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, Subset

from batchtune.document import GradientClipping
from batchtune.task.adapting.adapted import Adapted, LoaderParts, loader_parts, real_copy, set_learning_rate
from batchtune.task.transformers.generated import GeneratedBatches

_STEPS_IN_BACKWARD = ("layerwise", "lomo")
_UNSUITED = (AttributeError, LookupError, TypeError, ValueError)  # of a model whose inputs are not as they should be
_WAITS_FOR_METRIC = ("reduce_lr_on_plateau", "greedy")


class TrainerTask(Adapted):
    """A Hugging Face Trainer as a task: its model, data, collator, loss, optimizer, clipping, schedule and metrics.

    A new model is what the Trainer's `model_init` makes, else a copy of its model with the weights that it came with.

    Args:
        trainer: the user's. Its callbacks are taken off: what they wait for does not happen.
        where: how the user named it.
    """

    def __init__(self, trainer: Any, where: str) -> None:
        super().__init__(where)
        self._trainer, self._args = trainer, trainer.args
        if self._args.n_gpu > 1:  # or it evaluates on all of them
            self._args._n_gpu = 1  # noqa: SLF001
        taken = inspect.signature(trainer.compute_loss).parameters
        self._counts_items = hasattr(trainer, "_get_num_items_in_batch") and (
            "num_items_in_batch" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
        )
        self.accumulation_steps = int(self._args.gradient_accumulation_steps)
        if self._args.max_grad_norm:
            self.gradient_clipping = GradientClipping(norm=self._args.max_grad_norm)
        trainer.callback_handler.callbacks = []
        self._given = (trainer.model.to("cpu"), trainer.optimizer)
        self._has_scheduler = trainer.lr_scheduler is not None
        self._optimizer: Any = None
        self._let_go()

    def _let_go(self) -> None:
        """Forgets the model in training, whose memory the next attempt needs."""
        self._trainer.model = self._trainer.model_wrapped = self._given[0]
        self._trainer.optimizer = self._trainer.lr_scheduler = None

    @contextlib.contextmanager
    def _holding(self, model: nn.Module) -> Iterator[Any]:
        self._trainer.model = self._trainer.model_wrapped = model
        try:
            yield self._trainer
        finally:
            self._let_go()

    def _overrides(self, name: str) -> bool:
        ours = next(each for each in inspect.getmro(type(self._trainer)) if each.__module__ == "transformers.trainer")
        return getattr(type(self._trainer), name) is not getattr(ours, name)

    @property
    def _evaluates(self) -> bool:
        return self._trainer.eval_dataset is not None or self._overrides("evaluate")

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        trainer, args = self._trainer, self._args
        optim = str(getattr(args.optim, "value", args.optim))
        refusals = {
            "the Trainer has no train_dataset": trainer.train_dataset is None,
            "it overrides training_step(), which batchtune's own loop cannot honour": self._overrides("training_step"),
            "neftune_noise_alpha is not supported": args.neftune_noise_alpha is not None,
            "use_liger_kernel is not supported": bool(getattr(args, "use_liger_kernel", False)),
            "DeepSpeed and FSDP are not supported": bool(args.deepspeed or args.fsdp),
            "a model spread over several devices is not supported": bool(trainer.is_model_parallel),
            f"optim={optim} steps within backward, which is not supported": any(
                word in optim for word in _STEPS_IN_BACKWARD
            ),
        }
        if purpose == "tune":
            kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
            refusals |= {
                "tune needs an eval_dataset": not self._evaluates,
                f"lr_scheduler_type={kind} waits for a metric; use one that goes by steps": kind in _WAITS_FOR_METRIC,
                "the scheduler of optimizers=(…, …) counts on a fixed number of steps; use lr_scheduler_type": (
                    self._has_scheduler
                ),
            }
        for why, holds in refusals.items():
            if holds:
                raise self.refused(why)
        self._parts  # noqa: B018 - a loader that cannot be made again is to be found now

    @cached_property
    def _parts(self) -> LoaderParts:
        return loader_parts(self._trainer.get_train_dataloader(), f"{self.where}: get_train_dataloader()")

    def train_dataset(self) -> object:
        """What the Trainer's data loader reads: without the columns that the model does not take."""
        return self._parts.dataset

    def collate(self, samples: Sequence[object]) -> object:
        """A batch by the Trainer's collator."""
        return self._parts.collate(samples)

    def train_sampler(self, batch_size: int) -> Sampler[int] | None:
        return self._parts.sampler_for(batch_size)

    def build_model(self) -> nn.Module:
        """A new model with what the training arguments do to it before training."""
        args, model = self._args, None
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

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The Trainer's own: label smoothing, `compute_loss_func`, or what a subclass makes of it."""
        with self._holding(model) as trainer:
            counted = {}
            if self._counts_items:  # None where neither the model nor `compute_loss_func` asks for it
                device = next(model.parameters()).device
                counted["num_items_in_batch"] = trainer._get_num_items_in_batch([batch], device)  # noqa: SLF001
            loss: Tensor = trainer.compute_loss(model, dict(batch), **counted)
            return loss

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """What `create_optimizer` makes at this learning rate."""
        with self._holding(model) as trainer:
            trainer.optimizer, self._optimizer = self._optimizer, None
            self._args.learning_rate = lr
            trainer.create_optimizer()
            optimizer: torch.optim.Optimizer = trainer.optimizer
        set_learning_rate([optimizer], lr, where=self.where)
        progress = self._trainer.state
        progress.global_step = 0

        def after(*_: object) -> None:
            progress.global_step += 1

        optimizer.register_step_post_hook(after)
        return optimizer

    def build_scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        """What `create_scheduler` makes for so many steps."""
        try:
            return self._trainer.create_scheduler(num_training_steps=total_steps, optimizer=optimizer)
        finally:
            self._let_go()

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
        few = {} if max_batches is None else self._some(max_batches * self._args.eval_batch_size)
        with self._holding(model) as trainer:
            trainer.accelerator._models[:] = [model]  # noqa: SLF001 - or it wraps it in a precision of its own
            trainer.is_in_train = True
            try:
                found = trainer.evaluate(**few)
            finally:
                trainer.is_in_train = False
                trainer.accelerator._models.clear()  # noqa: SLF001
        numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        return ({"val_loss": numbers["eval_loss"]} if "eval_loss" in numbers else {}) | numbers

    def _some(self, samples: int) -> dict[str, Any]:
        """The first samples of the evaluation set, as an argument of `evaluate`; none where it has no length."""
        data = self._trainer.eval_dataset
        if isinstance(data, dict):
            return {"eval_dataset": {name: _first(each, samples) for name, each in data.items()}}
        return {} if data is None else {"eval_dataset": _first(data, samples)}


def _first(data: Any, samples: int) -> Any:
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


class ModelTask(Adapted):
    """A PreTrainedModel by itself, with batches made up from its configuration: for `probe` and `estimate`.

    Args:
        model: the model, or the first that a factory made.
        make: the factory, or the model itself, which is then copied.
        where: how the user named it.
    """

    def __init__(self, model: Any, make: Any, where: str) -> None:
        super().__init__(where)
        is_made, name = not isinstance(make, nn.Module), where.rpartition(":")[2]
        self._batches = GeneratedBatches(model, where, f"{name}()" if is_made else f"copy.deepcopy({name})")
        self.make_batch, self.notes = self._batches.make, tuple(self._batches.assumed)
        self.build_model: Callable[[], nn.Module] = make if is_made else partial(real_copy, model)

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The model's own loss; of one that has none by itself, a loss of all that it puts out."""
        output = self.validate(model, batch)
        if not self._batches.has_own_loss:
            squares = [each.float().square().mean() for each in output.values() if isinstance(each, Tensor)]
            return torch.stack(squares).sum()
        loss: Tensor | None = getattr(output, "loss", None)
        if loss is None:
            raise self._batches.refused("it computes no loss of this batch")
        return loss

    def validate(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """The forward pass alone."""
        try:
            return model(**batch)
        except _UNSUITED as error:
            text = str(error).strip().split("\n")[0][:200]
            raise self._batches.refused(f"the batch made up for it does not suit it ({text})") from error

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        if purpose == "tune":
            raise self.refused("a model alone has no data to tune on; name a function that returns a Trainer")

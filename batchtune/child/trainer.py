"""One optimizer step as the user trains it, and batches on their way to it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from batchtune.child import heartbeat
from batchtune.child.ranks._base import ALONE, Ranks, Shard, StreamShard, own_batches, tell_epoch
from batchtune.child.stepping import LOSS_SCALE, Precision, StepContext, clip
from batchtune.device.host import waited_seconds
from batchtune.document import GradientClipping, Value
from batchtune.errors import UserCodeError
from batchtune.sampling.sampler import LengthBatchSampler
from batchtune.task.adapting.plateau import OnPlateau
from batchtune.task.contract import Task
from batchtune.task.state import seed_everything
from batchtune.vocabulary import LengthBatches

_SEEDS_APART = 1_000_003  # of ranks


def move(value: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; whatever has no `.to` stays as it is."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(moved, field.name, move(getattr(value, field.name), device))
        return moved
    return value


def training_loader(
    task: Task, micro_batch_size: int, seed: int, ranks: Ranks = ALONE, **settings: Any
) -> DataLoader[object]:
    """Shuffled batches of one epoch of the training set; an incomplete one is left out if it would count as whole.

    Of a rank, those of its own shard.
    """
    data: Any = task.train_data
    iterable = isinstance(data, IterableDataset)
    size = task.train_size()
    sampler, generator = task.sampler(micro_batch_size), torch.Generator().manual_seed(seed)
    if ranks.world_size > 1:
        size = None if size is None else size // ranks.world_size
        if iterable and task.parts == 1:  # else the user's code shares it
            data = StreamShard(data, ranks)
        elif not (iterable or isinstance(sampler, DistributedSampler)):
            sampler = Shard(sampler or RandomSampler(data, generator=generator), seed, ranks)
    return DataLoader(
        data,
        batch_size=micro_batch_size,
        shuffle=None if iterable or sampler is not None else True,
        sampler=sampler,
        drop_last=size is None or size >= micro_batch_size,
        collate_fn=task.collate if task.has("collate") else None,
        generator=generator,
        **settings,
    )


def loader_by_length(task: Task, length_batches: LengthBatches, seed: int) -> DataLoader[object]:
    """Shuffled batches of samples of similar length, with at most so many samples at each.

    Raises:
        UserCodeError: a sample is longer than all of these.
    """
    try:
        sampler = LengthBatchSampler(task.sample_lengths, dict(length_batches), seed=seed, num_replicas=1, rank=0)
    except ValueError as error:
        raise UserCodeError(f"{task.where}: train_dataset, {error}") from None
    collate = task.collate if task.has("collate") else None
    return DataLoader(task.train_data, batch_sampler=sampler, collate_fn=collate)


def without_end(epochs: Iterable[Iterable[object]]) -> Generator[object, None, None]:
    """The batches of one epoch after the other, until one is empty, as of a data set that can be read once.

    It holds no batch, and no epoch beside the next: that would be memory that a loop does not take.
    """
    for batches in map(iter, epochs):
        first = list(itertools.islice(batches, 1))
        if not first:
            return
        yield first.pop()
        yield from batches
        del batches


class TrainingBatches(Iterator[object]):
    """Batches of the training set without end, of a rank those of its shard; `samples` counts those so far.

    They are shuffled, and incomplete ones left out, unless the task has a train_loader of its own. `starting_seconds`
    adds up what epochs took until their first batch, less what was waited for a processor.

    Args:
        task: the user's code.
        micro_batch_size: what a batch counts for: its samples, or its tokens in the mean.
        seed: of the shuffling.
        ranks: those that share them.
        samples: of a batch, where that counts its tokens.
        length_batches: samples of a batch by their length, where it is of samples of similar length.
    """

    def __init__(
        self,
        task: Task,
        micro_batch_size: int,
        seed: int,
        ranks: Ranks = ALONE,
        samples: int | None = None,
        length_batches: LengthBatches = (),
    ) -> None:
        self._task, self._size, self._seed, self._ranks = task, micro_batch_size, seed, ranks
        self.samples = self._epochs_ended = 0
        self.starting_seconds = 0.0
        self._start: float | None = None  # of an epoch whose first batch is not there yet
        self._ahead: list[object] = []
        self._loader: DataLoader[object] | None = None
        if length_batches:
            self._loader = loader_by_length(task, length_batches, seed)
        elif not task.has("train_loader"):
            self._loader = training_loader(task, samples or micro_batch_size, seed, ranks)
        self._batches = without_end(map(self._epoch, itertools.count()))

    def __next__(self) -> object:
        try:
            batch = self._ahead.pop() if self._ahead else self._load()
        except StopIteration:
            which = "train_dataset" if self._loader is not None else "train_loader"
            text = f"{self._task.where}: {which} yields no batch of {self._size:,} samples in an epoch"
            raise UserCodeError(text) from None
        self.samples += self._task.samples_in(batch, self._size)
        return batch

    def epochs_ended(self) -> int:
        """How many epochs are over; the next batch is loaded for that."""
        if not self._ahead:
            with contextlib.suppress(StopIteration):
                self._ahead.append(self._load())
        return self._epochs_ended

    def _load(self) -> object:
        batch = next(self._batches)
        if self._start is not None:
            self.starting_seconds += max(0.0, time.perf_counter() - waited_seconds() - self._start)
            self._start = None
        return batch

    def _epoch(self, number: int) -> Iterable[object]:
        self._epochs_ended, self._start = number, time.perf_counter() - waited_seconds()
        loader = self._task.loader(self._size) if self._loader is None else self._loader
        tell_epoch(loader, number)
        if self._loader is not None or self._task.parts > 1:
            return loader
        return own_batches(loader, self._seed + number, self._ranks)


class Trainer:
    """A model with its optimizer on one device, taking optimizer steps.

    Args:
        task: the user's code.
        device: where the model lives.
        precision: bf16, fp16, fp32 or tf32.
        learning_rate: handed to the user's `build_optimizer`, as are the `optimizer_arguments`.
        seed: weights and data order follow from it.
        total_steps: the horizon handed to the user's `build_scheduler`.
        ranks: those that train together, this process alone or with others.
        loss_scale: of fp16 to begin with; with 1.0 no step is skipped, whose memory and time are all that counts.
        samples_per_step: of the optimizer steps to come, for schedulers and adapters that may ask; None: not known.
        gradient_clipping: before the optimizers' steps; None: what the task does by itself.
        activation_checkpointing: whether it is asked of the user's `build_model`; None: as the task was opened.

    Attributes:
        on_plateau: the schedulers that are stepped at the end of an epoch.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        precision: str,
        *,
        learning_rate: float = 1e-3,
        seed: int = 0,
        total_steps: int | None = None,
        optimizer_arguments: Mapping[str, Value] | None = None,
        ranks: Ranks = ALONE,
        loss_scale: float = LOSS_SCALE,
        samples_per_step: int | None = None,
        gradient_clipping: GradientClipping | None = None,
        activation_checkpointing: bool | None = None,
    ) -> None:
        seed_everything(seed)
        self.task, self.device = task, device
        self.ranks = ranks
        self.precision = Precision(precision, device, loss_scale)
        if adapted := task.adapted:
            adapted.samples_per_step, adapted.total_steps = samples_per_step, total_steps
        build = functools.partial(task.model, activation_checkpointing)
        self.model = ranks.place(build, device)
        if not (adapted and adapted.keeps_modes):
            self.model.train()
        self._loss_of = self.ranks.loss_of(self.model, task.loss)
        self._micro_batches = 0
        self.optimizers = task.optimizers(self.model, learning_rate, **optimizer_arguments or {})
        self.schedulers = task.schedulers(self.optimizers, total_steps, samples_per_step) if total_steps else []
        self.on_plateau = [each for each in self.schedulers if isinstance(each, OnPlateau)]
        self._due_schedulers = itertools.repeat(self.schedulers, total_steps or 0)  # some raise when stepped on
        clipping = gradient_clipping or task.gradient_clipping
        self._clip_for = functools.partial(clip, self.model, clipping, adapted, self.precision.scaler)
        own_step = task.has("train_step")
        self._context = StepContext(device, self.precision, self.optimizers, self._clip_for) if own_step else None
        self._batch: object = None
        self._last_loss: Tensor  # once there is one
        self._has_old_gradients = False
        if self.ranks.rank:  # weights are the same on all ranks; what training draws, such as dropout, is not
            seed_everything(seed + _SEEDS_APART * self.ranks.rank)

    def forward_backward(self, batch: object, accumulation_steps: int = 1, *, synchronize: bool = True) -> Tensor:
        """Adds one micro-batch's gradients, each weighted by 1 / accumulation steps; returns the detached loss.

        With `synchronize` the last micro-batch of a step leaves the mean of all ranks' gradients. As with the variables
        of a loop, the last `batch` and `loss` live until the next are there: their memory is a part of what training
        takes. Who keeps what is returned holds it longer than a loop does; see `loss`.
        """
        self._batch = move(batch, self.device)
        if not self.task.frees_between:
            self._free_old_gradients()
        number = self._micro_batches % accumulation_steps
        self._micro_batches += 1
        if self._context is not None:
            self._context.begin(number, accumulation_steps)
            self._last_loss = self.task.train_step(self.model, self._batch, self.optimizers, self._context)
            self._context.require_stepped()
        else:
            with self.precision.autocast():
                loss = self._loss_of(self._batch, synchronize=synchronize and number + 1 == accumulation_steps)
            if not loss.requires_grad:
                raise UserCodeError(
                    "compute_loss returned a tensor without a graph; no parameter of the model leads to it "
                    "(is it under torch.no_grad, detached, or made by .item()?)"
                )
            self._last_loss = loss
            self._free_old_gradients()
            self.precision.scaler.scale(loss / accumulation_steps).backward()
        heartbeat.beat()
        return self.loss

    def loss_alone(self, batch: object) -> None:
        """One micro-batch's loss and no gradients, with no other rank but for what the model's modules do."""
        with self.precision.autocast():
            self.task.loss(self.model, move(batch, self.device))
        heartbeat.beat()

    @property
    def loss(self) -> Tensor:
        """The last micro-batch's, detached; there must have been one."""
        return self._last_loss.detach()

    @property
    def losses(self) -> dict[object, float]:
        """The last micro-batch's, by the optimizer that was trained on it where a task's own train_step has several."""
        apart = self._context.losses if self._context is not None and len(self.optimizers) > 1 else {}
        return apart or {None: float(self.loss)}

    def update(self, *, free_late: bool = False) -> None:
        """The optimizers' and schedulers' steps; gradients are freed afterwards.

        With `free_late` once the next batch is there, as in loops that call `zero_grad` before the forward pass, which
        cuts the memory up in another way; so always where the task's own code or library does.
        """
        if self._context is None:
            self._clip_for(self.optimizers)
            for optimizer in self.optimizers:
                self.precision.scaler.step(optimizer)
        self.precision.scaler.update()
        self._has_old_gradients = free_late or self.task.always_frees_late
        if not self._has_old_gradients:
            self.optimizers.zero_grad()
        for scheduler in next(self._due_schedulers, []):
            scheduler.step()

    def step_the_others(self) -> None:
        """Steps the optimizers that a task's own train_step has left out so far, as it will when their turn comes."""
        for optimizer in self.optimizers:
            if self._context is not None and not optimizer.state:
                self._context.step_without_loss(optimizer)

    def _free_old_gradients(self) -> None:
        if self._has_old_gradients:
            self.optimizers.zero_grad()
            self._has_old_gradients = False

    def step(self, batches: Iterator[object], accumulation_steps: int = 1, *, free_late: bool = False) -> Tensor:
        """One optimizer step over `accumulation_steps` micro-batches; returns the last one's loss."""
        for batch in itertools.islice(batches, accumulation_steps):
            self.forward_backward(batch, accumulation_steps)
        self.update(free_late=free_late)
        return self.loss


def require_finite(loss: Tensor, micro_batch_size: int) -> None:
    """Raises UserCodeError for a first loss of NaN or infinity, before any weight has changed."""
    if not bool(torch.isfinite(loss).all()):
        raise UserCodeError(
            f"compute_loss returned {float(loss):g} in the very first step, at batch size {micro_batch_size:,}, before "
            "any weight had changed; check the model's initialisation and the data for NaN, zero variance or log(0)"
        )

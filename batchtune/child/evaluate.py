"""Forward passes alone: inference, and the evaluation during a run."""

from __future__ import annotations

import difflib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from batchtune.child import heartbeat
from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.stepping import Precision
from batchtune.child.trainer import Trainer, move
from batchtune.device._base import DeviceMemory
from batchtune.device.failures import classify, describe_user_error, free_frames, leaves_device_usable
from batchtune.errors import HalfPrecisionError, UsageError, UserCodeError, fp32_instead
from batchtune.task.contract import Task
from batchtune.task.state import kept_random_numbers, seed_everything

Found = TypeVar("Found")


class Inference:
    """A model in eval mode on one device, taking forward passes without gradients."""

    def __init__(self, task: Task, device: torch.device, precision: str) -> None:
        seed_everything(0)
        self._task, self._device, self.precision = task, device, Precision(precision, device)
        self.model: nn.Module = task.model().to(device).eval()
        self._batch: object = None
        self._output: object = None

    def forward(self, batch: object) -> None:
        """One forward pass; as in a loop, the last batch and output live until the next are there."""
        self._batch = move(batch, self._device)
        with torch.inference_mode(), self.precision.autocast():
            self._output = self._task.validate(self.model, self._batch)
        heartbeat.beat()


_ALIKE = 1.1  # sums that differ by no more than noise in a loss
_ASKS_FOR_GRADIENTS = "does not require grad"  # torch's words where something is differentiated that has no graph
ENDLESS_SECONDS = 300.0  # of one evaluation on a data set that does not tell its size: it has no end, or is of no use


def undifferentiated(trainer: Trainer, evaluation: Callable[[], Found]) -> Found:
    """What an evaluation returns under `torch.no_grad`; with gradients where it takes some of its own.

    So do losses of differential equations, and of forces that follow from an energy. Those of the weights are as before
    it afterwards: training does not add to what an evaluation has left.
    """
    if not trainer.task.differentiates:
        try:
            with torch.no_grad():
                return evaluation()
        except RuntimeError as error:
            if _ASKS_FOR_GRADIENTS not in str(error):
                raise
            free_frames(error)
        trainer.task.differentiates = True
    kept = [(each, each.grad) for each in trainer.model.parameters()]
    for each, _ in kept:
        each.grad = None
    try:
        with torch.enable_grad():
            return evaluation()
    finally:
        for each, gradient in kept:
            each.grad = gradient


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in the mode in which it was, whatever the user's code has made of that meanwhile."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train()  # a train() of the user's own may undo more than modes; frozen modules stay in eval
        for module, training in modes.items():
            module.training = training


def metric_value(trainer: Trainer, metric: str, batch_size: int, *, max_batches: int | None = None) -> float:
    """The value of one metric for the model as it stands; training state and random numbers are left as they were.

    The default evaluation, of `val_loss`, is in batches of `batch_size`, `max_batches` of them at most. Of ranks, each
    takes its part of the validation set; with an `evaluate` of the user's, or with `max_batches`, all of them do the
    same. The value is the same on all ranks.

    Raises:
        UsageError: the task does not return this metric.
    """
    task, model, rank = trainer.task, trainer.model, trainer.ranks.rank
    with kept_random_numbers(trainer.device), torch.no_grad(), in_eval_mode(model):
        trainer.ranks.align(model)
        if task.has("evaluate"):
            with trainer.precision.autocast():
                found = undifferentiated(trainer, lambda: task.evaluate(model, rank=rank))
            has_it = isinstance(found, float) or metric in found
            is_known = bool(trainer.ranks.together("first", float(has_it)))  # to all; it may be the first one's alone
            return trainer.ranks.together("first", _pick(found, metric, task) if has_it or not is_known else math.nan)
        if metric != "val_loss":
            raise _only_val_loss(metric, task)
        return _mean_loss(trainer, batch_size, max_batches)


def fitting_metric_value(
    trainer: Trainer, memory: DeviceMemory, metric: str, batch_size: int, *, max_batches: int | None = None
) -> tuple[float, int]:
    """The same, in the default evaluation with half as many samples at a time, and so on, where more do not fit.

    Ranks settle that in a look at a few batches, and not in a run: one that fails leaves the others waiting.

    Returns the value, and the batch size that did fit.
    """
    is_run_of_ranks = trainer.ranks.world_size > 1 and max_batches is None
    while True:
        can_be_less = batch_size > 1 and not trainer.task.has("evaluate") and not is_run_of_ranks
        memory.reset_peaks()
        value, fits = math.nan, False
        try:
            value = metric_value(trainer, metric, batch_size, max_batches=max_batches)
            fits = not (can_be_less and memory.peaks().is_beyond)
        except Exception as error:
            if not can_be_less or classify(error) != "oom" or not leaves_device_usable(error):
                raise
            free_frames(error)
        if not can_be_less or trainer.ranks.agree(fits):
            return value, batch_size
        memory.release()
        batch_size //= 2


def look_at_evaluation(
    trainer: Trainer, memory: DeviceMemory, size: int, most: int | None, batches: int
) -> tuple[int | None, bool]:
    """Evaluates `val_loss` on so many batches, of `most` samples at most where fewer may be tried.

    Returns the batch size where it had to be smaller than asked for, and whether the loss adds up its batch.
    """
    if most is None:
        metric_value(trainer, "val_loss", size, max_batches=batches)
        return None, adds_up(trainer, size)
    asked = min(size, most)
    _, fitted = fitting_metric_value(trainer, memory, "val_loss", asked, max_batches=batches)
    return fitted if fitted < asked else None, adds_up(trainer, fitted)


def require_metric(
    task: Task, device: torch.device, metric: str, precision: str, ranks: Ranks = ALONE, *, or_fp32: bool = False
) -> str:
    """Raises UsageError where there is no such metric, by an evaluation of a new model where the task has its own.

    Returns why that was in fp32, where it may be and the half precision is refused; else nothing.
    """
    if not task.has("evaluate"):
        if metric != "val_loss":
            raise _only_val_loss(metric, task)
        return ""
    try:
        metric_value(Trainer(task, device, precision, ranks=ranks), metric, 1)
    except Exception as error:
        refused = describe_user_error(error, "in an evaluation")
        if not or_fp32 or not isinstance(refused, HalfPrecisionError):
            raise
        free_frames(error)
    else:
        return ""
    metric_value(Trainer(task, device, "fp32", ranks=ranks), metric, 1)
    return fp32_instead(precision, str(refused))


def adds_up(trainer: Trainer, batch_size: int) -> bool:
    """Whether the losses of eight samples, of their halves and of their quarters have one sum; means do not.

    False where that is not seen: of fewer than four samples, of infinite losses or of both signs, on several ranks, and
    of a stream, whose samples may come but once.
    """
    data: Any = trainer.task.val_data
    whole = 8 if batch_size >= 8 else 4  # noqa: PLR2004
    if batch_size < whole or trainer.ranks.world_size > 1 or isinstance(data, IterableDataset) or len(data) < whole:
        return False
    try:
        sums = [_sum_of_losses(trainer, whole // parts, parts) for parts in (1, 2, 4)]
    except Exception as error:
        if not leaves_device_usable(error):
            raise
        free_frames(error)  # it takes no batches so small
        return False
    sizes = [abs(each) for each in sums]
    one_sign = abs(sum(sums)) == sum(sizes)
    return one_sign and 0 < max(sizes) < _ALIKE * min(sizes) < math.inf


def _sum_of_losses(trainer: Trainer, batch_size: int, count: int) -> float:
    with (
        kept_random_numbers(trainer.device),
        torch.no_grad(),
        in_eval_mode(trainer.model),
        trainer.precision.autocast(),
    ):
        batches = itertools.islice(_batches(trainer.task, batch_size, ALONE), count)
        return sum(float(_loss(trainer, move(batch, trainer.device))) for _, batch in batches)


def _loss(trainer: Trainer, batch: object) -> Tensor:
    """Of a batch on the device, without its graph."""
    return undifferentiated(trainer, lambda: trainer.task.loss(trainer.model, batch).detach())


def _only_val_loss(metric: str, task: Task) -> UsageError:
    return UsageError(f"objective.metric '{metric}': {task.where} has no evaluate(), so the only metric is 'val_loss'")


def _pick(found: dict[str, float] | float, metric: str, task: Task) -> float:
    if isinstance(found, float):
        return found
    if metric not in found:
        names = ", ".join(found) or "nothing"
        what = f"{task.where} logs" if task.adapted else f"evaluate() in {task.where} returns"
        meant = [each for each in found if each.endswith(metric)] or difflib.get_close_matches(metric, found)
        choose = f"; choose one: objective.metric={next(iter([*meant, *found]))}" if found else ""
        raise UsageError(f"objective.metric '{metric}' is not among what {what}: {names}{choose}")
    return found[metric]


def _mean_loss(trainer: Trainer, batch_size: int, max_batches: int | None) -> float:
    task = trainer.task
    began, has_end = time.monotonic(), hasattr(task.val_data, "__len__")
    total, samples = torch.zeros((), device=trainer.device), 0
    shares = trainer.ranks if max_batches is None else ALONE
    for size, batch in itertools.islice(_batches(task, batch_size, shares), max_batches):
        on_device = move(batch, trainer.device)  # the last one and its loss are there until the next are
        with trainer.precision.autocast():
            loss = _loss(trainer, on_device)
        total += loss.float() * size
        samples += size
        heartbeat.beat()
        if not has_end and time.monotonic() - began > ENDLESS_SECONDS:
            raise UserCodeError(
                f"{task.where}: val_dataset has given {samples:,} samples in {ENDLESS_SECONDS:g} s and goes on; "
                "give it an end, or write evaluate()"
            )
    of_all = shares.together("sum", samples)
    if not of_all:
        raise UserCodeError(f"{task.where}: val_dataset yields no samples")
    return shares.together("sum", float(total)) / of_all


def _in_step(counted: Iterable[tuple[int, object]], ranks: Ranks) -> Iterator[tuple[int, object]]:
    """As many batches on each rank: one that has none left takes its last again, which then does not count."""
    taken: tuple[int, object] | None = None
    for found in itertools.chain(counted, itertools.repeat(None)):
        if not ranks.together("max", float(found is not None)):
            return
        taken = found or (taken and (0, taken[1]))
        if taken is not None:
            yield taken


def _batches(task: Task, batch_size: int, ranks: Ranks) -> Iterator[tuple[int, object]]:
    """The batches of the validation set, each with the number of its samples that count.

    Ranks take them in turn, of a stream all of them all. At each turn theirs are of one size, as a loss may ask that
    gathers from all: they split what is left in the end, and what cannot be split all take and the first one counts.
    """
    data: Any = task.val_data
    collate: Callable[[list[object]], object] = task.collate if task.has("collate") else default_collate
    if isinstance(data, IterableDataset):  # only whoever puts a batch together knows how large it is
        counted = DataLoader(data, batch_size=batch_size, collate_fn=lambda found: (len(found), collate(found)))
        yield from counted if ranks.world_size == 1 else _in_step(counted, ranks)
        return
    rank, world_size = ranks.rank, ranks.world_size
    whole, left = divmod(len(data), batch_size * world_size)
    each, odd = divmod(left, world_size)
    turns = [(turn * batch_size * world_size, batch_size) for turn in range(whole)]
    turns += [(len(data) - left, each)] * bool(each)
    places = [range(start + rank * size, start + (rank + 1) * size) for start, size in turns]
    counts = [len(place) for place in places] + [0 if rank else odd] * bool(odd)
    places += [range(len(data) - odd, len(data))] * bool(odd)
    loader = DataLoader(data, batch_sampler=map(list, places), collate_fn=collate)
    yield from zip(counts, loader, strict=True)

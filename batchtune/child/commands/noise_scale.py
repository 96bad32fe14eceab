"""The gradient noise scale: the batch size from which on a larger one hardly steadies the gradient."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from batchtune.child.training.batches import TrainingBatches
from batchtune.child.training.trainer import Trainer
from batchtune.device._base import DeviceMemory
from batchtune.document import NoiseScale
from batchtune.protocol.commands import MeasureNoiseScale
from batchtune.task.contract import Task

SMALL_PER_LARGE = 4  # draws: small batches are cheap, and their norms scatter more
_RESAMPLES = 1000
_CONFIDENCE = 0.9
_FEWEST_DRAWS = 4


def noise_scale(
    task: Task, memory: DeviceMemory, command: MeasureNoiseScale, clock: Callable[[], float] = time.perf_counter
) -> NoiseScale:
    """Measures squared gradient norms at two batch sizes, on a model that has trained for a few steps.

    Freshly initialised weights have a much smaller noise scale than trained ones, hence the steps before, which are
    those of the smaller size. There are four small batches to each large one.
    """
    small, large = command.small, command.large
    memory.release()
    started = clock()
    trainer = Trainer(
        task, memory.device, command.precision, learning_rate=command.learning_rate, samples_per_step=small
    )
    few, many = TrainingBatches(task, small, 1), TrainingBatches(task, large, 2)
    for _ in range(command.warm_up_steps):
        trainer.step(few)
        if clock() - started > command.seconds / 2:
            break
    pairs: list[tuple[float, float]] = []
    while len(pairs) < command.draws and clock() - started < command.seconds:
        norms = [_squared_norm(trainer, next(few)) for _ in range(SMALL_PER_LARGE)]
        pairs.append((statistics.fmean(norms), _squared_norm(trainer, next(many))))
    samples, low, high = estimate(pairs, small, large)
    return NoiseScale(
        samples=samples,
        low=low,
        high=high,
        batch_sizes=[small, large],
        draws=len(pairs),
        seconds=clock() - started,
    )


def estimate(
    pairs: Sequence[tuple[float, float]], small: int, large: int
) -> tuple[float | None, float | None, float | None]:
    """The noise scale in samples with its bootstrap interval, from squared gradient norms at two batch sizes.

    B_noise = tr(S) / |G|^2 with the unbiased tr(S) = (s - l) / (1/small - 1/large) and
    |G|^2 = (large * l - small * s) / (large - small), s and l being means over the draws (McCandlish et al. 2018,
    appendix A.1).

    Args:
        pairs: (squared norm of small batches, of a large batch), one for each draw.
        small: samples of a small batch.
        large: samples of a large batch.

    Returns:
        The estimate, None where either part is not positive; then its bounds, None where they are open.
    """
    if len(pairs) < _FEWEST_DRAWS:
        return None, None, None
    found = _ratio(pairs, small, large)
    if found is None:
        return None, None, None
    dice = random.Random(0)
    scales = [_ratio(dice.choices(pairs, k=len(pairs)), small, large) for _ in range(_RESAMPLES)]
    ordered = sorted(scale if scale is not None else float("inf") for scale in scales)
    cut = int((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    low, high = ordered[cut], ordered[-1 - cut]
    return found, min(found, low), None if high == float("inf") else max(found, high)


def _ratio(pairs: Sequence[tuple[float, float]], small: int, large: int) -> float | None:
    of_small, of_large = (statistics.fmean(norms) for norms in zip(*pairs, strict=True))
    noise = (of_small - of_large) / (1 / small - 1 / large)
    signal = (large * of_large - small * of_small) / (large - small)
    return noise / signal if noise > 0 and signal > 0 else None


def _squared_norm(trainer: Trainer, batch: object) -> float:
    """Of the gradient over one batch; the weights stay as they are."""
    trainer.optimizers.zero_grad()
    trainer.forward_backward(batch)
    scale = float(trainer.precision.scaler.get_scale())
    norms = [parameter.grad.float().norm() for parameter in trainer.model.parameters() if parameter.grad is not None]
    trainer.optimizers.zero_grad()
    return float(torch.stack(norms).square().sum()) / scale**2

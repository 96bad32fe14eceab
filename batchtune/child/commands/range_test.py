"""The range test: at which learning rate, rising from step to step, training diverges (Smith 2017).

It finds the edge of stability and, below it, where the loss was least. Neither is the best rate, but both bound it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from batchtune.child.training.batches import TrainingBatches
from batchtune.child.training.trainer import Trainer
from batchtune.device._base import DeviceMemory
from batchtune.document import RangeTest
from batchtune.protocol.commands import RunRangeTest
from batchtune.task.contract import Task

_DIVERGED = 2.0  # times the least smoothed loss: so high, and above the start, training has diverged
_FIRST = 5  # losses that say where training starts; the rate is still harmless there
_CLEAR = 4.0  # standard deviations of them: a smoothed loss that is as far below has been learned
_SMOOTHING = 0.7  # weight of the past: about three steps, a fifth of a decade of the rate


class Edge:
    """Watches a loss while the learning rate rises.

    Attributes:
        lowest_at: the rate at which the smoothed loss was least so far; None in the first steps.
    """

    def __init__(self) -> None:
        self._weighted = self._weight = 0.0
        self._first: list[float] = []
        self._least = math.inf
        self.lowest_at: float | None = None

    def is_past(self, loss: float, rate: float) -> bool:
        """Takes in the next step's loss; returns whether training has diverged."""
        if not math.isfinite(loss):
            return True
        self._weighted = _SMOOTHING * self._weighted + (1 - _SMOOTHING) * loss
        self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        smoothed = self._weighted / self._weight
        if len(self._first) < _FIRST:
            self._first.append(loss)
            return False
        if smoothed < self._least:
            self._least, self.lowest_at = smoothed, rate
        return smoothed > self._bound()

    def _bound(self) -> float:
        """What the smoothed loss may come to. Near and below zero factors mean nothing, the noise of the start does."""
        start = sum(self._first) / _FIRST
        noise = _CLEAR * statistics.pstdev(self._first)
        if self._least > noise:
            return max(_DIVERGED * self._least, start)
        return start if start - self._least > noise else start + noise


def range_test(
    task: Task, memory: DeviceMemory, command: RunRangeTest, clock: Callable[[], float] = time.perf_counter
) -> RangeTest:
    """Trains a new model for some steps while the learning rate rises by the same factor each time.

    The rates of all groups of parameters rise together.
    """
    batch_size, steps, rate = command.batch_size, command.steps, command.lowest_rate
    memory.release()
    started = clock()
    trainer = Trainer(task, memory.device, command.precision, learning_rate=rate, samples_per_step=batch_size)
    batches, edge = TrainingBatches(task, batch_size, 0), Edge()
    ratio = (command.highest_rate / rate) ** (1 / max(1, steps - 1))
    found, taken = None, 0
    while taken < steps:
        taken += 1
        if edge.is_past(float(trainer.step(batches)), rate):
            found = rate
            break
        if clock() - started > command.seconds:
            break
        rate *= ratio
        for group in trainer.optimizers.param_groups:
            group["lr"] *= ratio
    return RangeTest(
        batch_size=batch_size,
        edge_learning_rate=found,
        lowest_loss_learning_rate=edge.lowest_at,
        highest_learning_rate=min(rate, command.highest_rate),
        steps=taken,
        seconds=clock() - started,
    )

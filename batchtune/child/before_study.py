"""What is measured before a study: the gradient noise scale, and the range test of the learning rate."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.trainer import Trainer, TrainingBatches
from batchtune.device._base import DeviceMemory
from batchtune.document import NoiseScale, RangeTest
from batchtune.protocol.commands import MeasureNoiseScale, RunRangeTest
from batchtune.task.contract import Task

SMALL_PER_LARGE = 4  # draws: small batches are cheap, and their norms scatter more
_RESAMPLES = 1000
_CONFIDENCE = 0.9
_FEWEST_DRAWS = 4


def noise_scale(
    task: Task,
    memory: DeviceMemory,
    command: MeasureNoiseScale,
    clock: Callable[[], float] = time.perf_counter,
    ranks: Ranks = ALONE,
) -> NoiseScale:
    """Measures squared gradient norms at two batch sizes, on a model that has trained for a few of the smaller one.

    Freshly initialised weights have a much smaller noise scale than trained ones. Of ranks that train together, one
    pass may tell both: its small batches are those of single ranks, the large one is all of theirs.
    """
    world_size, apart = ranks.world_size, command.ranks_apart
    memory.release()
    started = clock()
    trainer = Trainer(
        task,
        memory.device,
        command.precision,
        learning_rate=command.learning_rate,
        samples_per_step=command.small * world_size,
        ranks=ranks,
    )
    few, many = (
        TrainingBatches(task, size, seed, ranks) for seed, size in enumerate((command.small, command.large), 1)
    )
    for _ in range(command.warm_up_steps):
        trainer.step(few)
        if ranks.together("max", clock() - started) > command.seconds / 2:
            break
    pairs: list[tuple[float, float]] = []
    while len(pairs) < command.draws and ranks.together("max", clock() - started) < command.seconds:
        if apart:
            pairs.append(_squared_norms(trainer, next(many), apart=True))
            continue
        norms = [_squared_norms(trainer, next(few))[0] for _ in range(SMALL_PER_LARGE)]
        pairs.append((statistics.fmean(norms), _squared_norms(trainer, next(many))[0]))
    small, large = command.large if apart else command.small * world_size, command.large * world_size
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
    appendix A.1). `pairs` has (squared norm of small batches, of a large batch) for each draw. The estimate is None
    where either part is not positive, a bound where it is open.
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


def _squared_norms(trainer: Trainer, batch: object, *, apart: bool = False) -> tuple[float, float]:
    """Of the gradient over one batch, twice; or the mean of those of ranks `apart`, and that of their mean gradient.

    The weights stay as they are.
    """
    trainer.optimizers.zero_grad()
    trainer.forward_backward(batch, synchronize=not apart)
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    ranks, scale = trainer.ranks, float(trainer.precision.scaler.get_scale())
    own, together = ranks.squared_norms_apart(gradients) if apart else (ranks.squared_norm(gradients),) * 2
    trainer.optimizers.zero_grad()
    return own / scale**2, together / scale**2


_DIVERGED = 2.0  # times the least smoothed loss: so high, and above the start, training has diverged
_FIRST = 5  # losses that say where training starts; the rate is still harmless there
_CLEAR = 4.0  # standard deviations of them: a smoothed loss that is as far below has been learned
_SMOOTHING = 0.7  # weight of the past: about three steps, a fifth of a decade of the rate


class Edge:
    """Watches a loss while the learning rate rises; at `lowest_at` the smoothed loss was least so far."""

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

    @property
    def has_learned(self) -> bool:
        """Whether the loss came clearly below its start; where it did not, noise says at which rate it was least."""
        return self.lowest_at is not None and self._start - self._least > self._noise

    @property
    def _start(self) -> float:
        return sum(self._first) / _FIRST

    @property
    def _noise(self) -> float:
        return _CLEAR * statistics.pstdev(self._first)

    def _bound(self) -> float:
        """What the smoothed loss may come to. Near and below zero factors mean nothing, the noise of the start does."""
        if self._least > self._noise:
            return max(_DIVERGED * self._least, self._start)
        return self._start if self.has_learned else self._start + self._noise


class Edges:
    """Watches all losses that optimizers are trained on: those of a GAN's two networks, of an actor and its critic.

    None of them hides another: training has diverged with the first, and of those that fell the first to be least tells
    the rate.
    """

    def __init__(self) -> None:
        self._each: defaultdict[object, Edge] = defaultdict(Edge)

    def __len__(self) -> int:
        return len(self._each)

    def is_past(self, losses: Mapping[object, float], rate: float) -> bool:
        """Takes in the next step's losses, each by what it trains; returns whether training has diverged."""
        past = [self._each[trained].is_past(loss, rate) for trained, loss in losses.items()]
        return any(past)

    @property
    def lowest_at(self) -> float | None:
        """Where the first of them was least; one beside others has to have learned, since it may just follow theirs."""
        telling = [each for each in self._each.values() if each.has_learned or len(self) == 1]
        return min((each.lowest_at for each in telling if each.lowest_at is not None), default=None)


def range_test(
    task: Task,
    memory: DeviceMemory,
    command: RunRangeTest,
    clock: Callable[[], float] = time.perf_counter,
    ranks: Ranks = ALONE,
) -> RangeTest:
    """Trains a new model for some steps while the learning rate rises by the same factor each time.

    The rates of all groups of parameters rise together; of several ranks' losses the mean counts, and
    of several that a step has, each for itself.
    """
    batch_size, steps, rate = command.batch_size * ranks.world_size, command.steps, command.lowest_rate
    memory.release()
    started = clock()
    trainer = Trainer(
        task,
        memory.device,
        command.precision,
        learning_rate=rate,
        samples_per_step=batch_size,
        ranks=ranks,
    )
    batches, edges = TrainingBatches(task, command.batch_size, 0, ranks), Edges()
    ratio = (command.highest_rate / rate) ** (1 / max(1, steps - 1))
    found, taken = None, 0
    while taken < steps:
        taken += 1
        trainer.step(batches)
        losses = {each: ranks.together("sum", loss) / ranks.world_size for each, loss in trainer.losses.items()}
        if edges.is_past(losses, rate):
            found = rate
            break
        if ranks.together("max", clock() - started) > command.seconds:
            break
        rate *= ratio
        for group in trainer.optimizers.param_groups:
            group["lr"] *= ratio
    return RangeTest(
        batch_size=batch_size,
        edge_learning_rate=found,
        lowest_loss_learning_rate=edges.lowest_at,
        highest_learning_rate=min(rate, command.highest_rate),
        losses=len(edges),
        steps=taken,
        seconds=clock() - started,
    )

"""How fast a batch size trains, how fast batches come, the clock of a run, and the FLOPs of a step."""

from __future__ import annotations

import gc
import itertools
import math
import platform
import statistics
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext

import torch
from torch.utils import flop_counter

from batchtune.child.evaluate import Inference
from batchtune.child.heartbeat import CompileWatch, forget_compiled, warm_up
from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.trainer import Trainer, move, training_loader, without_end
from batchtune.device._base import SETTLING_STEPS, DeviceMemory
from batchtune.device.host import BUSY, waited_seconds, watching_others
from batchtune.device.nvml import Sensors
from batchtune.document import LoaderPoint, ThroughputPoint
from batchtune.protocol.commands import CountFlops, Flops, TimeLoader, TimeSteps
from batchtune.task.contract import Task

SLOWED = 1.5  # a stretch this much slower than the usual pace was held up by something else on the machine
HELD_UP = 0.05  # of a stretch spent waiting for a processor: whatever is slower in it is put down to that
_REMEMBERED = 200  # stretches
_FORWARD: Callable[..., int] = flop_counter.sdpa_flop_count
_BACKWARD: Callable[..., int] = flop_counter.sdpa_backward_flop_count
_ON_CPU = {  # attention there, which torch's table lacks
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: _FORWARD(*shapes[:3]),  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: _BACKWARD(*shapes[:4]),  # noqa: SLF001
}
_PRECISION = 0.01  # standard error of a median step, as a share of it, that is small enough
_LOOK_SECONDS, _LEAST_STEPS = 0.25, 16  # between two looks whether it is: a slow spell of the machine lasts as long


class StepClock:
    """Adds up training seconds; stretches that something else slowed down count at the usual pace.

    That is the lower quartile of the latest stretches, or `most_step_seconds`, which other runs had, where it is less.
    """

    def __init__(self, most_step_seconds: float | None = None) -> None:
        self.seconds = 0.0
        self.measured_seconds = 0.0
        self.starting_seconds = 0.0
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)
        self._most = most_step_seconds or float("inf")

    @property
    def step_seconds(self) -> float:
        """The usual pace: seconds of an optimizer step."""
        paces = sorted(self._paces)
        return min(paces[len(paces) // 4] if paces else float("inf"), self._most)

    def see(self, steps: int, seconds: float, waited_seconds: float = 0.0) -> float:
        """Learns from a stretch that is not counted, such as warm-up; returns what of it was one's own."""
        own = seconds
        if waited_seconds > HELD_UP * seconds:
            own -= min(waited_seconds, 0.95 * seconds)  # the kernel's figures come late at times
        self._paces.append(own / steps)
        return own

    def add(self, steps: int, seconds: float, waited_seconds: float = 0.0, starting_seconds: float = 0.0) -> None:
        """Counts a stretch of so many optimizer steps; in `waited_seconds` of it others had the processor.

        What the start of an epoch took, `starting_seconds`, comes on top of the usual pace: it is the loader's own.
        """
        own = self.see(steps, seconds, waited_seconds)
        self.measured_seconds += seconds
        self.starting_seconds += min(own, starting_seconds)
        slowest = SLOWED if own == seconds else 1.0
        self.seconds += min(own, steps * slowest * self.step_seconds + starting_seconds)


class StepTimes:
    """Seconds of steps, those that compiled something, or waited for a processor, apart.

    Args:
        watch: sees what compiles; graphs of the first `settling` steps do not count.
    """

    def __init__(self, watch: CompileWatch | None = None, settling: int = SETTLING_STEPS) -> None:
        self.seconds: list[float] = []
        self._clean: list[float] = []
        self._watch, self._settling, self._late_graphs = watch or CompileWatch(), settling, 0

    def add(self, seconds: float, *, held_up: bool = False) -> None:
        """Takes in the step that has just ended."""
        graphs = self._watch.new_graphs()
        if len(self.seconds) >= self._settling:
            self._late_graphs += graphs
        if not graphs and not held_up:
            self._clean.append(seconds)
        self.seconds.append(seconds)

    def median(self) -> float | None:
        """Median step, without compiling, and without the first step where there is another."""
        times = self._clean[1:] if len(self._clean) == len(self.seconds) > 1 else self._clean
        return statistics.median(times) if times else None

    def recompiles(self) -> int | None:
        """Graphs compiled after the first steps; None without torch.compile."""
        return self._late_graphs if self._watch.used else None

    def typical(self, others: float | None) -> float:
        """The median step; where other programs were busy the tenth from below of a hundred: they only ever add."""
        taken = sorted(self._clean or self.seconds)
        return statistics.median(taken) if (others or 0.0) < BUSY else taken[len(taken) // 10]

    @property
    def is_known(self) -> bool:
        """Whether the median's standard error, 0.93 of the quartiles' distance over the root of n, is small enough."""
        if len(self._clean) < _LEAST_STEPS:
            return False
        low, middle, high = statistics.quantiles(self._clean, n=4)
        return 0.93 * (high - low) <= _PRECISION * middle * math.sqrt(len(self._clean))


def time_steps(task: Task, memory: DeviceMemory, command: TimeSteps, ranks: Ranks = ALONE) -> ThroughputPoint:
    """Times training steps at one size for about as long as asked, the device's sensors sampled meanwhile.

    Without sensors it ends as soon as the median step is known to 1 %. Compiling is no part of it: steps are taken
    until nothing is left to compile, and one that compiles nevertheless is left out, as is one that waited for a
    processor, where others did not. Ranks that train together all call this, and take the same number.
    """
    forget_compiled()
    memory.release()
    ranks = ranks if command.ranks == "together" else ALONE
    take, watch = _stepper(task, memory, command, ranks), CompileWatch()

    def step() -> float:
        seconds = memory.stopwatch()
        take()
        return seconds()

    warm_up(step, watch, ranks.agree)
    sensors = Sensors(memory.device)
    with sensors.sampling() as readings, watching_others(lambda own: ranks.together("sum", own)) as load:
        timed = _time(step, watch, command.seconds, ranks.agree, ends_early=not sensors.present)
    samples, seconds = command.batch_size * command.accumulation_steps, timed.typical(load.others)
    return ThroughputPoint(
        batch_size=command.batch_size,
        step_seconds=seconds,
        samples_per_second=samples / seconds,
        processors_used_by_others=load.others,
        recompiles=timed.recompiles(),
        joules_per_sample=None if readings.joules is None else readings.joules / (samples * len(timed.seconds)),
        **readings.summary(),
    )


def _stepper(task: Task, memory: DeviceMemory, command: TimeSteps, ranks: Ranks) -> Callable[[], object]:
    """Takes an optimizer step, or a forward pass."""
    if task.is_for_inference:
        inference, batch = Inference(task, memory.device, command.precision), task.worst_batch(command.batch_size)
        return lambda: inference.forward(batch)
    trainer = Trainer(task, memory.device, command.precision, ranks=ranks, loss_scale=1.0)
    batches = itertools.repeat(task.worst_batch(command.batch_size))
    return lambda: trainer.step(batches, command.accumulation_steps)


def _time(
    step: Callable[[], float],
    watch: CompileWatch,
    seconds: float,
    agree: Callable[[bool], bool],
    *,
    ends_early: bool,
) -> StepTimes:
    timed, began = StepTimes(watch, settling=0), time.perf_counter()
    look = _LOOK_SECONDS

    def goes_on() -> bool:
        nonlocal look
        passed = time.perf_counter() - began
        if passed < look or not ends_early:
            return passed < seconds
        look = passed + _LOOK_SECONDS
        return passed < seconds and not timed.is_known

    while agree(not timed.seconds or goes_on()):
        waited = waited_seconds()
        taken = step()
        timed.add(taken, held_up=waited_seconds() - waited > HELD_UP * taken)
    return timed


def time_loader(task: Task, memory: DeviceMemory, command: TimeLoader, ranks: Ranks = ALONE) -> LoaderPoint:
    """Brings batches from the training set to the device for about as long as asked.

    The clock starts once every worker has delivered a batch, so that neither their start nor what they had prepared
    counts; epochs follow one another, as in training. Workers are gone when this returns. What the loader or the user's
    data set raised is the point's message.
    """
    size, num_workers, pin_memory = command.batch_size, command.num_workers, command.pin_memory
    point = LoaderPoint(num_workers=num_workers, pin_memory=pin_memory)
    # forked workers on Linux, whatever Python's own choice: a task's module cannot be imported by name
    forks = num_workers and platform.system() == "Linux"
    settings = {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "persistent_workers": num_workers > 0,
        "multiprocessing_context": "fork" if forks else None,
    }
    try:
        with closing(without_end(itertools.repeat(training_loader(task, size, 0, ranks, **settings)))) as batches:
            rate = _rate(batches, memory, command)
    except Exception as error:  # noqa: BLE001 - whatever the user's data set raises, or a worker's death
        message = str(error).strip().split("\n")[-1][:300] or type(error).__name__
        return point.model_copy(update={"message": message})
    finally:
        gc.collect()  # the loader, which no name is to hold by now, ends its workers when it is collected
    return point.model_copy(update={"samples_per_second": rate})


def _rate(batches: Generator[object, None, None], memory: DeviceMemory, command: TimeLoader) -> float:
    def deliver(batch: object) -> float:
        move(batch, memory.device)
        memory.synchronize()
        return time.perf_counter()

    first = time.perf_counter()
    for batch in itertools.islice(batches, max(1, command.num_workers)):
        if deliver(batch) - first > command.seconds:  # slow: what has come since the first says enough
            break
    began, count = time.perf_counter(), 0
    for batch in batches:
        count += 1
        if deliver(batch) - began >= command.seconds:
            break
    if not count:
        raise ValueError("train_dataset yields too few samples to time")
    return count * command.batch_size / (time.perf_counter() - began)


def flops_per_sample(task: Task, memory: DeviceMemory, command: CountFlops) -> Flops:
    """Floating-point operations of one sample in forward and backward, of inference in forward alone."""
    memory.release()
    device, batch = memory.device, task.worst_batch(command.batch_size)
    if task.is_for_inference:
        inference = Inference(task, device, command.precision)
        precision, flops = inference.precision, count_flops(lambda: inference.forward(batch))
    else:
        trainer = Trainer(task, device, command.precision)
        precision, flops = trainer.precision, count_flops(lambda: trainer.forward_backward(batch))
    if flops is None:
        return Flops(per_sample=None)
    return Flops(per_sample=flops.total() / command.batch_size, computed_in=precision.computed_in(flops))


def count_flops(work: Callable[[], object]) -> Counter[str] | None:
    """Runs `work` once and counts, by operator, matrix products, convolutions and attention; None where torch cannot.

    A multiplication and an addition are two. Compiled models run uncompiled meanwhile: compiled kernels hide their
    operations.
    """
    compiled = "torch._dynamo" in sys.modules
    try:
        eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with (
            warnings.catch_warnings(),
            eager,
            flop_counter.FlopCounterMode(display=False, custom_mapping=_ON_CPU) as counter,
        ):
            warnings.simplefilter("ignore")  # compiled modules do not like to be watched
            work()
    except Exception:  # noqa: BLE001 - a model that takes no counting, or no memory for it: not measured
        return None
    counts = counter.get_flop_counts().get("Global", {})
    found = Counter({str(operator): count for operator, count in counts.items()})
    return found if found.total() else None

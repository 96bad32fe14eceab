"""How fast one batch size trains: timed steps, and what the device's sensors say meanwhile."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batchtune.child.training.compiled import CompileWatch, forget_compiled, warm_up
from batchtune.child.training.inference import Inference
from batchtune.child.training.parallel import Parallel
from batchtune.child.training.trainer import Trainer
from batchtune.device._base import DeviceMemory
from batchtune.device.host_load import watching_others
from batchtune.device.telemetry import Readings, Sensors
from batchtune.document import ThroughputPoint
from batchtune.protocol.commands import TimeSteps
from batchtune.task.contract import Task


@dataclass(slots=True)
class _Timed:
    """The steps of one stretch."""

    times: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)  # those that compiled nothing
    graphs: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.clean or self.times)


def time_steps(
    task: Task,
    memory: DeviceMemory,
    command: TimeSteps,
    parallel: Parallel | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ThroughputPoint:
    """Times training steps at one size for about as long as asked, the device's sensors sampled meanwhile.

    Compiling is no part of it: steps are taken until nothing is left to compile, and one that compiles nevertheless is
    left out. Ranks that train together (`parallel`) all call this, and take the same number of steps.
    """
    forget_compiled()
    memory.release()
    take = _passes(task, memory, command) if task.is_for_inference else _steps(task, memory, command, parallel)
    accumulation_steps, agree = command.accumulation_steps, parallel.agree if parallel else bool
    watch = CompileWatch()

    def step() -> float:
        started = clock()
        take()
        memory.synchronize()
        return clock() - started

    warm_up(step, watch, agree)
    with Sensors(memory.device).sampling() as readings, watching_others() as load:
        timed = _time(step, watch, command.seconds, clock, agree)
    point = _point(command.batch_size, command.batch_size * accumulation_steps, timed, readings)
    point["processors_used_by_others"] = load.others
    return ThroughputPoint.model_validate(point | {"recompiles": timed.graphs if watch.used else None})


def _steps(task: Task, memory: DeviceMemory, command: TimeSteps, parallel: Parallel | None) -> Callable[[], object]:
    """Takes an optimizer step."""
    trainer = Trainer(task, memory.device, command.precision, parallel=parallel, loss_scale=1.0)
    batch = task.worst_batch(command.batch_size)
    return lambda: trainer.step(itertools.repeat(batch), command.accumulation_steps)


def _passes(task: Task, memory: DeviceMemory, command: TimeSteps) -> Callable[[], object]:
    """Takes a forward pass."""
    inference, batch = Inference(task, memory.device, command.precision), task.worst_batch(command.batch_size)
    return lambda: inference.forward(batch)


def _time(
    step: Callable[[], float],
    watch: CompileWatch,
    seconds: float,
    clock: Callable[[], float],
    agree: Callable[[bool], bool],
) -> _Timed:
    timed, began = _Timed(), clock()
    while agree(not timed.times or clock() - began < seconds):
        timed.times.append(step())
        graphs = watch.new_graphs()
        timed.graphs += graphs
        timed.clean += [] if graphs else timed.times[-1:]
    return timed


def _point(batch_size: int, samples: int, timed: _Timed, readings: Readings) -> dict[str, Any]:
    """Speed and sensors; `samples` are those of one optimizer step."""
    point: dict[str, Any] = {
        "batch_size": batch_size,
        "step_seconds": timed.median,
        "samples_per_second": samples / timed.median,
    }
    if readings.joules is not None:
        point["joules_per_sample"] = readings.joules / (samples * len(timed.times))
    return point | readings.summary()

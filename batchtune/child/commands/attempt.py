"""One attempt: whether a micro-batch size trains on this device, and how much memory it takes."""

from __future__ import annotations

import itertools
import os
import re
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from batchtune.child.training import heartbeat
from batchtune.child.training.compiled import CompileWatch, forget_compiled
from batchtune.child.training.evaluate import fitting_metric_value, metric_value
from batchtune.child.training.inference import Inference
from batchtune.child.training.parallel import Parallel
from batchtune.child.training.trainer import NonFiniteLossError, Trainer, require_finite
from batchtune.device._base import DeviceMemory, Peaks
from batchtune.device.failures import classify, free_frames, leaves_device_usable, maps_file, message_of
from batchtune.document import Attempt
from batchtune.errors import UsageError
from batchtune.protocol.commands import STEPS_AFTER_EVALUATION, Tried, TryBatchSize
from batchtune.task.contract import Task
from batchtune.task.load import describe_user_error

_VERIFY_EVALUATION_BATCHES = 2
_SETTLING_STEPS = 2  # of an attempt, in which torch.compile may compile and the optimizer makes its states
_MOST_STRAINED = 3  # times its steps: so long an attempt goes on that had to make room
_LEFT_BYTES = 2**20  # on the device once an attempt is over: less may be a library's own
_LEAK_STEPS, _LEAK_BYTES = 4, 2**16  # so many rises in a row, each of so much and about the same, are a leak
_CPU_PREFIX = re.compile(
    r"^\[enforce fail at \S+\] .*?\. (?=DefaultCPUAllocator)"
)  # where in torch; nobody's concern here


class PeakTracker:
    """High-water marks of an attempt, those of forward and backward apart from the optimizer's.

    The optimizer's peak hardly depends on the batch, so a search that extrapolates must not mix the two.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.highest = Peaks(None, None)
        self.forward_backward_bytes: int | None = None
        self.retries = 0
        self._by_step: list[int] = []

    def start_phase(self) -> None:
        """Forgets the high-water mark of the device, not what was seen before."""
        self._memory.reset_peaks()

    def end_phase(self, *, forward_backward: bool) -> None:
        """Takes the high-water mark in."""
        now = self._memory.peaks()
        self.retries = now.retries
        self.highest = Peaks(
            _higher(self.highest.allocated_bytes, now.allocated_bytes),
            _higher(self.highest.reserved_bytes, now.reserved_bytes),
        )
        if forward_backward:
            best = now.allocated_bytes if now.allocated_bytes is not None else now.reserved_bytes
            self.forward_backward_bytes = _higher(self.forward_backward_bytes, best)
            if best is not None:
                self._by_step.append(best)

    def growth_bytes_per_step(self) -> int | None:
        """What every step left behind for good; None where peaks came to rest, or too few steps tell."""
        settled = self._by_step[_SETTLING_STEPS:]
        rises = sorted(after - before for before, after in pairwise(settled))
        if len(rises) < _LEAK_STEPS or rises[0] < _LEAK_BYTES:
            return None
        middle = int(statistics.median(rises))
        return middle if rises[0] > middle / 2 and rises[-1] < middle * 2 else None  # else it is the allocator's


class StepTimes:
    """Seconds of an attempt's steps, those that compiled something apart."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._clean: list[float] = []
        self._watch = CompileWatch()
        self._late_graphs = 0

    def add(self, seconds: float) -> None:
        """Takes in the step that has just ended."""
        graphs = self._watch.new_graphs()
        if len(self.seconds) >= _SETTLING_STEPS:
            self._late_graphs += graphs
        if not graphs:
            self._clean.append(seconds)
        self.seconds.append(seconds)

    def median(self) -> float | None:
        """Median step, without compiling, and without the first step where there is another."""
        times = self._clean[1:] if len(self._clean) == len(self.seconds) > 1 else self._clean
        return statistics.median(times) if times else None

    def recompiles(self) -> int | None:
        """Graphs compiled after the first two steps; None without torch.compile."""
        return self._late_graphs if self._watch.used else None


def _higher(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else max(left, right)


def attempt(task: Task, memory: DeviceMemory, command: TryBatchSize, parallel: Parallel | None = None) -> Tried:
    """Trains full optimizer steps at one micro-batch size, and some more where memory is not at rest by then.

    Args:
        task: the user's code.
        memory: the device, its limit already enforced.
        command: what to try.
        parallel: the ranks that train together; each calls this at the same time.
    """
    forget_compiled()
    tracker, times, started = PeakTracker(memory), StepTimes(), time.perf_counter()
    ended, usable = _Ended(), True
    before = after = evaluated = None
    try:
        with memory.attempt(command.batch_size):
            before = _held_bytes(memory)
            try:
                if task.is_for_inference:
                    _infer(task, memory, tracker, times, command)
                else:
                    evaluated = _train(task, memory, tracker, times, command, parallel)
            except (NonFiniteLossError, UsageError):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raises is the outcome
                ended, usable = _explain(error, command.batch_size)
        after = _held_bytes(memory)
    except RuntimeError as error:  # a device that failed fails again when its memory is to be given back
        if ended.outcome == "fit":
            ended, _ = _explain(error, command.batch_size)
        usable = False
    if before is not None and after is not None and after - before > _LEFT_BYTES:
        usable = False  # the user's code keeps a model or a batch alive: the next attempt would have less room
    found = Attempt(
        batch_size=command.batch_size,
        outcome=ended.outcome,
        seconds=round(time.perf_counter() - started, 4),
        purpose="verify" if command.verify else "search",
        message=ended.message,
        maps_file=ended.maps_file,
        evaluation_batch_size=evaluated,
    )
    figures = _figures(tracker, times, fits=found.fits)
    return Tried(attempt=found.model_copy(update=figures), usable=usable, frames=ended.frames)


def _held_bytes(memory: DeviceMemory) -> int | None:
    """What tensors take now; None where the device does not tell."""
    memory.reset_peaks()
    return memory.peaks().allocated_bytes


def _figures(tracker: PeakTracker, times: StepTimes, *, fits: bool) -> dict[str, Any]:
    """What was measured up to the end of an attempt, or up to its failure."""
    return {
        "steps": len(times.seconds),
        "peak_allocated_bytes": tracker.highest.allocated_bytes,
        "peak_reserved_bytes": tracker.highest.reserved_bytes,
        "forward_backward_peak_bytes": tracker.forward_backward_bytes if fits else None,
        "growth_bytes_per_step": tracker.growth_bytes_per_step(),
        "step_seconds": times.median(),
        "recompiles": times.recompiles(),
    }


class _Ended(NamedTuple):
    """How the steps of an attempt ended; see `Attempt`."""

    outcome: Literal["fit", "oom", "kernel_limit", "user_error"] = "fit"
    message: str | None = None
    maps_file: bool | None = None
    frames: str = ""


def _explain(error: BaseException, batch_size: int) -> tuple[_Ended, bool]:
    """How it ended, and whether the device survived; the frames are freed, since they hold the step's tensors."""
    outcome, frames = classify(error), ""
    if outcome == "user_error":
        described = describe_user_error(error, f"at batch size {batch_size} (not an out-of-memory error)")
        message, frames = str(described), described.frames
        cause = message_of(error)
        message += f" ({cause})" if cause not in message else ""  # a kernel failed, a library called later says so
    else:
        message = _CPU_PREFIX.sub("", message_of(error))
    ended, usable = _Ended(outcome, message, maps_file(error) or None, frames), leaves_device_usable(error)
    free_frames(error)
    return ended, usable


def _train(
    task: Task,
    memory: DeviceMemory,
    tracker: PeakTracker,
    times: StepTimes,
    command: TryBatchSize,
    parallel: Parallel | None,
) -> int | None:
    """Returns the batch size of the evaluation where it had to be a smaller one than was asked for."""
    trainer = Trainer(task, memory.device, command.precision, parallel=parallel, loss_scale=1.0)
    batch, accumulation_steps = task.worst_batch(command.batch_size), command.accumulation_steps
    steps, most = command.steps, command.steps if command.verify else _MOST_STRAINED * command.steps
    agree = parallel.agree if parallel else bool
    for number in range(most):
        memory.synchronize()
        started = time.perf_counter()
        tracker.start_phase()
        for _ in range(accumulation_steps):
            loss = trainer.forward_backward(batch, accumulation_steps)
        tracker.end_phase(forward_backward=True)
        if number == 0:
            require_finite(loss, command.batch_size)
        tracker.start_phase()
        # A check begins as loops do that always free gradients late; an attempt has too few steps for more than turns.
        is_late = number < most // 2 if command.verify else number % 2 == 0
        trainer.update(free_late=is_late or number + 1 == most)  # late before evaluation, too
        memory.synchronize()
        tracker.end_phase(forward_backward=False)
        times.add(time.perf_counter() - started)
        if steps <= number + 1 < most and agree(not tracker.retries):
            break  # else memory is full and cut up anew from step to step: the end may come in one of the next
    evaluated = None
    if command.verify:
        heartbeat.beat(at_once=True)
        tracker.start_phase()
        evaluated = _evaluate(trainer, memory, command)
        _save(trainer)
        for _ in range(STEPS_AFTER_EVALUATION):
            trainer.step(itertools.repeat(batch), accumulation_steps)
        memory.synchronize()
        tracker.end_phase(forward_backward=False)
    return evaluated


def _infer(task: Task, memory: DeviceMemory, tracker: PeakTracker, times: StepTimes, command: TryBatchSize) -> None:
    """Takes as many forward passes as `_train` takes steps."""
    inference, batch = Inference(task, memory.device, command.precision), task.worst_batch(command.batch_size)
    for number in range(command.steps if command.verify else _MOST_STRAINED * command.steps):
        if number >= command.steps and not tracker.retries:
            break
        memory.synchronize()
        started = time.perf_counter()
        tracker.start_phase()
        inference.forward(batch)
        memory.synchronize()
        tracker.end_phase(forward_backward=True)
        times.add(time.perf_counter() - started)


def _evaluate(trainer: Trainer, memory: DeviceMemory, command: TryBatchSize) -> int | None:
    if trainer.task.has("evaluate"):
        trainer.model.eval()
        with torch.no_grad(), trainer.precision.autocast():
            trainer.task.evaluate(trainer.model, _VERIFY_EVALUATION_BATCHES)
    elif trainer.task.has("val_dataset"):
        few = {"max_batches": _VERIFY_EVALUATION_BATCHES}
        if command.evaluation_batch_size is None:
            metric_value(trainer, "val_loss", command.batch_size, **few)
        else:
            asked = min(command.batch_size, command.evaluation_batch_size)
            _, fits = fitting_metric_value(trainer, memory, "val_loss", asked, **few)
            return fits if fits < asked else None
    return None


def _save(trainer: Trainer) -> None:
    heartbeat.beat(at_once=True)
    with Path(os.devnull).open("wb") as file:  # what counts is the memory that it takes: a full disk is no answer
        torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizers.state_dict()}, file)

"""One attempt: whether a micro-batch size trains on this device, and how much memory it takes."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from batchtune.child import heartbeat
from batchtune.child.evaluate import Inference, in_eval_mode, look_at_evaluation, undifferentiated
from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.timing import StepTimes
from batchtune.child.trainer import Trainer, require_finite, training_loader, without_end
from batchtune.device._base import DeviceMemory, PeakTracker
from batchtune.device.failures import (
    classify,
    describe_user_error,
    free_frames,
    leaves_device_usable,
    maps_file,
    message_of,
)
from batchtune.document import Attempt
from batchtune.errors import EpochTooShortError, HalfPrecisionError, UsageError
from batchtune.protocol.commands import STEPS_AFTER_EVALUATION, Tried, TryBatchSize, TryLengths
from batchtune.task.contract import Task
from batchtune.task.state import kept_random_numbers

_EVALUATION_BATCHES = 2
_FEWEST_EARLY = 3  # steps, or half of what was asked for: the first two cut memory up, later ones on and on
_MOST_STRAINED = 3  # times its steps: so long an attempt goes on that had to make room
_LEFT_BYTES = 2**20  # on the device once an attempt is over: less may be a library's own
_CPU_PREFIX = re.compile(r"^\[enforce fail at \S+\] .*?\. (?=DefaultCPUAllocator)")  # where in torch


def attempt(task: Task, memory: DeviceMemory, command: TryBatchSize, ranks: Ranks = ALONE) -> Tried:
    """Trains full optimizer steps at one micro-batch size, and some more where memory is not at rest by then.

    The limit of `memory` is enforced already. Ranks that train together call this at the same time.
    """
    heartbeat.forget_compiled()
    steps, started = _Steps(task, memory, command, ranks), time.perf_counter()
    ended = Tried(attempt=Attempt(batch_size=command.batch_size, outcome="fit"), usable=True)
    before, after = None, None
    try:
        with memory.attempt(command.batch_size):
            before = _held_bytes(memory)
            try:
                steps.run()
                if command.verify and before is not None:
                    steps.train_freeing_early(before)
            except UsageError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raises is the outcome
                ended = _explain(error, steps.batch_size)
                if ended.attempt.outcome == "oom" and ended.usable:
                    steps.tracker.out_of_memory()
        after = _held_bytes(memory)
    except RuntimeError as error:  # a device that failed fails again when its memory is to be given back
        ended = (_explain(error, command.batch_size) if ended.attempt.fits else ended).but(usable=False)
    if before is not None and after is not None and after - before > _LEFT_BYTES:
        ended = ended.but(usable=False)  # code keeps a model or a batch alive: the next attempt would have less room
    found = steps.found(ended.attempt, round(time.perf_counter() - started, 4))
    return ended.but(attempt=found, batches_differ=steps.batches_differ)


def _held_bytes(memory: DeviceMemory) -> int | None:
    """What tensors take now; None where the device does not tell."""
    memory.reset_peaks()
    return memory.peaks().allocated_bytes


def _explain(error: BaseException, batch_size: int) -> Tried:
    """How an attempt ended; the error's frames are freed, since they hold the step's tensors."""
    message, frames, fails_in_half = _CPU_PREFIX.sub("", message_of(error)), "", False
    if (outcome := classify(error)) == "user_error":
        described = describe_user_error(error, f"at batch size {batch_size:,} (not an out-of-memory error)")
        message, frames, fails_in_half = str(described), described.frames, isinstance(described, HalfPrecisionError)
        cause = message_of(error)
        message += f" ({cause})" if cause not in message else ""  # a kernel failed, a library called later says so
    most = error.samples if isinstance(error, EpochTooShortError) else None
    ended = Attempt(batch_size=batch_size, outcome=outcome, message=message, maps_file=maps_file(error) or None)
    usable = leaves_device_usable(error)
    free_frames(error)
    return Tried(attempt=ended, usable=usable, frames=frames, most_samples=most, fails_in_half=fails_in_half)


class _Steps:
    """The steps of an attempt, and what is measured in them. It holds no tensor."""

    def __init__(self, task: Task, memory: DeviceMemory, command: TryBatchSize, ranks: Ranks) -> None:
        self._task, self._memory, self._command, self._ranks = task, memory, command, ranks
        self._most = command.steps if command.verify else _MOST_STRAINED * command.steps
        self.tracker, self._times = PeakTracker(memory), StepTimes()
        self.batch_size, self._length = command.batch_size, command.length
        self.batches_differ = False
        self._steps_peak: int | None = None
        self._evaluates = False
        self._evaluated: int | None = None  # the batch size of the evaluation where it had to be smaller than asked for
        self._adds_up = False

    def found(self, ended: Attempt, seconds: float) -> Attempt:
        """What was measured up to the end, or up to the failure."""
        tracker, times, fits = self.tracker, self._times, ended.fits
        return Attempt(
            batch_size=self.batch_size,
            length=self._length,
            outcome=ended.outcome,
            seconds=seconds,
            purpose="verify" if self._command.verify else "search",
            message=ended.message,
            maps_file=ended.maps_file,
            in_evaluation=self._evaluates or None,
            evaluation_batch_size=self._evaluated if fits else None,
            loss_adds_up=(self._adds_up and fits) or None,
            steps=len(times.seconds),
            peak_allocated_bytes=tracker.highest.allocated_bytes,
            peak_reserved_bytes=tracker.highest.reserved_bytes,
            forward_backward_peak_bytes=tracker.forward_backward_bytes if fits else None,
            steps_peak_bytes=self._steps_peak,
            growth_bytes_per_step=tracker.growth_bytes_per_step(),
            step_seconds=times.median(),
            recompiles=times.recompiles(),
        )

    def run(self) -> None:
        """As the task trains, or is to be used."""
        if self._task.is_for_inference:
            self._infer()
        elif isinstance(self._command, TryLengths):
            self._train_over(self._command)
        else:
            self._train()

    def _train(self) -> None:
        """Optimizer steps; where memory is full, it is cut up anew in each, and the end may come in one of the next."""
        command, tracker, trainer, task = self._command, self.tracker, self._trainer(), self._task
        free_late = not command.process % 2
        for number, batch in enumerate(_batches(task, command, self._memory.device, self._most), 1):
            tracker.end_phase(forward_backward=False)  # of making it
            self._step(trainer, batch, free_late=free_late)
            if command.steps <= number < self._most and self._ranks.agree(not tracker.highest.retries):
                break
        if command.verify:
            self.batches_differ = task.batches_differ()
            self._steps_peak = tracker.highest.reserved_bytes
            tracker.start_phase()
            self._evaluate(trainer)
            self._train_on(trainer, batch, free_late=free_late)

    def train_freeing_early(self, held_bytes: int) -> None:
        """Steps from new as of loops that free gradients after each step, where `run` frees them late.

        Memory is cut up in another way from the second step on, so that a size may train in only one of the two. Left
        out where the user's code keeps more alive than was held before.
        """
        task, command = self._task, self._command
        has_one = isinstance(command, TryLengths) or task.is_for_inference or task.always_frees_late
        self._memory.release()
        if has_one or command.process:  # of further processes each has one of the two
            return
        if not self._ranks.agree((_held_bytes(self._memory) or 0) - held_bytes <= _LEFT_BYTES):
            return
        heartbeat.forget_compiled()
        taken, self._times = self._times, StepTimes()
        trainer, batch = self._trainer(), task.worst_batch(self.batch_size, self._length)
        steps = range(max(_FEWEST_EARLY, self._command.steps // 2), self._command.steps)
        _to_rest(lambda: self._step(trainer, batch, free_late=False), self.tracker, self._ranks, steps)
        if not task.has("evaluate"):  # which may take long
            self._evaluate(trainer, saves=False)
        self._train_on(trainer, batch, free_late=False)
        self._times = taken

    def _trainer(self) -> Trainer:
        where, again = (self._task, self._memory.device), self._command.variant.activation_checkpointing
        how = self._command.precision
        return Trainer(*where, how, ranks=self._ranks, loss_scale=1.0, activation_checkpointing=again)

    def _step(self, trainer: Trainer, batch: object, *, free_late: bool) -> None:
        """One optimizer step, measured."""
        tracker, micro_batches = self.tracker, self._command.accumulation_steps
        with self._timed():
            for _ in range(micro_batches):
                trainer.forward_backward(batch, micro_batches)
            tracker.end_phase(forward_backward=True)
            if not (self._times.seconds or self._command.process):  # the first process has said it
                require_finite(trainer.loss, self.batch_size)
            tracker.start_phase()
            trainer.update(free_late=free_late)
            self._memory.synchronize()
            tracker.end_phase(forward_backward=False)

    def _train_over(self, command: TryLengths) -> None:
        """Optimizer steps over batches of several lengths; each is made anew, as by a loader."""
        trainer, fullest, most = self._trainer(), (self.batch_size, self._length), 0
        for number, (self._length, self.batch_size), longest in command.turns():
            batch = self._task.worst_batch(self.batch_size, longest)
            self._step(trainer, batch, free_late=number < command.late_steps)
            if (self.tracker.highest.reserved_bytes or 0) > most:
                most, fullest = self.tracker.highest.reserved_bytes or 0, (self.batch_size, self._length)
            if number + 1 in command.evaluate_after:
                self._evaluate(trainer)
        self.batch_size, self._length = fullest

    def _infer(self) -> None:
        """As many forward passes as `_train` takes steps."""
        inference = Inference(self._task, self._memory.device, self._command.precision)
        batch = self._task.worst_batch(self._command.batch_size, self._command.length)
        for number in range(self._most):
            if number >= self._command.steps and not self.tracker.highest.retries:
                break
            with self._timed():
                inference.forward(batch)
                self._memory.synchronize()
                self.tracker.end_phase(forward_backward=True)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """A step."""
        self._memory.synchronize()
        started = time.perf_counter()
        self.tracker.start_phase()
        yield
        self._times.add(time.perf_counter() - started)

    def _evaluate(self, trainer: Trainer, *, saves: bool = True) -> None:
        """Evaluates, and saves a checkpoint, for the memory that it takes: a full disk is no answer."""
        heartbeat.beat(at_once=True)
        self._evaluates = True
        size, most, few = self._command.batch_size, self._command.evaluation_batch_size, _EVALUATION_BATCHES
        if trainer.task.has("evaluate"):
            with in_eval_mode(trainer.model), trainer.precision.autocast():
                undifferentiated(trainer, lambda: trainer.task.evaluate(trainer.model, few, rank=self._ranks.rank))
        elif trainer.task.has("val_dataset"):
            self._evaluated, self._adds_up = look_at_evaluation(trainer, self._memory, size, most, few)
        if saves:
            heartbeat.beat(at_once=True)
            with Path(os.devnull).open("wb") as file:
                states = trainer.optimizers.state_dict(self._ranks.rank)
                torch.save({"model": trainer.model.state_dict(), "optimizer": states}, file)
        self._evaluates = False
        self.tracker.end_phase(forward_backward=False)

    def _train_on(self, trainer: Trainer, batch: object, *, free_late: bool) -> None:
        """Evaluation cuts memory up, too: a few steps more."""

        def step() -> None:
            trainer.step(itertools.repeat(batch), self._command.accumulation_steps, free_late=free_late)
            self._memory.synchronize()
            self.tracker.end_phase(forward_backward=False)

        _to_rest(step, self.tracker, self._ranks, range(STEPS_AFTER_EVALUATION, self._command.steps))


def _to_rest(step: Callable[[], None], tracker: PeakTracker, ranks: Ranks, steps: range) -> None:
    """Steps up to the first number at least, and more until one has no room to make, to the last at most."""
    for number in range(1, max(steps.start, steps.stop) + 1):
        before = tracker.highest.retries
        step()
        if number >= steps.start and ranks.agree(tracker.highest.retries == before):
            return


def _batches(task: Task, command: TryBatchSize, device: torch.device, most: int) -> Iterator[object]:
    """That of each step, made beside the last one: the worst; in further processes after one to four drawn ones.

    On a CPU a loader's own where they do not differ, or made beside them: its samples and their order take memory, too.
    """
    on_cpu, size = device.type == "cpu", command.batch_size
    stays = not on_cpu or task.has("train_loader")  # copied there; takes long to find
    loads = on_cpu and command.length is None and task.loads_soon(size)
    loaded = _loaded(task, size) if loads else itertools.repeat(None)
    drawn = task.drawn_batches(size, command.process) if command.process else iter(())
    worst = None
    for number in range(1, most + 1):
        own = next(loaded)
        other = next(drawn, None) if number % (2 + (command.process - 1) % 4) else None
        batch = worst if other is None else other
        if batch is None:
            rest = task.rest_of_epoch(size) if command.verify and number == command.steps // 2 else 0
            batch = task.worst_batch(rest or size, command.length) if own is None or rest else own
            worst = batch if stays else None
        yield batch


def _loaded(task: Task, batch_size: int) -> Iterator[object | None]:
    """A batch of a loader for each step, as long as that takes no longer than steps do; None where batches differ."""
    is_whole = not task.batches_differ()
    batches = without_end(training_loader(task, batch_size, 0) for _ in itertools.count())
    started, loading = time.perf_counter(), 0.0
    while True:
        began, batch = time.perf_counter(), None
        if 2 * loading <= began - started:
            with kept_random_numbers("cpu"):
                batch = next(batches, None)
            loading += time.perf_counter() - began
        batch = batch if is_whole else None
        yield batch

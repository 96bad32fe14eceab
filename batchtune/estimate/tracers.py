"""The parent's side of tracing: children at work for an estimate, and the one that a probe has beside its own child."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from batchtune.device.gpus import Gpu
from batchtune.document import MemoryDetail, Remedy
from batchtune.errors import RunInterrupted, fp32_instead
from batchtune.estimate.calibration import offsets_of
from batchtune.estimate.commands import PROGRAM, EstimateMemory, GpuFacts, Refusal, Row, Traced
from batchtune.observer import Observer
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker, WorkerDied

_DYING_SECONDS = 60.0  # in which who waits for the children has ended them
_PROCESSES = 2  # children that trace at the same time
_QUICK = 0.5  # of the work done within the time: nothing holds it up
_AT_WORK = 0.99  # of the work done, at the most, by who is still at it
_LOOK_SECONDS = 1.0  # between two looks at how far they are


@dataclass
class Answered:
    """What a child says at one precision.

    Attributes:
        refusal: why it says nothing; None where it does.
        rows: by the GPUs' names.
        detail: the peak at the largest size.
        remedies: what would help, by the names of GPUs on which nothing fits.
        instead: the precision that was traced in the place of the one asked for; None: that one.
    """

    refusal: Refusal | None
    rows: dict[str, Row] = field(default_factory=dict)
    detail: MemoryDetail | None = None
    remedies: dict[str, list[Remedy]] = field(default_factory=dict)
    instead: str | None = None


def ask_tracers(
    jobs: Sequence[str],
    answer: Callable[[Worker, str], Answered],
    observer: Observer,
    *,
    seconds: float,
) -> dict[str, Answered]:
    """Has a child of its own do each job.

    Args:
        jobs: their names.
        answer: does one, in a thread.
        observer: told how far they are, and what the user's code prints.
        seconds: after which they are ended; the answer is then the reason.

    Raises:
        BatchtuneError: what the first that failed raised; the others are ended. A child that dies is the task's fault,
            unless something else has ended it, twice.
    """
    stopping, workers, started = threading.Event(), list[Worker](), time.monotonic()
    shares = dict.fromkeys(jobs, 0.0)

    def came_to(job: str, share: float) -> None:
        """What a child says that begins anew with each thing it is asked for, of which there may be more."""
        shares[job] = max(shares[job], min(share, _AT_WORK))

    def work(job: str) -> Answered:
        launcher = LocalLauncher(observer.printed, program=PROGRAM)
        with Worker(None, launcher, stopping=stopping, progress=partial(came_to, job)) as worker:
            workers.append(worker)
            return answer(worker, job)

    with ThreadPoolExecutor(max(1, min(_PROCESSES, len(jobs), os.cpu_count() or 1))) as pool:
        futures = {job: pool.submit(_come_of, partial(work, job), f"tracing at {job}", observer) for job in jobs}
        try:
            while (spent := time.monotonic() - started) < seconds:
                if spent >= _LOOK_SECONDS:
                    observer.progress(sum(shares.values()) / len(shares), spent, seconds)
                done, at_work = wait(futures.values(), _LOOK_SECONDS, FIRST_EXCEPTION)
                if not at_work or any(each.exception() for each in done):
                    break
        finally:
            stopping.set()  # the threads of those that are still at work learn of it
            while wait(futures.values(), 0.1).not_done:
                for worker in list(workers):
                    worker.kill()
    found: dict[str, Answered] = {}
    for job, future in futures.items():
        error = future.exception()
        if error is not None and not isinstance(error, RunInterrupted):
            raise error
        found[job] = Answered(Refusal(refused=_too_long(seconds, shares[job]))) if error else future.result()
    return found


def _come_of(work: Callable[[], Answered], doing: str, observer: Observer, *, is_last: bool = False) -> Answered:
    """What comes of a child's work, which is done once more where something else has ended the child."""
    try:
        return work()
    except WorkerDied as died:
        if is_last or not died.from_outside:
            raise died.said_of(doing) from None
        observer.note(f"{doing} is tried again: {died}")
    return _come_of(work, doing, observer, is_last=True)


def _too_long(seconds: float, share: float) -> str:
    guess = "; a loop in Python over samples or time steps, or many --lengths, may be what takes it so long"
    why = guess if share < _QUICK else ""
    return f"tracing took longer than {seconds:g} s ({share:.0%} of it was done); --timeout 10m gives it longer{why}"


def ask(
    worker: Worker, question: EstimateMemory, gpus: Sequence[GpuFacts], deadline: float, *, may_change: bool = False
) -> Answered:
    """Asks a child about GPUs, and about what would help where nothing fits, until a time of the monotonic clock.

    Where the step does not train at the precision asked about, and that may change, it asks about one at which it does.
    """

    def call(some: Sequence[GpuFacts], **changes: object) -> Traced | Refusal:
        left = max(0.0, deadline - time.monotonic())
        return worker.call(question.but(gpus=tuple(some), seconds=left, **changes), timeout=left + _DYING_SECONDS)

    found, instead, why = call(gpus), "", list[str]()
    if isinstance(found, Refusal) and found.instead and may_change:
        instead, why = found.instead, [fp32_instead(question.precision, found.refused)]
        question = question.but(precision=instead)
        found = call(gpus)
    if isinstance(found, Refusal):
        return Answered(found, instead=instead or None)
    told = [row.but(notes=[*why, *row.notes]) for row in found.gpus]
    rows = dict(zip((gpu.name for gpu in gpus), told, strict=True))
    answered = Answered(None, rows, found.details[0], instead=instead or None)
    hopeless = [gpu for gpu in gpus if not rows[gpu.name].max_batch_size]
    for name, changes in _remedies(question) if hopeless else ():
        if instead and "precision" in changes:  # in which it does not train
            continue
        try:
            tried = call(hopeless, **changes)
        except RunInterrupted:  # the time is up: what is known stands without
            break
        for gpu, row in zip(hopeless, [] if isinstance(tried, Refusal) else tried.gpus, strict=False):
            answered.remedies.setdefault(gpu.name, []).append(Remedy(name=name, max_batch_size=row.max_batch_size))
    return answered


def facts_of(gpu: Gpu) -> GpuFacts:
    """What an answer needs to know of a GPU: the catalogue's row, and what probes measured."""
    return GpuFacts(
        name=gpu.name,
        memory_bytes=gpu.capacity_bytes,
        generation=gpu.generation,
        vendor=gpu.vendor,
        measured=offsets_of(gpu.name),
    )


def _remedies(question: EstimateMemory) -> list[tuple[str, dict[str, object]]]:
    """What may make a model smaller, each alone and then all together."""
    single: list[tuple[str, dict[str, object]]] = []
    if question.precision == "fp32":
        single.append(("bf16 or fp16", {"precision": "bf16"}))
    if question.accumulation_steps > 1:
        single.append(("one micro-batch per step", {"accumulation_steps": 1}))
    if not question.inference:
        single.append(("activation checkpointing of its repeated blocks", {"checkpointing": True}))
    together = {key: value for _, changes in single for key, value in changes.items()}
    return [*single, (" and ".join(words for words, _ in single), together)] if len(single) > 1 else single

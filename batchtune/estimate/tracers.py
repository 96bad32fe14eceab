"""The children that trace at the same time: how far they are, and their end at the time limit or at Ctrl-C."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from batchtune.errors import RunInterrupted
from batchtune.estimate.commands import PROGRAM, EstimateMemory
from batchtune.observer import Observer
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker

_DYING_SECONDS = 60.0  # in which who waits for the children has ended them
_LOOK_SECONDS = 1.0  # between two looks at how far they are
_Answers = dict[str, dict[str, Any]]


def ask_tracers(
    jobs: Sequence[str],
    answer: Callable[[Worker, str], _Answers],
    observer: Observer,
    *,
    seconds: float,
    processes: int,
) -> _Answers:
    """Has a child of its own do each job.

    Args:
        jobs: their names.
        answer: does one, in a thread.
        observer: told how far they are, and what the user's code prints.
        seconds: after which they are ended; the answer is then the reason, as `refused`.
        processes: children at the same time.

    Raises:
        BatchtuneError: what the first that failed raised; the others are ended.
    """
    stopping, workers, started = threading.Event(), list[Worker](), time.monotonic()
    shares = dict.fromkeys(jobs, 0.0)

    def work(job: str) -> _Answers:
        launcher = LocalLauncher(observer.printed, program=PROGRAM)
        with Worker(None, launcher, stopping=stopping, progress=partial(shares.__setitem__, job)) as worker:
            workers.append(worker)
            return answer(worker, job)

    with ThreadPoolExecutor(max(1, min(processes, len(jobs), os.cpu_count() or 1))) as pool:
        futures = {job: pool.submit(work, job) for job in jobs}
        try:
            while _are_at_work(futures.values()) and (spent := time.monotonic() - started) < seconds:
                if spent >= _LOOK_SECONDS:
                    observer.progress(sum(shares.values()) / len(shares), spent, seconds)
                wait(futures.values(), _LOOK_SECONDS, FIRST_EXCEPTION)
        finally:
            _end(futures.values(), workers, stopping)
    found: _Answers = {}
    for job, future in futures.items():
        error = future.exception()
        if error is not None and not isinstance(error, RunInterrupted):
            raise error
        found |= {job: {"refused": _too_long(seconds, shares[job])}} if error else future.result()
    return found


def _are_at_work(futures: Sequence[Future[_Answers]] | Any) -> bool:
    """Whether some are, and none has failed."""
    return not all(each.done() for each in futures) and not any(each.done() and each.exception() for each in futures)


def _end(futures: Any, workers: Sequence[Worker], stopping: threading.Event) -> None:
    """Ends the children that are still at work; their threads learn of it."""
    if all(each.done() for each in futures):
        return
    stopping.set()
    while wait(futures, 0.1).not_done:
        for worker in list(workers):
            worker.kill()


def _too_long(seconds: float, share: float) -> str:
    return (
        f"tracing took longer than {seconds:g} s ({share:.0%} of it was done); --timeout 10m gives it longer, and a "
        "loop in Python over samples or time steps may be what takes it so long"
    )


class Asking:
    """One child, asked about one precision and about what would help where nothing fits.

    Args:
        worker: has the child.
        arguments: of the question, but for the GPUs.
        deadline: of the monotonic clock, when nobody waits any more.
    """

    def __init__(self, worker: Worker, arguments: dict[str, Any], deadline: float) -> None:
        self._worker, self._arguments, self._deadline = worker, arguments, deadline

    def answer(self, facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The child's answer, its rows by the GPUs' names; `remedies` of a row are (what, largest batch)."""
        found = self._ask(facts, {})
        found["rows"] = dict(zip(facts, found.get("gpus", []), strict=False))
        hopeless = {name: facts[name] for name, row in found["rows"].items() if not row["max_batch_size"]}
        for words, changes in self._remedies():
            if not hopeless:
                break
            try:
                rows = self._ask(hopeless, changes).get("gpus", [])
            except RunInterrupted:  # the time is up: what is known stands without
                break
            for name, row in zip(list(hopeless), rows, strict=False):
                found["rows"][name].setdefault("remedies", []).append((words, row["max_batch_size"]))
                if row["max_batch_size"] and len(changes) > 1:
                    del hopeless[name]
        return found

    def _remedies(self) -> list[tuple[str, dict[str, Any]]]:
        """What may make a model smaller, each alone and then all together."""
        single: list[tuple[str, dict[str, Any]]] = []
        if self._arguments["precision"] == "fp32":
            single.append(("bf16 or fp16", {"precision": "bf16"}))
        if self._arguments["accumulation_steps"] > 1:
            single.append(("one micro-batch per step", {"accumulation_steps": 1}))
        if not self._arguments["inference"]:
            single.append(("activation checkpointing of its repeated blocks", {"checkpointing": True}))
        together = {key: value for _, changes in single for key, value in changes.items()}
        return [*single, (" and ".join(words for words, _ in single), together)] if len(single) > 1 else single

    def _ask(self, facts: dict[str, dict[str, Any]], changes: dict[str, Any]) -> dict[str, Any]:
        left = max(0.0, self._deadline - time.monotonic())
        arguments = {**self._arguments, "gpus": list(facts.values()), "seconds": left, **changes}
        return self._worker.call(EstimateMemory(**arguments), timeout=left + _DYING_SECONDS)

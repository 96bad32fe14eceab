"""`batchtune probe` as a function: one or several precisions on one device, and the document that comes of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from batchtune.config.probe import ProbeOptions
from batchtune.document import Attempt, Document, TaskInfo, ThroughputPoint
from batchtune.errors import BatchtuneError, RunInterrupted, UsageError
from batchtune.observer import Forwarder, Observer
from batchtune.probe.session import ProbeSession
from batchtune.processes.local import LocalLauncher
from batchtune.processes.ranks import RankLauncher, closest_seats, world_size_here
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask
from batchtune.result import Result, load_result, of_first_rank
from batchtune.run_folder import RunFolder, probe_folder
from batchtune.task.spec import file_hash, spec_of, task_name


def run_probe(
    settings: OpenTask,
    options: ProbeOptions,
    *,
    name: str,
    observer: Observer,
    folder: RunFolder | None = None,
    world_size: int = 1,
    strategy: str = "ddp",
) -> Result:
    """Probes a task at each precision of `settings`, in children of their own or, with a world size, in groups of them.

    Inside of torchrun all of its ranks are the group, and the result is the same in all of its processes.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """

    def probe() -> Result:
        count = world_size_here(world_size)
        _require_one_device(count, settings, options)
        ranks = RankLauncher(count, strategy, observer.printed, environment=closest_seats(settings.device, count))
        launcher = ranks if count > 1 else LocalLauncher(observer.printed)
        worker = Worker(settings, launcher, note=observer.announce)
        task = TaskInfo(path=settings.task, sha256=file_hash(settings.task))
        session = ProbeSession(worker, settings, options, name, task, observer)
        return session.run() if folder is None else _run_in(folder, session)

    return of_first_rank(probe)


def probe_task(
    task: str | os.PathLike[str],
    options: ProbeOptions,
    *,
    inference: bool,
    observer: Observer,
    run_folders: str | os.PathLike[str] | None,
    world_size: int,
    strategy: str,
    device: str,
    memory_limit: int | None,
    margin: float,
    precision: tuple[str, ...],
) -> Result:
    """Probes the task that a user names; see `batchtune.probe`, which hands its arguments on.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    path, name = spec_of(task), task_name(spec_of(task))
    settings = OpenTask(
        task=path,
        device=device,
        purpose="inference" if inference else "probe",
        memory_limit=memory_limit,
        margin=margin,
        precision=precision,
        lengths=options.lengths,
    )
    kept = None if run_folders is None else probe_folder(f"{settings.purpose}-{name}", path, Path(run_folders))
    return run_probe(
        settings, options, name=name, observer=observer, folder=kept, world_size=world_size, strategy=strategy
    )


def _require_one_device(world_size: int, settings: OpenTask, options: ProbeOptions) -> None:
    what = "--inference" if settings.purpose == "inference" else "--lengths" if settings.lengths else ""
    if world_size > 1 and what:
        raise UsageError(f"--nproc-per-node {world_size}: not with {what}, which is probed on one device")
    if settings.purpose == "inference" and settings.lengths:
        raise UsageError("--lengths: not with --inference, which takes no steps over them")
    if settings.purpose == "inference" and (steps := options.accumulation_steps) > 1:
        raise UsageError(f"--accumulation {steps}: not with --inference, which accumulates no gradients")


def _run_in(folder: RunFolder, session: ProbeSession) -> Result:
    """Probes, and keeps attempts and result in the folder."""
    folder.open()
    try:
        session.observer = _Recorder(session, folder)
        result = session.run()
    except BatchtuneError as error:
        if error.result is not None and _is_worth_keeping(error.result, folder):
            with contextlib.suppress(UsageError):  # no space: the caller still has the result to show
                folder.write_result(error.result)
        elif isinstance(error, RunInterrupted):
            stays = RunInterrupted(
                "interrupted before there was a checked answer; the result of the earlier probe stays"
            )
            stays.result = error.result
            raise stays from None
        raise
    else:
        try:
            folder.write_result(result)
        except UsageError as error:
            error.result = result
            raise
        return result
    finally:
        folder.close()


def _is_worth_keeping(result: Document, folder: RunFolder) -> bool:
    """Whether an unfinished result takes the place of the one in the folder; an interrupted one not of a whole one.

    Of the same code, that is: what an older state of it, or another task of that name, came to is worth less.
    """
    if result.status == "interrupted" and not (result.probe and result.probe.verified_in_fresh_process):
        with contextlib.suppress(UsageError):  # none, or none that can be read
            earlier = load_result(folder.path)
            same = (earlier.kind, earlier.task.path, earlier.task.sha256)
            if earlier.status == "complete" and same == (result.kind, result.task.path, result.task.sha256):
                return False
    return result.probe is not None or not folder.has_result()


class _Recorder(Forwarder):
    """Keeps each attempt in the run folder as it comes; what an earlier probe left there goes when the first one is."""

    def __init__(self, session: ProbeSession, folder: RunFolder) -> None:
        super().__init__(session.observer)
        self._session, self._folder, self._has_begun, self._stage = session, folder, False, ""

    def stage(self, title: str) -> None:
        super().stage(title)
        self._stage = title

    def attempted(self, attempt: Attempt) -> None:
        if not self._has_begun:
            self._folder.forget_attempts()
            self._has_begun = True
        self._folder.append_attempt(attempt)
        super().attempted(attempt)
        self._show()

    def throughput(self, point: ThroughputPoint) -> None:
        super().throughput(point)
        self._show()

    def _show(self) -> None:
        self._folder.show(lambda: self._session.document("interrupted"), self._stage)

"""`batchtune probe` as a function: one or several precisions on one device, and the document that comes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from batchtune.config.probe import ProbeOptions
from batchtune.device.sharing import sharing_warnings
from batchtune.document import Attempt, Document, Failure, InputPipeline, ProbeResult, TaskInfo, ThroughputPoint
from batchtune.errors import BatchtuneError, DeviceError, NothingFitsError, RunInterrupted, UsageError, UserCodeError
from batchtune.estimate.free_memory import FreeMemory
from batchtune.estimate.tracers import EstimatePrior
from batchtune.observer import Forwarder, Observer
from batchtune.probe.input_pipeline import measure_input_pipeline
from batchtune.probe.runner import Probe
from batchtune.processes.local import LocalLauncher
from batchtune.processes.ranks import RankLauncher, world_size_here
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.result import Result, load_result, of_first_rank
from batchtune.run_folder import RunFolder
from batchtune.task.spec import file_hash

_ANSWER = ("max_batch_size", "first_failing_batch_size", "limited_by", "data_parallel")


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
        ranks = RankLauncher(count, strategy, observer.printed)
        worker = Worker(settings, ranks if count > 1 else LocalLauncher(observer.printed))
        session = _Session(worker, settings, options, name, observer)
        return _run(session) if folder is None else _run_in(folder, session)

    return of_first_rank(probe)


def _require_one_device(world_size: int, settings: OpenTask, options: ProbeOptions) -> None:
    what = "--inference" if settings.purpose == "inference" else "--lengths" if settings.lengths else ""
    if world_size > 1 and what:
        raise UsageError(f"--nproc-per-node {world_size}: not with {what}, which is probed on one device")
    if settings.purpose == "inference" and settings.lengths:
        raise UsageError("--lengths: not with --inference, which takes no steps over them")
    if settings.purpose == "inference" and (steps := options.accumulation_steps) > 1:
        raise UsageError(f"--accumulation {steps}: not with --inference, which accumulates no gradients")


def _run_in(folder: RunFolder, session: _Session) -> Result:
    """Probes, and keeps attempts and result in the folder."""
    folder.open()
    try:
        session.observer = _Recorder(session, folder)
        result = _run(session)
    except BatchtuneError as error:
        if error.result is not None and _is_worth_keeping(error.result, folder):
            with contextlib.suppress(UsageError):  # no space: the caller still has the result to show
                folder.write_result(error.result)
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
    if result.status == "interrupted":
        with contextlib.suppress(UsageError):  # none, or none that can be read
            earlier = load_result(folder.path)
            same = (earlier.kind, earlier.task.path, earlier.task.sha256)
            if earlier.status == "complete" and same == (result.kind, result.task.path, result.task.sha256):
                return False
    return result.probe is not None or not folder.has_result()


class _Recorder(Forwarder):
    """Keeps each attempt in the run folder as it comes; what an earlier probe left there goes when the first one is."""

    def __init__(self, session: _Session, folder: RunFolder) -> None:
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


def _run(session: _Session) -> Result:
    """Probes at each precision, then times the data loader."""
    settings, observer = session.settings, session.observer
    try:
        on_cpu = settings.memory_limit is not None  # all of a CPU's memory takes so long to fill that sizes grow slowly
        with EstimatePrior(settings.task, settings.device, observer, on_cpu=on_cpu) as prior, session.worker as worker:
            session.opened = opened = worker.start()
            for precision, reason in opened.precision:
                observer.note(f"precision {precision}: {reason}")
                try:
                    session.probe_at(precision, opened, prior)
                except (NothingFitsError, UserCodeError) as error:  # another precision may do better
                    session.failures.append((precision, error))
            if len(session.failures) == len(opened.precision):
                raise session.failures[0][1]
            if session.options.throughput and opened.has_train_dataset and not opened.is_for_inference:
                session.time_loader()
            session.free.look_after(opened)
    except KeyboardInterrupt:
        interrupted = RunInterrupted(
            "interrupted; what was measured until then is in the result, and 'batchtune report' shows it"
        )
        interrupted.result = session.document("interrupted", interrupted)
        raise interrupted from None
    except BatchtuneError as error:
        error.result = session.document("failed", error)
        raise
    return session.document("complete")


@contextlib.contextmanager
def _told_if_busy(observer: Observer) -> Iterator[None]:
    """The answer stands by now: a device that somebody else has filled costs only what was still to be timed."""
    try:
        yield
    except DeviceError as error:
        observer.note(f"no more is timed: {error}")


class _Session:
    """What is known so far, so that an error at any moment still leaves a document."""

    def __init__(
        self, worker: Worker, settings: OpenTask, options: ProbeOptions, name: str, observer: Observer
    ) -> None:
        self.worker, self.settings, self.options, self.observer = worker, settings, options, observer
        self._name, self._task = name, TaskInfo(path=settings.task, sha256=file_hash(settings.task))
        self.opened: Opened | None = None  # by the first child
        self.failures: list[tuple[str, BatchtuneError]] = []  # with their precisions
        self._probes: list[Probe] = []
        self._loader: tuple[str, InputPipeline | None] = ("", None)  # timed against this precision's steps
        self.free = FreeMemory(worker)

    def probe_at(self, precision: str, opened: Opened, prior: EstimatePrior) -> None:
        """Probes one of the precisions; what it finds, and what it has found when it fails, is kept."""
        accumulation_steps = self.options.accumulation_steps or opened.accumulation_steps
        options, estimated = replace(self.options, accumulation_steps=accumulation_steps), None
        if not opened.is_group:  # of a group, the memory of one process alone says too little
            estimated = prior.look(opened, precision, accumulation_steps, timeout=options.timeout)
        probe = Probe(self.worker, options, precision, self.observer, prior=estimated)
        self._probes.append(probe)
        probe.find()
        self.free.look_beside_child()
        with _told_if_busy(self.observer):
            probe.time_steps()
        if estimated and opened.device != "cpu" and not opened.is_for_inference:  # workspaces are those of training
            estimated.learn(opened.device_name, probe.attempts)

    def time_loader(self) -> None:
        """Times the data loader against the fastest precision's steps; it is the same for all of them."""
        self.observer.stage("timing the data loader")
        fastest = max((probe.result() for probe in self._probes), key=_rank_of)
        with _told_if_busy(self.observer):
            found = measure_input_pipeline(self.worker, fastest, self.observer, timeout=self.options.timeout)
            self._loader = (fastest.precision, found)

    def _results(self) -> list[ProbeResult]:
        """Of each precision; one whose every size the final check refused has no answer, whatever its search found."""
        (timed, loader), failed = self._loader, {name for name, _ in self.failures}
        results = []
        for found in (probe.result() for probe in self._probes):
            is_checked = any(each.purpose == "verify" for each in found.attempts)
            refused = found.precision in failed and is_checked and not found.verified_in_fresh_process
            update: dict[str, object] = {"input_pipeline": loader} if found.precision == timed else {}
            results.append(found.model_copy(update=update | (dict.fromkeys(_ANSWER) if refused else {})))
        return results

    def document(
        self, status: Literal["complete", "interrupted", "failed"], error: BatchtuneError | None = None
    ) -> Result:
        results, environment, optimizer = self._results(), None, None
        if self.opened is not None:
            optimizer = self.opened.optimizer or None
            after = {"device_memory_free_after_bytes": self.free.after}
            environment = self.opened.environment.model_copy(update=after)
        failed = [f"{precision}: {failure}" for precision, failure in self.failures if failure is not error]
        from_probes = [warning for each in results for warning in each.warnings]
        return Result(
            kind="probe",
            status=status,
            name=self._name,
            environment=environment,
            task=self._task.model_copy(update={"optimizer": optimizer}),
            warnings=list(dict.fromkeys([*sharing_warnings(environment), *failed, *from_probes])),
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=max(results, key=_rank_of, default=None),
            probes=results if len(results) > 1 else None,
        )


def _rank_of(probe: ProbeResult) -> tuple[bool, bool, float]:
    """What makes a precision stand for the probe: an answer that was checked, any answer, then its best speed."""
    fastest = max((point.samples_per_second for point in probe.throughput), default=0.0)
    return probe.verified_in_fresh_process, probe.max_batch_size is not None, fastest

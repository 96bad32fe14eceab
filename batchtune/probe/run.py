"""`batchtune probe` as a function: one or several precisions on one device, and the document that comes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from batchtune.device.sharing import look
from batchtune.document import Attempt, Document, Environment, Failure, InputPipeline, ProbeResult, TaskInfo
from batchtune.errors import BatchtuneError, DeviceError, NothingFitsError, RunInterrupted, UsageError, UserCodeError
from batchtune.estimate.calibration import record
from batchtune.estimate.prior import EstimatePrior
from batchtune.files import load_result
from batchtune.observer import Forwarder, Observer
from batchtune.probe.options import ProbeOptions
from batchtune.probe.runner import Probe
from batchtune.probe.timing.input_pipeline import measure_input_pipeline
from batchtune.probe.warnings import MOVED, allocator_warnings, sharing_warnings
from batchtune.processes.local import LocalLauncher
from batchtune.processes.ranks.group import RankLauncher
from batchtune.processes.ranks.torchrun import Follower, Leader, RendezvousStore, TorchrunEnv, require_whole
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.result import Result
from batchtune.run_folder import RunFolder
from batchtune.task.spec import file_hash

_SAME_BYTES = 16 << 20  # free memory that differs by less before and after: nobody else came or went
_SETTLING_SECONDS = (0.0, 0.3, 1.0)


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

    In a process that torchrun started, one rank runs in each; where this is not the first of them, the result is the
    first one's, whatever its status.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    torchrun = TorchrunEnv.from_environment()
    if settings.purpose == "inference":
        _require_one_device(torchrun.world_size if torchrun else world_size, options)
    if torchrun is not None:
        require_whole(torchrun, world_size)
        return _probe_in_torchrun(torchrun, settings, options, name, observer, folder, strategy)
    worker = Worker(settings, LocalLauncher(observer.printed))
    if world_size > 1:
        worker = Worker(settings, RankLauncher(world_size, strategy, observer.printed))
    return _probe(worker, settings, options, name, observer, folder)


def _require_one_device(world_size: int, options: ProbeOptions) -> None:
    if world_size > 1:
        raise UsageError(f"--nproc-per-node {world_size}: not with --inference, which is probed on one device")
    if options.accumulation_steps > 1:
        steps = options.accumulation_steps
        raise UsageError(f"--accumulation {steps}: not with --inference, which accumulates no gradients")


def _probe_in_torchrun(
    torchrun: TorchrunEnv,
    settings: OpenTask,
    options: ProbeOptions,
    name: str,
    observer: Observer,
    folder: RunFolder | None,
    strategy: str,
) -> Result:
    """The same among processes that torchrun started: the first one probes, all run a rank, all have the result."""
    if torchrun.rank:
        published = Follower(torchrun, RendezvousStore()).follow()
        if published is None:
            raise RunInterrupted("rank 0 ended without a result; see what it says")
        return Result.model_validate_json(published)
    with Leader(torchrun) as leader:
        launcher = RankLauncher(torchrun.world_size, strategy, observer.printed, leader=leader)
        worker = Worker(settings, launcher)
        try:
            result = _probe(worker, settings, options, name, observer, folder)
        except BatchtuneError as error:
            if error.result is not None:
                leader.publish(error.result.to_json())
            raise
        leader.publish(result.to_json())
        return result


def _probe(
    worker: Worker,
    settings: OpenTask,
    options: ProbeOptions,
    name: str,
    observer: Observer,
    folder: RunFolder | None,
) -> Result:
    session = _Session(settings, name)
    if folder is None:
        return _run(session, worker, options, observer)
    folder.open()
    try:
        result = _run(session, worker, options, _Recorder(folder, observer))
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

    def __init__(self, folder: RunFolder, behind: Observer) -> None:
        super().__init__(behind)
        self._folder, self._has_begun = folder, False

    def attempted(self, attempt: Attempt) -> None:
        if not self._has_begun:
            self._folder.forget_attempts()
            self._has_begun = True
        self._folder.append_attempt(attempt)
        super().attempted(attempt)


def _run(session: _Session, worker: Worker, options: ProbeOptions, observer: Observer) -> Result:
    settings = session.settings
    try:
        on_cpu = settings.memory_limit is not None  # all of a CPU's memory takes so long to fill that sizes grow slowly
        with EstimatePrior(settings.task, settings.device, observer, on_cpu=on_cpu) as estimate_prior, worker:
            session.opened = opened = worker.start()
            options = replace(options, accumulation_steps=options.accumulation_steps or opened.accumulation_steps)
            for precision, reason in opened.precision:
                observer.note(f"precision {precision}: {reason}")
                try:
                    _probe_at(precision, session, opened, worker, options, observer, estimate_prior)
                except (NothingFitsError, UserCodeError) as error:  # another precision may do better
                    session.failures.append((precision, error))
            if len(session.failures) == len(opened.precision):
                raise session.failures[0][1]
            if options.throughput and opened.has_train_dataset and not opened.is_for_inference:
                observer.stage("timing the data loader")
                with _told_if_busy(observer):
                    session.feed(worker, options, observer)
            session.look_again(worker)
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


def _probe_at(
    precision: str,
    session: _Session,
    opened: Opened,
    worker: Worker,
    options: ProbeOptions,
    observer: Observer,
    estimate_prior: EstimatePrior,
) -> None:
    """Probes one of the precisions; what it finds, and what it has found when it fails, is in the session."""
    estimated = None
    if not opened.is_group:  # of a group, the memory of one process alone says too little
        estimated = estimate_prior.look(opened, precision, options.accumulation_steps, timeout=options.timeout)
    probe = Probe(worker, options, precision, observer, prior=estimated)
    session.probes.append(probe)
    probe.find()
    session.look(worker)
    with _told_if_busy(observer):
        probe.time_steps()
    if estimated and opened.device != "cpu" and not opened.is_for_inference:  # workspaces are those of training
        estimated.learn(opened.device_name, probe.attempts)


@contextlib.contextmanager
def _told_if_busy(observer: Observer) -> Iterator[None]:
    """The answer stands by now: a device that somebody else has filled costs only what was still to be timed."""
    try:
        yield
    except DeviceError as error:
        observer.note(f"no more is timed: {error}")


_NO_ANSWER = dict.fromkeys(("max_batch_size", "first_failing_batch_size", "limited_by", "data_parallel"))
"""What a result lacks whose search found a size that the final check then refused, as it did all others."""


class _Session:
    """What is known so far, so that an error at any moment still leaves a document."""

    def __init__(self, settings: OpenTask, name: str) -> None:
        self.settings, self._name = settings, name
        self._task = TaskInfo(path=settings.task, sha256=file_hash(settings.task))
        self.opened: Opened | None = None  # by the first child
        self.probes: list[Probe] = []
        self.failures: list[tuple[str, BatchtuneError]] = []  # with their precisions
        self._fed: tuple[str, InputPipeline | None] = ("", None)
        self._free_after: int | None = None
        self._beside_child = 0, 0  # free bytes before a child opened, and once it had trained

    def feed(self, worker: Worker, options: ProbeOptions, observer: Observer) -> None:
        """Times the data loader against the fastest precision's steps; it is the same for all of them."""
        fastest = max((probe.result() for probe in self.probes), key=_rank_of)
        found = measure_input_pipeline(worker, fastest, observer, timeout=options.timeout)
        self._fed = (fastest.precision, found)

    def look(self, worker: Worker) -> None:
        """Free memory of an accelerator beside a child that has trained and given its tensors back."""
        opened = worker.opened
        if opened is None or opened.nvml_uuid is None or opened.is_group:
            return
        seen, free = look(opened.nvml_uuid), opened.environment.device_memory_free_bytes
        if seen and seen.free_bytes and free:
            self._beside_child = free, seen.free_bytes

    def look_again(self, worker: Worker) -> None:
        """Free memory of an accelerator now that nothing of ours is there any more, or when the last child opened."""
        first, last = self.opened, worker.opened
        if first is None or last is None or first.device == "cpu" or first.is_group:
            return
        worker.close()
        at_last, uuid = last.environment.device_memory_free_bytes, first.nvml_uuid
        self._free_after = _settled_free_bytes(uuid, first.environment) if uuid else at_last
        opened, beside = self._beside_child
        if self._free_after and opened and abs(opened - self._free_after) <= _SAME_BYTES:
            record(first.device_name, "context_bytes", opened - beside)

    def _environment(self) -> Environment | None:
        if self.opened is None:
            return None
        return self.opened.environment.model_copy(update={"device_memory_free_after_bytes": self._free_after})

    def _results(self) -> list[ProbeResult]:
        precision, fed = self._fed
        failed = {name for name, _ in self.failures}
        results = [
            each.model_copy(update=_NO_ANSWER) if each.precision in failed and _is_refused(each) else each
            for each in (probe.result() for probe in self.probes)
        ]
        return [
            each.model_copy(update={"input_pipeline": fed}) if each.precision == precision else each for each in results
        ]

    def document(
        self, status: Literal["complete", "interrupted", "failed"], error: BatchtuneError | None = None
    ) -> Result:
        results, environment = self._results(), self._environment()
        failed = [f"{precision}: {failure}" for precision, failure in self.failures if failure is not error]
        from_probes = [warning for each in results for warning in each.warnings]
        return Result(
            kind="probe",
            status=status,
            name=self._name,
            environment=environment,
            task=self._task.model_copy(update={"optimizer": self.opened.optimizer or None if self.opened else None}),
            warnings=list(
                dict.fromkeys(
                    [*sharing_warnings(environment), *failed, *from_probes, *allocator_warnings(environment, results)]
                )
            ),
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=max(results, key=_rank_of, default=None),
            probes=results if len(results) > 1 else None,
        )


def _is_refused(probe: ProbeResult) -> bool:
    """Whether a final check was made and nothing passed it."""
    return not probe.verified_in_fresh_process and any(each.purpose == "verify" for each in probe.attempts)


def _rank_of(probe: ProbeResult) -> tuple[bool, bool, float]:
    """What makes a precision stand for the probe: an answer that was checked, any answer, then its best speed."""
    fastest = max((point.samples_per_second for point in probe.throughput), default=0.0)
    return probe.verified_in_fresh_process, probe.max_batch_size is not None, fastest


def _settled_free_bytes(uuid: str, environment: Environment) -> int | None:
    """Free memory once the driver has taken back what our last child had, which may take a moment."""
    before, total = environment.device_memory_free_bytes, environment.device_memory_bytes
    free = None
    for wait in _SETTLING_SECONDS:
        time.sleep(wait)
        seen = look(uuid)
        free = seen.free_bytes if seen else None
        if free is None or before is None or not total or before - free <= MOVED * total:
            break
    return free

"""`batchtune tune` as a function: run folder, probe, study, and the document at every moment in between."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any, Literal, TypeVar

from batchtune.config.schema import Config
from batchtune.document import (
    Attempt,
    Failure,
    Prior,
    ProbeResult,
    Recommendation,
    Scaling,
    TaskInfo,
    Trial,
)
from batchtune.errors import BatchtuneError, NothingFitsError, RunInterrupted, UsageError
from batchtune.files import load_result
from batchtune.observer import Forwarder, Observer
from batchtune.probe.runner import Probe
from batchtune.probe.scaling import time_group
from batchtune.probe.warnings import sharing_warnings
from batchtune.processes.pool import Crew, OneAtATime
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.result import Result
from batchtune.run_folder import ROOT, RunFolder
from batchtune.task.spec import file_hash
from batchtune.tune.objective.cost import SECONDS, cost_of
from batchtune.tune.plan.identity import identity_of
from batchtune.tune.plan.opening import open_task, probe_options, require_executor, worker_settings
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.prepare import prepare
from batchtune.tune.plan.prior import Candidates
from batchtune.tune.plan.steps import with_loading
from batchtune.tune.storage.shared import Agreement, delete_study
from batchtune.tune.storage.storage import open_storage
from batchtune.tune.study.study import TuneStudy
from batchtune.tune.verdict.scaling import can_scale, scaling, split
from batchtune.tune.verdict.warnings import (
    OURS,
    baseline_warnings,
    loading_warnings,
    search_warnings,
    target_warnings,
    uneven_warnings,
)

_CHECKPOINTS = "checkpoints"
_SAVING_SHARE = 0.005  # of the time that trials take may go into writing the document in between; the journal has all
_Kind = TypeVar("_Kind", bound=BaseException)


def run_tune(config: Config, *, fresh: bool, observer: Observer, root: Path = ROOT) -> Result:
    """Runs or resumes the study of a configuration.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    require_executor(config.executor)
    tuning = _Tuning(config, observer, root)
    folder = tuning.folder
    folder.open()
    try:
        if fresh:
            if config.storage is not None:
                delete_study(open_storage(config.storage, folder.path), config.name)
            folder.clear()
            shutil.rmtree(folder.path / _CHECKPOINTS, ignore_errors=True)
        folder.check_identity(identity_of(config))
        if folder.identity() is None:  # nothing but what failed, if anything: it may have been another task's
            folder.forget_attempts()
        else:
            tuning.earlier = _earlier_result(folder)
        folder.write("config.yaml", config.to_yaml())
        return _run(tuning)
    finally:
        folder.close()


def _run(tuning: _Tuning) -> Result:
    where = tuning.folder.path
    try:
        tuning.run()
        return tuning.save("complete")
    except BatchtuneError as error:
        error.result = tuning.save_if_possible("failed", error)
        raise
    except (KeyboardInterrupt, Exception) as error:
        stopped: BatchtuneError
        if _behind(error, KeyboardInterrupt):
            stopped = RunInterrupted(f"interrupted; the same command goes on from here ({where} keeps the trials)")
        elif isinstance(error, OSError | RuntimeError) and (unwritten := _behind(error, OSError)):  # of the journal
            stopped = UsageError(
                f"{where}: the study cannot go on: {unwritten.strerror or unwritten}; make room and start again: the "
                "same command goes on with the trials that are finished"
            )
        else:
            raise
        stopped.result = tuning.save_if_possible(
            "interrupted" if isinstance(stopped, RunInterrupted) else "failed", stopped
        )
        raise stopped from None


def _behind(error: BaseException | None, kind: type[_Kind]) -> _Kind | None:
    """The error of that kind that came first: a lock of Optuna's that is disturbed raises errors of its own on top."""
    found = None
    while error is not None:
        found, error = (error if isinstance(error, kind) else found), error.__context__
    return found


def _earlier_result(folder: RunFolder) -> Result | None:
    """What an earlier start left in the folder.

    Raises:
        UsageError: it cannot be read, being another version's or damaged.
    """
    if not (folder.path / "result.json").exists():
        return None
    try:
        return load_result(folder.path)
    except UsageError as error:
        raise UsageError(f"{error}. Or use --fresh to start over, or another 'name' to keep both") from None


class _Recorder(Forwarder):
    """Keeps attempts and results in the run folder as they come, and hands everything on."""

    def __init__(self, tuning: _Tuning, behind: Observer) -> None:
        super().__init__(behind)
        self._tuning = tuning

    def attempted(self, attempt: Attempt) -> None:
        self._tuning.keep(attempt)
        super().attempted(attempt)

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        self._tuning.save_now_and_then()
        super().trial_ended(trial, done=done, seconds_left=seconds_left)


class _Tuning:
    """One run of `tune`: what is known so far, and the steps that find out more."""

    def __init__(self, config: Config, observer: Observer, root: Path) -> None:
        self._config = config
        self._observer = OneAtATime(_Recorder(self, observer))
        self.folder = RunFolder(config.name, root)
        self._task = TaskInfo(path=config.task, sha256=file_hash(config.task))
        self._opened: Opened | None = None
        self._identity: dict[str, Any] = {}
        self._probe: Probe | None = None
        self._probed: ProbeResult | None = None
        self._prior: Prior | None = None
        self._precision = ""
        self._study: TuneStudy | None = None
        self._scaling: Scaling | None = None
        self.earlier: Result | None = None
        self._save_due = 0.0

    def run(self) -> None:
        """Probe, then study."""
        settings = worker_settings(self._config)
        known = [entry for entry in self.folder.attempts() if isinstance(entry.get("memory_limit_bytes"), int)]
        if known and settings.memory_limit is None:  # what fitted before fitted within that limit
            settings = settings.but(memory_limit=known[0]["memory_limit_bytes"])
        with self._crew(settings) as crew:
            worker = crew.first
            if self._earlier_probe() is None:
                worker.prepare()  # for the probe's final check
            self._opened = opened = open_task(worker, self._config)
            self._identity = identity_of(self._config) | {"the device": opened.device_name}
            self.folder.check_identity(self._identity)  # whatever 'auto' was
            crew.grow(opened)
            if len(crew) > 1:
                self._observer.note(f"{len(crew)} workers{crew.seated}")
            self._precision = opened.precision[0][0]
            for name, reason in opened.precision:
                self._observer.note(f"precision {name}: {reason}")
            storage = open_storage(self._config.storage, self.folder.path)
            agreement = Agreement(storage, self._config, opened.device_name)
            self._join(agreement)
            self._probed = self._probed or self._earlier_probe() or self._run_probe(worker, known)
            self.save("interrupted")
            self._prior = (
                self._prior
                or self._earlier_prior()
                or prepare(self._config, self._probed, opened, worker, self._observer)
            )
            self._probed, self._prior = agreement.settle(self._probed, self._prior)
            self.save("interrupted")
            self._keep_identity()  # of another machine's probe, too
            plan = self._plan(opened, self._probed, self._prior)
            self._study = TuneStudy(plan, worker, storage, self._observer, crew)
            self._study.run()
            shutil.rmtree(self.folder.path / _CHECKPOINTS, ignore_errors=True)  # nobody goes on from them now
        if not any(trial.state in {"complete", "pruned"} for trial in self._study.records()):
            raise NothingFitsError("no trial was usable; see the messages of the trials")
        found = self._study.recommendation()[0]
        if found is None:
            raise NothingFitsError(self._study.why_nothing())
        self._scaling = self._scale(self._study, opened, found)

    def _scale(self, study: TuneStudy, opened: Opened, found: Recommendation) -> Scaling | None:
        """What several ranks would make of the recommendation, once some were timed; see `tune.scaling`."""
        count = self._config.world_size
        if count == "auto":
            is_here = self._config.executor == "local" and not opened.device.startswith("cpu")
            count = opened.device_count if is_here else 1
        probe = self._probed
        if count == 1 or probe is None or not can_scale(found, probe):
            return None
        earlier = self.earlier.recommendation.scaling if self.earlier and self.earlier.recommendation else None
        sizes = split(found.global_batch_size, count, probe.max_batch_size or 1)
        if sizes is None:
            self._observer.note(f"batch {found.global_batch_size} cannot be split among {count} ranks: none was timed")
            return None
        measured = earlier.measured if earlier else None
        if measured is None or (measured.world_size, measured.global_batch_size) != (count, found.global_batch_size):
            self._observer.stage(f"timing {count} ranks")
            kind = opened.device.partition(":")[0]
            settings = worker_settings(self._config).but(device=kind, metric=None)
            measured = time_group(settings, count, *sizes, found.precision, self._observer)
        expected = study.expected() if cost_of(self._config.objective.kind) is SECONDS else None
        return scaling(study.records(), found, probe, measured, expected) if measured else None

    def _crew(self, settings: OpenTask) -> Crew:
        if self._config.executor == "local":
            return Crew(settings, self._config.workers, self._observer)
        from batchtune.processes.ray.pool import RayCrew  # Ray is an extra

        return RayCrew(settings, self._config.workers, self._observer, self._config.ray)

    def _join(self, agreement: Agreement) -> None:
        """Where another machine has begun the study, its probe and its prior are this one's, too."""
        begun = agreement.look()
        if begun is not None:
            self._observer.note(f"study {self._config.name} was begun on another machine or earlier: joining it")
            self._probed, self._prior = begun

    def keep(self, attempt: Attempt) -> None:
        """Adds an attempt to the run folder; the first that fits is something not to be mixed with anything else."""
        if attempt.fits:
            self._keep_identity()
        about = {
            "precision": self._precision,
            "memory_limit_bytes": self._opened.memory_limit_bytes if self._opened else None,
        }
        self.folder.append_attempt(attempt, **about)

    def _keep_identity(self) -> None:
        if not self.folder.identity():
            self.folder.keep_identity(self._identity)

    def save(self, status: Literal["complete", "interrupted", "failed"], error: BatchtuneError | None = None) -> Result:
        """Writes `result.json` as things stand; a start that stops early leaves that of an earlier one alone."""
        result = self._document(status, error)
        earlier = self.earlier
        nothing_new = earlier is not None and (earlier.trials or (earlier.probe and not (self._probed or self._probe)))
        if self._study is None and earlier is not None and nothing_new:
            return earlier.model_copy(update={"status": status, "error": result.error})
        self.folder.write_result(result)
        return result

    def save_now_and_then(self) -> None:
        """Writes `result.json` after a trial, less often where there is so much of it that writing takes long."""
        began = time.perf_counter()
        if began >= self._save_due:
            self.save("interrupted")
            now = time.perf_counter()
            self._save_due = now + (now - began) / _SAVING_SHARE

    def save_if_possible(self, status: Literal["interrupted", "failed"], error: BatchtuneError) -> Result:
        """The document at the end of a run that stops; where it cannot be written, the caller still has it to show."""
        with contextlib.suppress(UsageError):
            return self.save(status, error)
        return self._document(status, error)

    def _earlier_probe(self) -> ProbeResult | None:
        earlier = self.earlier.probe if self.earlier else None
        return earlier if earlier and earlier.verified_in_fresh_process and earlier.throughput else None

    def _earlier_prior(self) -> Prior | None:
        return self.earlier.prior if self.earlier else None

    def _run_probe(self, worker: Worker, known: list[dict[str, Any]]) -> ProbeResult:
        attempts = [
            Attempt.model_validate(entry)
            for entry in known
            if entry.get("precision") == self._precision and entry.get("purpose") == "search"
        ]
        self._probe = Probe(worker, probe_options(self._config), self._precision, self._observer, attempts)
        return self._probe.run()

    def _plan(self, opened: Opened, probe: ProbeResult, prior: Prior) -> Plan:
        return Plan(
            config=self._config,
            probe=with_loading(probe, prior.loader_seconds_per_sample, opened.device),
            candidates=Candidates(tuple(prior.batch_sizes), prior.batch_sizes_reason),
            precisions=[name for name, _ in opened.precision],
            optimizer=opened.optimizer,
            optimizer_defaults=opened.optimizer_defaults,
            prior=prior,
            checkpoints=self.folder.path.resolve() / _CHECKPOINTS,  # the user's code may change the folder
        )

    def _document(self, status: Literal["complete", "interrupted", "failed"], error: BatchtuneError | None) -> Result:
        study, probe = self._study, self._probe
        environment = self._opened.environment if self._opened else None
        trials = study.records() if study else []
        recommendation = baseline = None
        if study is not None:
            recommendation, baseline = study.recommendation()
        if recommendation is not None and self._scaling is not None:
            recommendation = recommendation.model_copy(update={"scaling": self._scaling})
        told = self._warnings(status, trials, recommendation)
        return Result(
            kind="tune",
            status=status,
            name=self._config.name,
            environment=environment,
            task=self._task.model_copy(update={"optimizer": self._opened.optimizer if self._opened else None}),
            warnings=list(dict.fromkeys(sharing_warnings(environment) + told)),
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=self._probed or (probe.result() if probe else None),
            prior=self._prior or (self.earlier.prior if self.earlier else None),
            target=study.target if study else None,
            trials=trials,
            landscape=study.landscape() if study and status == "complete" else None,
            recommendation=recommendation,
            baseline=baseline,
        )

    def _warnings(self, status: str, trials: list[Trial], recommended: Recommendation | None) -> list[str]:
        found = self._probe.warnings() if self._probe else []
        if self._probe is None and self._probed is not None and self.earlier is not None:
            found = [warning for warning in self.earlier.warnings if not warning.startswith(OURS)]
        if self._probed is not None and self._prior is not None and self._opened is not None:
            found += loading_warnings(self._probed, self._prior, self._opened.device)
        if self._probed is not None:
            found += baseline_warnings(self._probed, self._config.baseline.batch_size)
        found += target_warnings(self._study.target if self._study else None)
        found += uneven_warnings(trials, recommended)
        return found + (search_warnings(trials) if status == "complete" else [])

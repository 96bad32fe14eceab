"""The steps of `tune`: open the task, probe it, measure where to start, study, and time ranks where there are some."""

from __future__ import annotations

import time

from batchtune.config.schema import Config
from batchtune.document import Attempt, ProbeResult
from batchtune.errors import NothingFitsError
from batchtune.observer import Observer
from batchtune.probe.runner import Probe
from batchtune.processes.pool import OneAtATime, WorkerPool
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.identity import identity_of
from batchtune.tune.plan.measure_prior import measure_prior
from batchtune.tune.plan.open_task import open_task, probe_options, worker_settings
from batchtune.tune.plan.plan import make_plan
from batchtune.tune.progress import Progress, Recorder
from batchtune.tune.ranks import scale
from batchtune.tune.storage.shared import Agreement
from batchtune.tune.storage.storage import open_storage
from batchtune.tune.study.study import TuneStudy


class Tuning:
    """One start of `tune`.

    Args:
        config: the configuration.
        observer: told of everything.
        progress: what is known already, and what becomes known.
    """

    def __init__(self, config: Config, observer: Observer, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._observer = OneAtATime(Recorder(progress, observer))

    def run(self) -> None:
        """Probe, then study.

        Raises:
            BatchtuneError: it cannot go on; `progress` has what was found until then.
        """
        progress, config, began = self._progress, self._config, time.perf_counter()
        with self._pool() as pool:
            opened = self._open(pool)
            opening_seconds = time.perf_counter() - began
            storage = open_storage(config.storage, progress.folder.path)
            self._prepare(pool.first, opened, Agreement(storage, config, opened.device_name))
            assert progress.probe is not None and progress.prior is not None  # noqa: PT018, S101 - they are prepared
            plan = make_plan(config, opened, progress.probe, progress.prior)
            progress.study = study = TuneStudy(plan, pool, storage, self._observer, opening_seconds=opening_seconds)
            study.run()
        if not any(trial.state in {"complete", "pruned"} for trial in study.records()):
            raise NothingFitsError("no trial was usable; see the messages of the trials")
        found = study.recommendation()[0]
        if found is None:
            raise NothingFitsError(study.why_nothing())
        earlier = progress.earlier.recommendation if progress.earlier else None
        timed = earlier.scaling if earlier else None
        progress.scaling = scale(study, opened, progress.probe, found, timed, self._observer)

    def _pool(self) -> WorkerPool:
        config, settings = self._config, worker_settings(self._config)
        known = self._known_limit()
        if known is not None and settings.memory_limit is None:  # what fitted before fitted within that limit
            settings = settings.but(memory_limit=known)
        if config.executor == "local":
            return WorkerPool(settings, config.workers, self._observer)
        from batchtune.processes.ray.pool import RayPool  # Ray is an extra

        return RayPool(settings, config.workers, self._observer, config.ray)

    def _known_limit(self) -> int | None:
        limits = [entry.get("memory_limit_bytes") for entry in self._progress.folder.attempts()]
        return next((limit for limit in limits if isinstance(limit, int)), None)

    def _open(self, pool: WorkerPool) -> Opened:
        progress = self._progress
        progress.opened = opened = open_task(pool.first, self._config)
        progress.identity = identity_of(self._config) | {"the device": opened.device_name}
        progress.folder.check_identity(progress.identity)  # whatever 'auto' was
        pool.grow(opened)
        if len(pool) > 1:
            self._observer.note(f"{len(pool)} workers{pool.where}")
        for name, reason in opened.precision:
            self._observer.note(f"precision {name}: {reason}")
        return opened

    def _prepare(self, worker: Worker, opened: Opened, agreement: Agreement) -> None:
        """Probe and prior: another machine's where it has begun the study, an earlier start's, or measured now."""
        progress, begun = self._progress, agreement.look()
        if begun is not None:
            self._observer.note(f"study {self._config.name} was begun on another machine or earlier: joining it")
            progress.probe, progress.prior = begun
        progress.probe = progress.probe or progress.earlier_probe() or self._run_probe(worker, opened)
        progress.save("interrupted")
        progress.prior = progress.prior or (progress.earlier.prior if progress.earlier else None)
        if progress.prior is None:
            progress.prior = measure_prior(self._config, progress.probe, opened, worker, self._observer)
        progress.probe, progress.prior = agreement.settle(progress.probe, progress.prior)
        progress.save("interrupted")
        progress.keep_identity()  # of another machine's probe, too

    def _run_probe(self, worker: Worker, opened: Opened) -> ProbeResult:
        precision = opened.precision[0][0]
        known = [
            Attempt.model_validate(entry)
            for entry in self._progress.folder.attempts()
            if isinstance(entry.get("memory_limit_bytes"), int)
            and (entry.get("precision"), entry.get("purpose")) == (precision, "search")
        ]
        options = probe_options(self._config)
        self._progress.probing = Probe(worker, options, precision, self._observer, known)
        return self._progress.probing.run()

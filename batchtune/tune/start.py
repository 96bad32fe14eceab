"""One start of `tune`: the workers, the plan, the study, and what its answer would come to on several ranks."""

from __future__ import annotations

import time

from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.tune.group_runs import train_groups
from batchtune.tune.plan.configure import WarmStart, identity_of
from batchtune.tune.plan.measure_prior import make_plan, measure_prior
from batchtune.tune.plan.open_task import as_probed, grow, open_pool, open_task, or_in_fp32
from batchtune.tune.plan.study_probe import study_probe
from batchtune.tune.progress import Progress
from batchtune.tune.scaling import scale
from batchtune.tune.study.budget import ProbeInTime, outlook_at_start
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import Agreement, delete_study, open_storage


def run_study(progress: Progress, observer: Observer, warm_start: WarmStart | None, *, fresh: bool) -> None:
    """Probe, then study, by what `progress` knows already; a fresh one takes the place of that in the storage.

    Raises:
        BatchtuneError: it cannot go on; `progress` has what was found until then.
    """
    config = progress.config
    with open_pool(config, observer, progress.folder.attempts()) as pool:
        progress.opened = opened = open_task(pool.first, config)
        progress.identity = identity_of(config) | {"the device": opened.environment.device}
        progress.folder.check_identity(progress.identity)  # whatever 'auto' was
        grow(pool, opened, observer)
        opening_seconds = time.perf_counter() - progress.began
        if progress.earlier is None and config.budget.given_total is not None:
            schedule = opened.optimizer_settings.scheduler is not None
            told = outlook_at_start(config, len(pool), opening_seconds, has_schedule=schedule)
            observer.announce(told)
        for told in progress.said_first():
            observer.announce(told)
        storage = open_storage(config.storage, progress.folder.path)
        if fresh and config.storage is not None:
            delete_study(storage, config.name)
        _probe_and_measure(progress, pool, Agreement(storage, config, opened.environment.device), observer, warm_start)
        probe, prior, opened = progress.probe, progress.prior, progress.opened
        assert probe is not None and prior is not None  # noqa: PT018, S101 - they are known by now
        plan = make_plan(config, opened, probe, prior)
        progress.study = study = TuneStudy(plan, pool, storage, observer, opening_seconds=opening_seconds)
        study.run()
    earlier = progress.earlier and progress.earlier.recommendation
    timed = earlier.scaling if earlier else None
    progress.scaling = scale(study, opened, probe, study.answer(), timed)
    if progress.scaling is not None and config.ranks.per_trial == "auto":
        kind = opened.device.partition(":")[0]
        progress.scaling = train_groups(study, progress.scaling, timed, kind, observer)


def _probe_and_measure(
    progress: Progress, pool: WorkerPool, agreement: Agreement, observer: Observer, warm_start: WarmStart | None
) -> None:
    """Probe and prior of another machine where it has begun the study, an earlier start's, or new ones.

    Raises:
        BatchtuneError: nothing fits, or another machine's study is not this one; `progress` has what was found.
    """
    config, opened, worker = progress.config, progress.opened, pool.first
    assert opened is not None  # noqa: S101 - by this worker
    if (begun := agreement.look()) is not None:
        progress.probe, progress.prior = begun
        if config.storage is not None:
            observer.note(f"study {config.name} was begun on another machine or earlier: joining it")
    progress.probe = progress.probe or progress.earlier_probe()
    if progress.probe is None:
        attempts, others = progress.folder.attempts, dict[str, int]()
        how = (worker, ProbeInTime(config, observer, attempts()))
        probe, opened = or_in_fp32(
            lambda task: progress.run(study_probe(config, task, *how, attempts()), task), opened, config, observer
        )
        for variant in config.variants[1:]:
            progress.variant = variant.name
            observer.stage(f"probing {variant.name}")
            other = study_probe(config, opened, worker, observer, attempts(), variant)
            others[variant.name] = other.largest()  # 0 where none fits
        progress.variant, progress.probe = None, probe.model_copy(update={"other_variants": others or None})
    progress.opened = opened = as_probed(opened, progress.probe, config)
    progress.save("interrupted")
    if progress.prior is None and progress.earlier is not None:  # of a version whose studies had none
        progress.prior = progress.earlier.prior
    if progress.prior is None:
        progress.prior = measure_prior(config, progress.probe, opened, worker, observer, warm_start)
    elif warm_start is not None:
        observer.note(f"--warm-start {warm_start.run}: not used, as the study goes on from where it was")
    progress.probe, progress.prior = agreement.settle(progress.probe, progress.prior)
    progress.save("interrupted")
    progress.keep_identity()  # of another machine's probe, too

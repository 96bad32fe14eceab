"""One start of `tune`: the workers, the plan, the study, and what its answer would come to on several ranks."""

from __future__ import annotations

import time

from batchtune.observer import Observer
from batchtune.tune.group_runs import train_groups
from batchtune.tune.plan.configure import WarmStart, identity_of
from batchtune.tune.plan.open_task import grow, open_pool, open_task
from batchtune.tune.plan_study import plan_study
from batchtune.tune.progress import Progress
from batchtune.tune.scaling import scale
from batchtune.tune.study.budget import outlook_at_start
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
        for told in config.objective.warnings():
            observer.announce(told)
        storage = open_storage(config.storage, progress.folder.path)
        if fresh and config.storage is not None:
            delete_study(storage, config.name)
        agreement = Agreement(storage, config, opened.environment.device)
        plan = plan_study(progress, pool.first, opened, agreement, observer, warm_start)
        progress.study = study = TuneStudy(plan, pool, storage, observer, opening_seconds=opening_seconds)
        study.run()
    assert progress.probe is not None  # noqa: S101 - it is planned by
    earlier = progress.earlier and progress.earlier.recommendation
    timed = earlier.scaling if earlier else None
    progress.scaling = scale(study, opened, progress.probe, study.answer(), timed)
    if progress.scaling is not None and config.ranks.per_trial == "auto":
        kind = opened.device.partition(":")[0]
        progress.scaling = train_groups(study, progress.scaling, timed, kind, observer)

"""Probe and prior of a study, and the plan that comes of them."""

from __future__ import annotations

from batchtune.observer import Observer
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.configure import WarmStart
from batchtune.tune.plan.measure_prior import make_plan, measure_prior
from batchtune.tune.plan.space import Plan
from batchtune.tune.plan.study_probe import study_probe
from batchtune.tune.plan.tokens import in_samples, prior_in_tokens
from batchtune.tune.progress import Progress
from batchtune.tune.study.budget import ProbeInTime
from batchtune.tune.study.storage import Agreement


def plan_study(
    progress: Progress,
    worker: Worker,
    opened: Opened,
    agreement: Agreement,
    observer: Observer,
    warm_start: WarmStart | None,
) -> Plan:
    """The plan by another machine's probe and prior where it has begun the study, an earlier start's, or by new ones.

    Raises:
        BatchtuneError: nothing fits, or another machine's study is not this one; `progress` has what was found.
    """
    config = progress.config
    if (begun := agreement.look()) is not None:
        progress.probe, progress.prior = begun
        if config.storage is not None:
            observer.note(f"study {config.name} was begun on another machine or earlier: joining it")
    progress.probe = progress.probe or progress.earlier_probe()
    if progress.probe is None:
        told = ProbeInTime(config, observer, progress.folder.attempts())
        progress.probing = study_probe(config, opened, worker, told, progress.folder.attempts())
        probe, others = progress.probing.run(), dict[str, int]()
        for variant in config.variants[1:]:
            progress.variant = variant.name
            observer.stage(f"probing {variant.name}")
            other = study_probe(config, opened, worker, observer, progress.folder.attempts(), variant)
            others[variant.name] = other.largest()  # 0 where none fits
        progress.variant, progress.probe = None, probe.model_copy(update={"other_variants": others or None})
    progress.save("interrupted")
    if progress.prior is None and progress.earlier is not None:  # of a version whose studies had none
        progress.prior = progress.earlier.prior
    if progress.prior is None:
        measured = measure_prior(in_samples(config), progress.probe, opened, worker, observer, warm_start)
        progress.prior = prior_in_tokens(config, progress.probe, opened, measured)
    elif warm_start is not None:
        observer.note(f"--warm-start {warm_start.run}: not used, as the study goes on from where it was")
    probe, prior = progress.probe, progress.prior = agreement.settle(progress.probe, progress.prior)
    progress.save("interrupted")
    progress.keep_identity()  # of another machine's probe, too
    return make_plan(config, opened, probe, prior)

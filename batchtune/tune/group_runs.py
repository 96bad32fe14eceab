"""Groups of ranks that train the answer to the target, so that its time on several devices is no estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from batchtune.document import Scaling, ScalingPoint, Trial, config_of
from batchtune.errors import BatchtuneError
from batchtune.observer import Observer
from batchtune.processes.ranks import RankLauncher
from batchtune.processes.worker import Worker
from batchtune.protocol.messages import Json
from batchtune.tune.plan.open_task import worker_settings
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.targets import measured
from batchtune.tune.study.trials import run_trial
from batchtune.tune.verdict.scores import JOULES, SECONDS, median_interval

MOST_SEEDS = 3
_PATIENCE = 5.0  # times the estimate, after which a group has not reached the target


def train_groups(study: TuneStudy, found: Scaling, earlier: Scaling | None, kind: str, observer: Observer) -> Scaling:
    """The same with times that were measured on as many ranks as there are devices of this kind, where they can be.

    What an earlier start has measured is not trained again.
    """
    trained = [point for point in earlier.points if not point.is_estimate] if earlier else []
    known = {(point.world_size, config_of(point)): point for point in trained}
    points = []
    for point in found.points:
        if point.is_estimate and point.world_size <= found.measured.world_size:
            before = known.get((point.world_size, config_of(point)))
            points.append(before or _trained(study, point, kind, observer))
        else:
            points.append(point)
    return found.model_copy(update={"points": points})


def _trained(study: TuneStudy, point: ScalingPoint, kind: str, observer: Observer) -> ScalingPoint:
    """The point as so many ranks train it, on the seeds that one trained it with; as it was where they cannot."""
    observer.stage(f"training on {point.world_size} ranks")
    same = [trial for trial in study.records() if config_of(trial) == config_of(point)]
    runs = []
    try:
        runs = list(_runs(study, point, same, kind, observer))
    except BatchtuneError as error:
        observer.note(f"{point.world_size} ranks did not train to the target: {error}")
    times = [run[SECONDS.attribute] for run in runs if SECONDS.attribute in run]
    if 2 * len(times) <= len(runs):
        observer.note(f"the time on {point.world_size} ranks stays an estimate")
        return point
    joules = [run[JOULES.attribute] for run in runs if JOULES.attribute in run]
    changes = {
        "time_to_target_seconds": median_interval(times),
        "energy_to_target_joules": median_interval(joules) if len(joules) == len(times) else None,
        "is_estimate": False,
        "estimated_seconds": point.time_to_target_seconds.median,
    }
    return point.model_copy(update=changes)


def _runs(study: TuneStudy, point: ScalingPoint, same: list[Trial], kind: str, observer: Observer) -> Iterator[Json]:
    parts = study.parts
    config, params = parts.plan.config, parts.space.of(same[0])
    fresh = list(dict.fromkeys(trial.seed for trial in same if trial.role == "confirm"))
    settings = worker_settings(config).but(device=kind, metric=None)
    with Worker(settings, RankLauncher(point.world_size, "ddp", observer.printed)) as group:
        for seed in fresh[:MOST_SEEDS] or [config.seed]:
            spec = replace(
                parts.limits.spec(params, "confirm", seed),
                micro_batch_size=point.micro_batch_size,
                accumulation_steps=point.gradient_accumulation_steps,
                world_size=point.world_size,
                limit_seconds=_PATIENCE * point.time_to_target_seconds.high,
                most_step_seconds=None,
            )
            run = run_trial(group, spec, lambda _: True, tolerant=True)
            if run.failure is not None:
                observer.note(f"a run on {point.world_size} ranks: {run.failure}")
            yield measured(run.curve, run.outcome, study.target)

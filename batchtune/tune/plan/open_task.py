"""The task of a study: how it is opened, what of it cannot be tuned as asked, and the workers that train it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchtune.config.schema import Config
from batchtune.document import ProbeResult
from batchtune.errors import DeviceError, HalfPrecisionError, UsageError, fp32_instead, kind_of
from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.tune.plan.space import argument_distributions, clipping_distribution
from batchtune.tune.plan.tokens import in_samples, require_tokens
from batchtune.vocabulary import Executor


def require_executor(executor: Executor) -> None:
    """Refuses an executor that is not installed.

    Raises:
        UsageError: with the command that installs it.
    """
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError('executor ray: Ray is not installed; run: pip install "batchtune-cli[ray]"')


def check(config: Config, observer: Observer) -> dict[str, object]:
    """Opens the task as `tune` would and trains nothing: the facts that a dry run shows."""
    if not isinstance(config, Config):
        raise UsageError(f"the configuration is {kind_of(config)}; it must be a batchtune.config.schema.Config")
    require_executor(config.executor)
    if config.storage is not None:
        from batchtune.tune.optuna_parts.storages import reach  # with Optuna, which takes a while

        reach(config.storage)
    workers = config.workers if config.executor == "local" else 1  # a cluster's are counted there
    with WorkerPool(worker_settings(config), workers, observer, config.ranks) as pool:
        opened = open_task(pool.first, config)
        pool.grow(opened)
        return opened.model_dump(exclude_unset=True)


def open_pool(config: Config, observer: Observer, attempts: Iterable[Mapping[str, object]]) -> WorkerPool:
    """The workers of a study; within the memory limit of earlier starts' attempts, since what fitted did so in that."""
    settings = worker_settings(config)
    limits = [entry.get("memory_limit_bytes") for entry in attempts]
    known = next((limit for limit in limits if isinstance(limit, int)), None)
    if known is not None and settings.memory_limit is None:
        settings = settings.but(memory_limit=known)
    if config.executor == "local":
        return WorkerPool(settings, config.workers, observer, config.ranks)
    from batchtune.processes.ray_pool import RayPool  # Ray is an extra

    return RayPool(settings, config.workers, observer, config.ray, config.ranks)


def start_worker(worker: Worker) -> Opened:
    """What the child says of the task; errors name settings as the configuration does."""
    try:
        return worker.start()
    except (DeviceError, UsageError) as error:
        raise error.in_configuration() from None


def open_task(worker: Worker, config: Config) -> Opened:
    """What the child says of the task, if it can be tuned as asked.

    Raises:
        BatchtuneError: it cannot, or the device or the code is of no use; settings are named as the configuration does.
    """
    try:
        opened = start_worker(worker)
    except UsageError as error:
        raise UsageError(config.objective.as_typed(str(error))) from None
    require(config, opened)
    return opened


def or_in_fp32(
    probe: Callable[[Opened], ProbeResult], opened: Opened, config: Config, observer: Observer
) -> tuple[ProbeResult, Opened]:
    """What a probe of the task comes to, and the task as that was opened for it.

    In fp32 where the task does not train in a half precision that nobody asked for; the probe's first warning says so.
    """
    try:
        return probe(opened), opened
    except HalfPrecisionError as error:
        if config.precision != "auto":
            raise
        opened = opened.in_fp32(fp32_instead(opened.precision[0][0], str(error)))
    ((precision, reason),) = opened.precision
    observer.note(f"precision {precision}: {reason}")
    found = probe(opened)
    return found.model_copy(update={"warnings": [opened.instead, *found.warnings]}), opened


def as_probed(opened: Opened, probe: ProbeResult, config: Config) -> Opened:
    """The task in the precision that it was probed in, which an earlier start or another machine may have found."""
    if config.precision != "auto" or probe.precision == opened.precision[0][0]:
        return opened
    return opened.in_fp32(probe.warnings[0])


def grow(pool: WorkerPool, opened: Opened, observer: Observer) -> None:
    """Adds the other workers to the first one, which has opened the task, and tells what all of them train on."""
    pool.grow(opened)
    if len(pool) > 1:
        observer.note(f"{len(pool)} workers{pool.where}")
    if opened.world_size > 1:
        ranks = f"{opened.world_size} ranks with {opened.strategy} ({opened.backend})"
        observer.note(f"each run trains on {ranks}: batch sizes are of all ranks together")
    for name, reason in opened.precision:
        observer.note(f"precision {name}: {reason}")


def require(config: Config, opened: Opened) -> None:
    """Refuses what this task or this device cannot do, before anything runs.

    Raises:
        DeviceError: the objective is energy, and the device does not count it.
        UsageError: an argument under `space` cannot be searched as asked, or the data set is smaller than the batch.
    """
    if config.objective.kind == "energy_to_target" and not opened.counts_energy:
        raise DeviceError(
            f"objective.kind energy_to_target: {opened.environment.device} has no energy counter that NVML reads; "
            "use time_to_target, or an NVIDIA GPU from Volta on"
        )
    require_tokens(config, opened)
    argument_distributions(config, opened.optimizer_defaults)
    if config.gradient_clipping is not None and config.gradient_clipping.searched is not None:
        clipping_distribution(config, opened.gradient_clipping)
    data_size, base = opened.train_size, config.baseline.batch_size
    if data_size is not None and base > data_size:
        key = "baseline.batch_size" if config.batch_size.global_ is None else "batch_size.global"
        raise UsageError(f"{key} {base:,} is more than the {data_size:,} samples of train_dataset")
    sizes, unit = in_samples(config).batch_size, multiple_of(config)
    least = -(-sizes.min // unit) * unit
    if data_size is not None and least > data_size:
        multiple = f"multiple_of {unit}: {least}, the least multiple from min {sizes.min} on,"
        multiple = multiple if sizes.multiple_of != "auto" else f"min {sizes.min}: {least}, the least for all ranks,"
        which = multiple if unit > 1 else f"min {least}"
        raise UsageError(f"batch_size.{which} is more than the {data_size:,} samples of train_dataset")


def multiple_of(config: Config) -> int:
    """Only multiples of this are batch sizes, which all ranks can share."""
    unit = config.batch_size.multiple_of
    return math.lcm(config.ranks.of_each, 1 if unit == "auto" else unit)


def worker_settings(config: Config) -> OpenTask:
    """What every worker of the study opens."""
    precision = [config.precision] if isinstance(config.precision, str) else config.precision
    return OpenTask(
        task=config.task,
        device=config.device,
        purpose="tune",
        memory_limit=config.memory.limit,
        margin=config.memory.margin,
        precision=tuple(precision),
        lengths="auto" if config.batch_size.unit == "tokens" else None,
        optimizer_arguments=tuple(config.space),
        gradient_clipping=config.gradient_clipping.fixed if config.gradient_clipping else None,
        activation_checkpointing=config.variants[0].activation_checkpointing,
        metric=config.objective.metric,
        goal=config.objective.goal,
        asks_for_current_settings=bool(config.baseline.defaults),
        strategies=tuple(config.ranks.strategies),
    )


def verdict(config: Config, facts: Mapping[str, Any]) -> list[str]:
    """What a dry run has found, in sentences; `facts` are as `check` returns them."""
    samples, device = facts.get("train_size"), facts.get("device", config.device)
    data = f"{samples:,} training samples" if samples else "training data of unknown size"
    precisions = ", ".join(name for name, _ in facts.get("precision", ()))
    base, sizes, rates = config.baseline, config.batch_size, config.learning_rate
    if config.ranks.of_each > 1:
        nodes = f" of {config.ranks.nodes} machines" if config.ranks.nodes > 1 else ""
        ways = " or ".join(config.ranks.strategies)
        device = f"{config.ranks.of_each} ranks ({ways}) on {device.partition(':')[0]}{nodes}"
    told = [f"nothing is wrong, and nothing was trained: {config.task} on {device} at {precisions}, {data}"]
    if sizes.max != "auto" and not sizes.min <= base.batch_size <= sizes.max:
        size = f"baseline.batch_size {base.batch_size:,}"
        told.append(f"{size} is outside of batch_size: it is measured, and not searched")
    if {"min", "max"} & rates.model_fields_set and not rates.min <= base.learning_rate <= rates.max:
        rate = f"baseline.learning_rate {base.learning_rate:g}"
        told.append(f"{rate} is outside of learning_rate: it is measured, and not searched")
    return [*told, *config.objective.warnings(), *facts.get("notes", ())]

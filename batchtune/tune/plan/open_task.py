"""What a study's configuration says of how its task is opened and probed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from batchtune.config.schema import Config, Parameter
from batchtune.errors import DeviceError, UsageError
from batchtune.observer import Observer
from batchtune.probe.options import ProbeOptions
from batchtune.probe.timing.throughput import MAX_POINTS, SECONDS_PER_POINT
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import LONG_SILENCE_SECONDS, Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.tune.plan.measure_prior import require

USEFUL_FACTOR = 8  # of the baseline's batch: probed up to there however slow the machine is at the moment
MIN_STEPS = 100  # in budget.run; a batch so large that fewer fit would not get far in it
VERIFY_SHARE, TIMING_SHARE = 0.005, 0.005  # of budget.total, for the final check and for timing steps
MAX_EVALUATION_BATCH = 1024  # samples in a forward pass of the default evaluation
_LEAST_TIMING_SECONDS = 0.1  # of each size


def require_executor(executor: Literal["local", "ray"]) -> None:
    """Refuses an executor that is not installed.

    Raises:
        UsageError: with the command that installs it.
    """
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError('executor ray: Ray is not installed; run: pip install "batchtune-cli[ray]"')


def check(config: Config, observer: Observer) -> dict[str, Any]:
    """Opens the task as `tune` would and trains nothing: the facts that a dry run shows."""
    require_executor(config.executor)
    with Worker(worker_settings(config), LocalLauncher(observer.printed)) as worker:
        return open_task(worker, config).model_dump(exclude_unset=True)


def open_task(worker: Worker, config: Config) -> Opened:
    """What the child says of the task, if it can be tuned as asked.

    Raises:
        BatchtuneError: it cannot, or the device or the code is of no use; settings are named as the configuration does.
    """
    try:
        opened = worker.start()
    except (DeviceError, UsageError) as error:
        raise error.in_configuration() from None
    require(config, opened)
    return opened


def worker_settings(config: Config) -> OpenTask:
    """What every worker of the study opens."""
    clipping = config.gradient_clipping
    precision = [config.precision] if isinstance(config.precision, str) else config.precision
    return OpenTask(
        task=config.task,
        device=config.device,
        purpose="tune",
        memory_limit=config.memory.limit,
        margin=config.memory.margin,
        precision=tuple(precision),
        optimizer_arguments=tuple(config.space),
        gradient_clipping=clipping.of(clipping.given)
        if clipping and not isinstance(clipping.given, Parameter)
        else None,
        metric=config.objective.metric,
    )


def probe_options(config: Config) -> ProbeOptions:
    """How the study's probe searches, with a small share of its time: what it recommends has trained for longer."""
    sizes, total = config.batch_size, config.budget.total
    unit = 1 if sizes.multiple_of == "auto" else sizes.multiple_of
    return ProbeOptions(
        minimum=unit,
        maximum=sizes.global_ or (None if sizes.max == "auto" else sizes.max),
        multiple_of=unit,
        verify_timeout=LONG_SILENCE_SECONDS,
        max_step_seconds=config.budget.run / MIN_STEPS,
        useful_size=USEFUL_FACTOR * config.baseline.batch_size,
        evaluation_batch_size=MAX_EVALUATION_BATCH,
        verify_seconds=VERIFY_SHARE * total,
        timing_seconds=min(max(TIMING_SHARE * total / MAX_POINTS, _LEAST_TIMING_SECONDS), SECONDS_PER_POINT),
        flops=False,
    )


def verdict(config: Config, facts: Mapping[str, Any]) -> list[str]:
    """What a dry run has found, in sentences.

    Args:
        config: the configuration.
        facts: as `check` returns them.
    """
    samples, device = facts.get("train_size"), facts.get("device", config.device)
    data = f"{samples:,} training samples" if samples else "training data of unknown size"
    precisions = ", ".join(name for name, _ in facts.get("precision", ()))
    today, sizes, rates = config.baseline, config.batch_size, config.learning_rate
    told = [f"nothing is wrong, and nothing was trained: {config.task} on {device} at {precisions}, {data}"]
    if sizes.max != "auto" and not sizes.min <= today.batch_size <= sizes.max:
        size = f"baseline.batch_size {today.batch_size}"
        told.append(f"{size} is outside of batch_size: it is measured, and not searched")
    if {"min", "max"} & rates.model_fields_set and not rates.min <= today.learning_rate <= rates.max:
        rate = f"baseline.learning_rate {today.learning_rate:g}"
        told.append(f"{rate} is outside of learning_rate: it is measured, and not searched")
    return told

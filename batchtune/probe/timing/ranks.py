"""What training on several ranks comes to: who limited it, and a step with communication, without, and of one alone."""

from __future__ import annotations

from batchtune.document import Attempt, DataParallel
from batchtune.errors import BatchtuneError, UserCodeError
from batchtune.observer import Observer
from batchtune.probe.timing.throughput import SECONDS_PER_POINT
from batchtune.processes.ranks.group import RankLauncher
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened, OpenTask, TimeSteps

TIMEOUT_SECONDS = 120.0  # without a sign of life

Times = dict[str, float | None]


def measure_times(worker: Worker, observer: Observer, command: TimeSteps, timeout: float) -> Times:
    """Seconds of an optimizer step by name, as `data_parallel` takes them; None for what could not be measured.

    Args:
        worker: the group.
        observer: told what could not be measured.
        command: of all three: batch size, precision, …
        timeout: seconds without a sign of life after which it ends.
    """

    def seconds(what: str, **how: bool) -> float | None:
        try:
            return worker.call(command.but(**how), timeout=timeout).step_seconds
        except (WorkerDied, UserCodeError) as error:  # a sharded model may not fit on one rank
            observer.note(f"no step time {what}: {error}")
            return None

    return {
        "together": seconds("of the group"),
        "apart": seconds("without communication", communicate=False),
        "alone": seconds("of one rank alone", communicate=False, first_rank_alone=True),
    }


def time_group(
    settings: OpenTask,
    world_size: int,
    batch_size: int,
    accumulation_steps: int,
    precision: str,
    observer: Observer,
) -> DataParallel | None:
    """The record of ranks that are started to be timed and nothing else; None where they could not be.

    Args:
        settings: of a child alone; its device names a kind.
        world_size: number of ranks.
        batch_size: micro-batch size of each.
        accumulation_steps: micro-batches of one optimizer step.
        precision: one of those of `settings`.
        observer: told what could not be measured.
    """
    with Worker(settings, RankLauncher(world_size, "ddp", observer.printed)) as group:
        try:
            opened = group.start()
        except BatchtuneError as error:
            observer.note(f"no step times of {world_size} ranks: {error}")
            return None
        command = TimeSteps(
            batch_size=batch_size,
            precision=precision,
            seconds=SECONDS_PER_POINT,
            accumulation_steps=accumulation_steps,
        )
        times = measure_times(group, observer, command, TIMEOUT_SECONDS)
    return data_parallel(opened, batch_size, accumulation_steps, None, times) if times["together"] else None


def data_parallel(
    opened: Opened, batch_size: int, accumulation_steps: int, failure: Attempt | None, times: Times
) -> DataParallel | None:
    """The record of a group; None for a child alone.

    Args:
        opened: what the group said of the task.
        batch_size: the largest micro-batch size.
        accumulation_steps: micro-batches of one optimizer step.
        failure: the last attempt at the smallest size above it that failed.
        times: what `measure_times` found, or nothing: `together` with all ranks training as one, `apart` at the same
            time each on its own, `alone` with the first rank only.
    """
    world_size = opened.world_size
    if opened.strategy is None or opened.backend is None:
        return None
    together, apart, alone = (times.get(name) for name in ("together", "apart", "alone"))
    overhead = together - apart if together and apart and together > apart else None  # else it is lost in the noise
    global_batch_size = batch_size * accumulation_steps * world_size
    return DataParallel(
        world_size=world_size,
        strategy=opened.strategy,
        backend=opened.backend,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        limiting_rank=failure.limiting_rank if failure else None,
        step_seconds=together,
        step_seconds_without_communication=apart,
        step_seconds_alone=alone,
        communication_seconds=overhead,
        communication_share=overhead / together if overhead and together else None,
        scaling_efficiency=alone / together if alone and together else None,
        samples_per_second=global_batch_size / together if together else None,
    )

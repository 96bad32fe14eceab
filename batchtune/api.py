"""The public functions: each does what the command of its name does and returns the same result document."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from batchtune.config import checks, options

if TYPE_CHECKING:
    from batchtune.config import schema
    from batchtune.observer import Observer
    from batchtune.result import Result

Step = TypeVar("Step", bound=Callable[[int], object])


@options.takes_options
def probe(  # noqa: D417 - takes_options adds them
    task: str | os.PathLike[str],
    *,
    precision: options.Precision = "auto",
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = options.MARGIN,
    min: options.Minimum = 1,  # noqa: A002 - the option's name
    max: options.Maximum = None,  # noqa: A002 - the option's name
    multiple_of: options.MultipleOf = 1,
    steps: options.Steps = options.STEPS,
    device: options.Device = "auto",
    tolerance: options.Tolerance = options.TOLERANCE,
    timeout: options.Timeout = options.TIMEOUT,
    verify_steps: options.VerifySteps = options.VERIFY_STEPS,
    no_oom: options.NoOom = False,
    throughput: options.Throughput = True,
    accumulation: options.OwnAccumulation = None,
    nproc_per_node: options.Ranks = 1,
    strategy: options.Strategy = "ddp",
    inference: options.Inference = False,
    lengths: options.Lengths = None,
    observer: Observer | None = None,
    run_folders: str | os.PathLike[str] | None = None,
) -> Result:
    """Finds the largest micro-batch that really trains within the device's memory.

    Args:
        task: `model.py`, `path.py:attribute` or `package.module:attribute`.
        (options)
        observer: told of what happens on the way.
        run_folders: keep attempts and result in a folder of this folder; None: keep nothing on disk.

    Returns:
        The result document; `result.probe.max_batch_size` is the answer, `result.probe.lengths` that of each length.

    Raises:
        batchtune.errors.BatchtuneError: its class says whose fault it is; `error.result` holds what was measured.
    """
    from batchtune.config.probe import ProbeOptions
    from batchtune.probe.run import probe_task
    from batchtune.report.live import usual_observer

    how: dict[str, Any] = {"device": device, "memory_limit": memory_limit, "margin": margin, "precision": precision}
    how |= {"lengths": lengths, "inference": inference, "world_size": nproc_per_node, "strategy": strategy}
    search = ProbeOptions(
        minimum=min,
        maximum=max,
        multiple_of=multiple_of,
        steps=steps,
        tolerance=tolerance,
        timeout=float(timeout),
        verify_steps=verify_steps,
        no_oom=no_oom,
        throughput=throughput,
        accumulation_steps=accumulation or 0,
        lengths=how.pop("lengths"),
    )
    kept = None if run_folders is None else checks.text("run_folders", run_folders)
    return probe_task(task, search, observer=observer or usual_observer(), run_folders=kept, **how)


@overload
def find_batch_size(step: Callable[[int], object], **given: Any) -> int: ...
@overload
def find_batch_size(**given: Any) -> Callable[[Step], Step]: ...
@options.takes_options  # type: ignore[misc]
def find_batch_size(  # noqa: D417 - takes_options adds them
    step: Step | None = None,
    *,
    device: options.Device = "auto",
    memory_limit: options.MemoryLimit = None,
    margin: options.Margin = options.MARGIN,
    min: options.Minimum = 1,  # noqa: A002 - the option's name
    max: options.Maximum = None,  # noqa: A002 - the option's name
    multiple_of: options.MultipleOf = 1,
    steps: options.Steps = options.STEPS,
    tolerance: options.Tolerance = options.TOLERANCE,
    no_oom: options.NoOom = False,
    inference: options.Inference = False,
    restore: object = "auto",
    observer: Observer | None = None,
) -> int | Callable[[Step], Step]:
    """Finds the largest batch size at which a training step of yours runs, within your own script and process.

        def step(batch_size):
            optimizer.zero_grad()
            loss_of(model, worst_case_batch(batch_size)).backward()
            optimizer.step()

        batch_size = batchtune.find_batch_size(step, max=4096)

    What `step` uses of models, optimizers, schedules and scalers gets its state and gradients back, and so do random
    numbers: training after the search is training without it. The first line of progress says what was found; name what
    a step reaches on other ways: `restore=(model, optimizer)`.

    With options alone it decorates a step, which stays as it is and has the answer as an attribute:

        @batchtune.find_batch_size(max=4096)
        def step(batch_size): ...

        train(step.batch_size)

    Make the batch anew in each call, and keep no reference to it, to the loss or to a gradient outside of `step`. With
    `inference=True` a step is a forward pass, which runs under `torch.inference_mode`; put the model in eval mode.

    The search is that of `probe`, and so are its outcomes; the size returned has run last, after all that failed, for
    20 steps. Unlike `probe` it shares this process: a crash or a hang ends your script, and a failed CUDA kernel cannot
    be got over. A limit on the CPU's memory counts what comes on top of the process as it stands, what is imported for
    the search (some 15 MiB) included. A fifth of the rest is kept free, since later steps may take that much more, and
    sizes are told apart no finer than 5 %. It holds for the whole process (on Linux, as a limit on its address space)
    and is lifted before this returns.

    Args:
        step: does one whole training step, optimizer included, at the batch size it is given.
        (options)
        restore: what gets its first state back: something with `state_dict()`, or several; `auto`: what `step` uses;
            None: nothing, the steps have trained.
        observer: told of what happens on the way; None: it is printed on stderr.

    Returns:
        The batch size; `step` ran at it. Without a step, what decorates one.

    Raises:
        batchtune.errors.NothingFitsError: no size runs.
        batchtune.errors.DeviceError: no such device, or a failed kernel has left it unusable for this process.
        batchtune.errors.UsageError: an argument cannot be used as given.
        Exception: what `step` raised, where it raises it at every size.
    """
    from batchtune.device.host import resident_bytes

    held_before = resident_bytes()  # for what is imported now is of the search, and stays
    from batchtune.config.probe import Bounds
    from batchtune.probe.in_process import find_in_process

    bounds = Bounds(minimum=min, maximum=max, multiple_of=multiple_of, tolerance=tolerance, no_oom=no_oom)
    how: dict[str, Any] = {"memory_limit": memory_limit, "margin": margin, "steps": steps, "restore": restore}
    how |= {"device": device, "inference": inference, "observer": observer}

    def find(step: Step, held_before: int) -> int:
        with options.asked_by_call(find_batch_size):  # where it decorates, this runs after it has returned
            return find_in_process(step, bounds, held_before=held_before, **how)

    def decorate(step: Step) -> Step:
        step.batch_size = find(step, resident_bytes())  # type: ignore[attr-defined]
        return step

    return decorate if step is None else find(step, held_before)


@options.takes_options
def estimate(  # noqa: D417 - takes_options adds them
    task: str | os.PathLike[str],
    *,
    gpus: options.Gpus = "all",
    precision: options.Precision = "auto",
    memory_limit: options.MemoryLimit = None,
    accumulation_steps: options.Accumulation = 1,
    strategy: options.Strategy = "ddp",
    world_size: options.WorldSize = 1,
    inference: options.Inference = False,
    lengths: options.Lengths = None,
    timeout: options.TraceTimeout = options.TRACE_TIMEOUT,
    observer: Observer | None = None,
) -> Result:
    """Calculates the largest micro-batch on each GPU from a trace of the training step, with no GPU at hand.

    Args:
        task: `model.py`, `path.py:attribute` or `package.module:attribute`.
        (options)
        observer: told of what happens on the way.

    Returns:
        The result document; `result.estimates` has a row for each GPU and precision, each with its confidence.

    Raises:
        batchtune.errors.NothingFitsError: not even a batch of 1 on any of the GPUs, or nothing could be estimated;
            `error.result` has the rows, with what would make it fit, or why not.
        batchtune.errors.BatchtuneError: its class says whose fault it is.
    """
    from batchtune.estimate.run import run_estimate
    from batchtune.report.live import usual_observer

    how: dict[str, Any] = {"memory_limit": memory_limit, "timeout": timeout, "accumulation_steps": accumulation_steps}
    how |= {"strategy": strategy, "world_size": world_size, "inference": inference, "lengths": lengths}
    return run_estimate(task, gpus, precision, observer=observer or usual_observer(), **how)


@options.takes_options
def tune(  # noqa: D417 - takes_options adds them
    config: str | os.PathLike[str] | schema.Config,
    *,
    batch_size: options.BaselineBatchSize = None,
    lr: options.BaselineRate = None,
    budget: options.TotalTime = None,
    target: options.Solved = None,
    ranks: options.RanksOfRuns = None,
    strategy: options.StrategyOfRuns = None,
    workers: options.Workers = None,
    storage: options.StorageOfRuns = None,
    executor: options.Executor = None,
    ray_address: options.RayAddress = None,
    warm_start: options.WarmStart = None,
    save_config: options.SaveConfig = None,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    observer: Observer | None = None,
    run_folders: str | os.PathLike[str] = ".batchtune",
) -> Result:
    """Finds the batch size and learning rate that reach the target soonest, and confirms them against the baseline.

    Args:
        config: a YAML file, a task such as `model.py`, or a `batchtune.config.schema.Config`.
        (options)
        overrides: texts such as `budget.total=5m`, laid over file and options.
        fresh: start over instead of resuming what the run folder holds.
        observer: told of what happens on the way.
        run_folders: the folder that holds one folder for each run.

    Returns:
        The result document; `result.recommendation` is the answer.

    Raises:
        batchtune.errors.BatchtuneError: its class says whose fault it is; `error.result` holds what was measured.
    """
    from batchtune.report.live import usual_observer
    from batchtune.tune.run import configure_and_run

    given: dict[str, object] = {"batch_size": batch_size, "lr": lr, "budget": budget, "target": target}
    given |= {"ranks": ranks, "strategy": strategy, "overrides": overrides}
    given |= {"workers": workers, "storage": storage, "executor": executor, "ray_address": ray_address}
    told, root = observer or usual_observer(), Path(checks.text("run_folders", run_folders))
    return configure_and_run(config, given, save_config, fresh=fresh, observer=told, root=root, warm_start=warm_start)


@options.takes_options
def check(config: schema.Config, *, observer: Observer | None = None) -> dict[str, object]:
    """Opens the task of a configuration as `tune` would, and trains nothing.

    Returns:
        The facts found: device, precision with the reason for it, memory limit, samples, optimizer.

    Raises:
        batchtune.errors.BatchtuneError: what `tune` would stop at.
    """
    from batchtune.observer import Observer
    from batchtune.tune.plan.open_task import check as run_check

    return run_check(config, observer or Observer())


@options.takes_options
def environment(device: options.Device = "auto") -> dict[str, object]:  # noqa: D417 - takes_options adds them
    """Versions, device, driver and live sensor readings of this machine.

    Args:
        (options)

    Raises:
        batchtune.errors.DeviceError: there is no such device.
    """
    from batchtune.processes.worker import describe_machine

    return describe_machine(device)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result document from a JSON file or a run folder.

    Raises:
        batchtune.errors.UsageError: there is none, it is not one, or a newer batchtune wrote it.
    """
    from batchtune.result import load_result as load

    return load(checks.text("path", path))

"""The public functions: each does what the command of its name does and returns the same result document."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchtune.version import __version__

if TYPE_CHECKING:
    from batchtune.config.schema import Config
    from batchtune.observer import Observer
    from batchtune.result import Result

_LARGEST = 2**31 - 1  # that a result document takes as a count


def probe(
    task: str | os.PathLike[str],
    *,
    precision: str | Sequence[str] = "auto",
    memory_limit: int | str | None = None,
    margin: float = 0.05,
    min: int = 1,  # noqa: A002 - the option's name
    max: int | None = None,  # noqa: A002 - the option's name
    multiple_of: int = 1,
    steps: int = 3,
    device: str = "auto",
    tolerance: float = 0.01,
    timeout: float | str = 120.0,
    verify_steps: int = 20,
    no_oom: bool = False,
    throughput: bool = True,
    accumulation: int = 1,
    nproc_per_node: int = 1,
    strategy: str = "ddp",
    observer: Observer | None = None,
    run_folders: str | os.PathLike[str] | None = None,
) -> Result:
    """Finds the largest micro-batch that really trains within the device's memory.

    Args:
        task: `model.py`, `path.py:attribute` or `package.module:attribute`.
        precision: `auto`, `all`, one of bf16, fp16, fp32 and tf32, or a list of these.
        memory_limit: bytes that may be reserved, or text such as "20GiB"; None: the device less the margin.
        margin: share of the device's memory kept free during the probe.
        min: smallest micro-batch size.
        max: largest micro-batch size; None: no cap but the data set's.
        multiple_of: only multiples are tried.
        steps: optimizer steps of one attempt.
        device: `auto`, `cpu`, `cuda`, `cuda:0`, `mps`, …
        tolerance: how far apart largest fit and smallest failure may be, relative; 0 is exact.
        timeout: seconds (or "2m") after which a silent attempt counts as hanging.
        verify_steps: optimizer steps of the final check in a fresh process.
        no_oom: try only sizes that are predicted to fit even at worst.
        throughput: also time steps at several sizes, and the data loader against them.
        accumulation: micro-batches of one optimizer step, as you train.
        nproc_per_node: ranks that train as one on this machine, each on a device of its own; sizes are of each rank.
        strategy: how they do: `ddp` (DistributedDataParallel) or `fsdp` (FSDP2's fully_shard).
        observer: told of what happens on the way.
        run_folders: keep attempts and result in a folder of this folder; None: keep nothing on disk.

    Returns:
        The result document; `result.probe.max_batch_size` is the answer.

    Raises:
        batchtune.errors.BatchtuneError: its class says whose fault it is; `error.result` holds what was measured.
    """
    from batchtune.config.quantities import parse_seconds
    from batchtune.errors import UsageError, kind_of
    from batchtune.observer import Observer
    from batchtune.probe.options import ProbeOptions
    from batchtune.probe.run import run_probe
    from batchtune.protocol.commands import OpenTask
    from batchtune.run_folder import RunFolder
    from batchtune.task.spec import task_name

    if not isinstance(task, str | os.PathLike):
        raise UsageError(f"the task is {kind_of(task)}; it must be a path or a text such as 'model.py:attribute'")
    limit = _bytes(memory_limit)
    try:
        silence: Any = parse_seconds(timeout)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _require_sizes(min, max, {"multiple-of": multiple_of, "steps": steps, "accumulation": accumulation})
    _require_sizes(1, None, {"nproc-per-node": nproc_per_node, "verify-steps": verify_steps})
    _require_shares(margin, tolerance)
    if strategy not in {"ddp", "fsdp"}:
        raise UsageError(f"--strategy {strategy}: unknown; use ddp or fsdp")
    if not _is_number(silence) or not silence > 0:
        raise UsageError(f"--timeout {timeout}: must be seconds greater than 0, or text such as 2m")
    names = [precision] if isinstance(precision, str) else list(precision)
    unknown = [name for name in names if name not in {"auto", "all", "bf16", "fp16", "fp32", "tf32"}]
    if unknown:
        raise UsageError(f"--precision {unknown[0]}: unknown; use auto, all, bf16, fp16, fp32 or tf32")
    if not names or ("all" in names and len(names) > 1):
        raise UsageError(f"--precision {', '.join(names) or '(none)'}: name at least one, and all alone")
    settings = OpenTask(task=os.fspath(task), device=device, memory_limit=limit, margin=margin, precision=tuple(names))
    options = ProbeOptions(
        minimum=min,
        maximum=max,
        multiple_of=multiple_of,
        steps=steps,
        tolerance=tolerance,
        timeout=silence,
        verify_steps=verify_steps,
        no_oom=no_oom,
        throughput=throughput,
        accumulation_steps=accumulation,
    )
    name = task_name(os.fspath(task))
    folder = RunFolder(f"probe-{name}", Path(run_folders)) if run_folders is not None else None
    return run_probe(
        settings,
        options,
        name=name,
        observer=observer or Observer(),
        folder=folder,
        world_size=nproc_per_node,
        strategy=strategy,
    )


def find_batch_size(
    step: Callable[[int], Any],
    *,
    device: str = "auto",
    memory_limit: int | str | None = None,
    margin: float = 0.05,
    min: int = 1,  # noqa: A002 - the option's name
    max: int | None = None,  # noqa: A002 - the option's name
    multiple_of: int = 1,
    steps: int = 3,
    tolerance: float = 0.01,
    no_oom: bool = False,
) -> int:
    """Finds the largest batch size at which a training step of yours runs, within your own script and process.

        def step(batch_size):
            optimizer.zero_grad()
            loss_of(model, worst_case_batch(batch_size)).backward()
            optimizer.step()

        batch_size = batchtune.find_batch_size(step, max=4096)

    The steps train: build model and optimizer anew afterwards, or give them their first state back. Make the batch
    anew in each call, and keep no reference to it, to the loss or to a gradient outside of `step`.

    The search is that of `probe`, and so are its outcomes: what a failed attempt held is freed before the next, an
    error that is not one of memory is told apart, and the size returned has run last, after everything that failed.
    Unlike `probe` it shares this process: a crash or a hang ends your script, and a failed CUDA kernel cannot be got
    over. Where the limit is of the CPU's memory, it counts what comes on top of the process as it stands, holds for the
    whole process (on Linux, as a limit on its address space) and is lifted before this returns.

    Args:
        step: does one whole training step, optimizer included, at the batch size it is given.
        device: `auto`, `cpu`, `cuda`, `cuda:0`, `mps`, …; where `step` trains.
        memory_limit: bytes that may be reserved, or text such as "20GiB"; None: the device less the margin.
        margin: share of the device's memory kept free during the search.
        min: smallest batch size.
        max: largest batch size; None: no cap, so `step` must be able to make any.
        multiple_of: only multiples are tried.
        steps: calls of `step` at each size.
        tolerance: how far apart largest fit and smallest failure may be, relative; 0 is exact.
        no_oom: try only sizes that are predicted to fit even at worst.

    Returns:
        The batch size; `step` ran at it.

    Raises:
        batchtune.errors.NothingFitsError: no size runs.
        batchtune.errors.DeviceError: no such device, or a failed kernel has left it unusable for this process.
        batchtune.errors.UsageError: an argument cannot be used as given.
        Exception: what `step` raised, where it raises it at every size.
    """
    from batchtune.probe.in_process import find_in_process
    from batchtune.probe.search import Bounds

    limit = _bytes(memory_limit)
    _require_sizes(min, max, {"multiple-of": multiple_of, "steps": steps})
    _require_shares(margin, tolerance)
    bounds = Bounds(minimum=min, maximum=max, multiple_of=multiple_of, tolerance=tolerance, no_oom=no_oom)
    return find_in_process(step, bounds, device=device, memory_limit=limit, margin=margin, steps=steps)


def estimate(
    task: str | os.PathLike[str],
    *,
    gpus: str | Sequence[str] = "all",
    precision: str | Sequence[str] = "auto",
    memory_limit: int | str | None = None,
    accumulation_steps: int = 1,
    strategy: str = "ddp",
    world_size: int = 1,
    observer: Observer | None = None,
) -> Result:
    """Calculates the largest micro-batch on each GPU from a trace of the training step, with no GPU at hand.

    Args:
        task: `model.py`, `path.py:attribute` or `package.module:attribute`.
        gpus: names from the catalogue such as "A100-80GB", or "all".
        precision: `auto` (what each GPU does well), `all`, one of bf16, fp16, fp32 and tf32, or a list of these.
        memory_limit: bytes a process may reserve, or text such as "24GiB"; None: what each GPU has.
        accumulation_steps: micro-batches per optimizer step.
        strategy: "ddp" or "fsdp" (every repeated block sharded), where the world size is more than 1.
        world_size: number of data-parallel ranks; the answer is the micro-batch of each.
        observer: told of what happens on the way.

    Returns:
        The result document; `result.estimates` has a row for each GPU and precision, each with its confidence.

    Raises:
        batchtune.errors.NothingFitsError: not even a batch of 1 on any of the GPUs; `error.result` has the rows, with
            what would make it fit.
        batchtune.errors.BatchtuneError: its class says whose fault it is.
    """
    from batchtune.estimate.document import run_estimate
    from batchtune.observer import Observer

    return run_estimate(
        os.fspath(task),
        [gpus] if isinstance(gpus, str) else list(gpus),
        [precision] if isinstance(precision, str) else list(precision),
        memory_limit=_bytes(memory_limit),
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        world_size=world_size,
        observer=observer or Observer(),
    )


def tune(
    config: str | os.PathLike[str] | Config,
    *,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    observer: Observer | None = None,
    run_folders: str | os.PathLike[str] = ".batchtune",
) -> Result:
    """Finds the batch size and learning rate that reach the target soonest, and confirms them against the baseline.

    Args:
        config: a YAML file or a `batchtune.config.schema.Config`.
        overrides: texts such as `budget.total=5m`, laid over the file.
        fresh: start over instead of resuming what the run folder holds.
        observer: told of what happens on the way.
        run_folders: the folder that holds one folder for each run.

    Returns:
        The result document; `result.recommendation` is the answer.

    Raises:
        batchtune.errors.BatchtuneError: its class says whose fault it is; `error.result` holds what was measured.
    """
    from batchtune.config.load import default_name, load_config
    from batchtune.config.schema import Config
    from batchtune.observer import Observer
    from batchtune.task.spec import task_name
    from batchtune.tune.run import run_tune

    given = [overrides] if isinstance(overrides, str) else overrides
    loaded = config if isinstance(config, Config) else load_config(config, given)
    if not loaded.name:
        loaded = loaded.model_copy(update={"name": default_name(Path(f"{task_name(loaded.task)}.py"))})
    return run_tune(loaded, fresh=fresh, observer=observer or Observer(), root=Path(run_folders))


def check(config: Config, *, observer: Observer | None = None) -> dict[str, Any]:
    """Opens the task of a configuration as `tune` would, and trains nothing.

    Returns:
        The facts found: device, precision with the reason for it, memory limit, samples, optimizer.

    Raises:
        batchtune.errors.BatchtuneError: what `tune` would stop at.
    """
    from batchtune.observer import Observer
    from batchtune.tune.plan.opening import check as run_check

    return run_check(config, observer or Observer())


def environment(device: str = "auto") -> dict[str, Any]:
    """Versions, device, driver and live sensor readings of this machine.

    Raises:
        batchtune.errors.DeviceError: there is no such device.
    """
    from batchtune.processes.worker import START_TIMEOUT_SECONDS, Worker
    from batchtune.protocol.commands import Describe

    with Worker(None) as worker:
        machine = worker.call(Describe(device=device), timeout=START_TIMEOUT_SECONDS)
    return {"batchtune": __version__} | machine.model_dump(exclude_unset=True)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result document from a JSON file or a run folder.

    Raises:
        batchtune.errors.UsageError: there is none, it is not one, or a newer batchtune wrote it.
    """
    from batchtune.files import load_result as load

    return load(path)


def _require_sizes(smallest: int, largest: int | None, counts: dict[str, int]) -> None:
    from batchtune.errors import UsageError, kind_of

    for name, value in {"min": smallest, "max": largest, **counts}.items():
        if value is None and name == "max":
            continue
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise UsageError(f"--{name} {value}: must be an int, not {kind_of(value)}")
        if value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
        if value > _LARGEST:
            raise UsageError(f"--{name} {value}: must be at most {_LARGEST}")
    if largest is not None and smallest > largest:
        raise UsageError(f"--min {smallest} is greater than --max {largest}; swap them or raise --max")


def _require_shares(margin: float, tolerance: float) -> None:
    from batchtune.errors import UsageError

    if not all(_is_number(share) and 0 <= share < 1 for share in (margin, tolerance)):
        raise UsageError("--margin and --tolerance are shares: at least 0 and less than 1")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _bytes(value: int | str | None) -> int | None:
    from batchtune.config.quantities import parse_bytes
    from batchtune.errors import UsageError

    try:
        found: Any = parse_bytes(value)
    except ValueError as error:
        raise UsageError(f"--memory-limit: {error}") from None
    if found is not None and found <= 0:
        raise UsageError("--memory-limit must be greater than 0")
    return None if found is None else int(found)

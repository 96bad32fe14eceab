"""What is settled between the probe and the study: the batch sizes, how a fixed one is made up, and where to start."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

from batchtune.config.schema import Config
from batchtune.document import NoiseScale, Prior, ProbeResult, RangeTest
from batchtune.errors import BatchtuneError, DeviceError, UsageError, UserCodeError
from batchtune.observer import Observer
from batchtune.processes.worker import LONG_SILENCE_SECONDS, Worker, WorkerDied
from batchtune.protocol.commands import MeasureNoiseScale, Opened, RunRangeTest, TimeLoader, TimeSteps
from batchtune.tune.plan.prior import Candidates, candidate_batch_sizes, rate_belief, start_batch_size
from batchtune.tune.plan.space import argument_distributions, clipping_distribution, rates_to_search
from batchtune.tune.plan.steps import fastest_split, splits_to_time, step_seconds, with_loading

PRIOR_SHARE = 0.1  # of budget.total, and no more than one run: what range test and noise scale may take together
STEPS_PER_DECADE, FEWEST_STEPS = 14, 20  # of a range test
LARGE_FACTOR, LEAST_FACTOR = 8, 4  # between the two batch sizes of the noise scale
WARM_UP_STEPS, DRAWS, SMALL_PER_LARGE = 40, 4, 4  # of the noise scale
FORWARD_SHARE = 0.9  # of a step: the noise scale takes gradients and no optimizer step
_LOADER_SECONDS = 0.1  # loading alone
_SPLIT_SECONDS = 0.5  # timing of each micro-batch size for a fixed global batch


def require(config: Config, opened: Opened) -> None:
    """Refuses what this task or this device cannot do, before anything runs.

    Raises:
        DeviceError: the objective is energy, and the device does not count it.
        UsageError: an argument under `space` cannot be searched as asked, or the data set is smaller than the batch,
            or than any that may be searched.
    """
    if config.objective.kind == "energy_to_target" and not opened.counts_energy:
        raise DeviceError(
            f"objective.kind energy_to_target: {opened.device_name} has no energy counter that NVML reads; "
            "use time_to_target, or an NVIDIA GPU from Volta on"
        )
    argument_distributions(config, opened.optimizer_defaults)
    if config.gradient_clipping is not None and config.gradient_clipping.searched is not None:
        clipping_distribution(config, opened.gradient_clipping)
    data_size, base = opened.train_size, config.baseline.batch_size
    if data_size is not None and base > data_size:
        key = "baseline.batch_size" if config.batch_size.global_ is None else "batch_size.global"
        raise UsageError(f"{key} {base} is more than the {data_size} samples of train_dataset")
    sizes, unit = config.batch_size, _multiple_of(config)
    least = -(-sizes.min // unit) * unit
    if data_size is not None and least > data_size:
        multiple = f"multiple_of {unit}: {least}, the least multiple from min {sizes.min} on,"
        which = multiple if unit > 1 else f"min {least}"
        raise UsageError(f"batch_size.{which} is more than the {data_size} samples of train_dataset")


def candidates(config: Config, probe: ProbeResult, data_size: int | None, *, accumulates: bool = True) -> Candidates:
    """The global batch sizes to choose from."""
    sizes = config.batch_size
    if sizes.global_ is not None:
        return Candidates((sizes.global_,), f"batch_size.global {sizes.global_} is kept")
    return candidate_batch_sizes(
        probe,
        minimum=sizes.min,
        maximum=None if sizes.max == "auto" else sizes.max,
        baseline=config.baseline.batch_size,
        multiple_of=_multiple_of(config),
        data_size=data_size,
        accumulates=accumulates,
    )


def _multiple_of(config: Config) -> int:
    unit = config.batch_size.multiple_of
    return 1 if unit == "auto" else unit


def measure_prior(config: Config, probe: ProbeResult, opened: Opened, worker: Worker, observer: Observer) -> Prior:
    """Measures what the search starts from; what cannot be measured is left out, and the reason says so.

    Args:
        config: the configuration.
        probe: the largest micro-batch and the step times.
        opened: what the child said of the task.
        worker: the child that measures.
        observer: told of what was found.
    """
    started = time.perf_counter()
    micro, micro_reason = _split(config, probe, worker)
    loading = _loader_seconds(config, probe, worker)
    probe = with_loading(probe, loading, opened.device)
    chosen, base = candidates(config, probe, opened.train_size, accumulates=opened.accumulates), config.baseline
    noise, test, start, skipped = _measure(config, probe, opened, worker, chosen.batch_sizes)
    rate, decades, why = rate_belief(
        optimizer=opened.optimizer, rate_today=base.learning_rate, batch_size=start, range_test=test
    )
    lowest, highest = rates_to_search(config)
    if not lowest <= rate <= highest:
        rate, why = min(max(rate, lowest), highest), f"{why}; kept within {lowest:g} to {highest:g}, what is searched"
    prior = Prior(
        batch_sizes=list(chosen.batch_sizes),
        batch_sizes_reason=chosen.reason,
        learning_rate=rate,
        learning_rate_decades=decades,
        learning_rate_reason=f"{why}; {skipped}" if skipped else why,
        start_batch_size=start,
        micro_batch_size=micro,
        micro_batch_reason=micro_reason,
        loader_seconds_per_sample=loading,
        range_tests=[test] if test else [],
        noise_scale=noise,
        seconds=round(time.perf_counter() - started, 3),
    )
    observer.note(f"batch sizes {', '.join(map(str, chosen.batch_sizes))}: {chosen.reason}")
    if micro_reason:
        observer.note(f"micro-batch {micro}: {micro_reason}")
    believed = f"learning rate {rate:.2g} give or take {decades:.1f} decades"
    observer.note(f"start: batch {start}, {believed}: {prior.learning_rate_reason}")
    return prior


def _loader_seconds(config: Config, probe: ProbeResult, worker: Worker) -> float | None:
    """What it takes to load a sample, as runs do it; None where the loader fails by itself."""
    size = min(config.baseline.batch_size, probe.max_batch_size or 1)
    try:
        command = TimeLoader(batch_size=size, num_workers=0, pin_memory=False, seconds=_LOADER_SECONDS)
        rate = worker.call(command, timeout=LONG_SILENCE_SECONDS).samples_per_second
    except (WorkerDied, UserCodeError):  # the runs will tell
        return None
    return 1 / rate if rate else None


def _split(config: Config, probe: ProbeResult, worker: Worker) -> tuple[int | None, str | None]:
    """The micro-batch size for a fixed global batch, and why; nothing where the batch is searched."""
    fixed = config.batch_size.global_
    if fixed is None:
        return None, None
    sizes = splits_to_time(fixed, probe)
    if len(sizes) == 1:
        return sizes[0], f"global batch {fixed} is kept, and {sizes[0]} is its largest divisor that trains"
    timed = []
    for size in sizes:
        with contextlib.suppress(WorkerDied):  # what dies while it is timed is no candidate
            command = TimeSteps(
                batch_size=size,
                precision=probe.precision,
                seconds=_SPLIT_SECONDS,
                accumulation_steps=fixed // size,
            )
            timed.append(worker.call(command, timeout=LONG_SILENCE_SECONDS))
    if not timed:
        return max(sizes), f"global batch {fixed} is kept, and none of its divisors could be timed"
    return fastest_split(fixed, timed)


def _measure(
    config: Config, probe: ProbeResult, opened: Opened, worker: Worker, batch_sizes: Sequence[int]
) -> tuple[NoiseScale | None, RangeTest | None, int, str | None]:
    """Noise scale, range test and the batch size to start with, as far as they can be afforded, and why not all."""
    base, skipped = config.baseline, []
    budget = min(PRIOR_SHARE * config.budget.total, config.budget.run)  # a search without them takes some runs more
    noise, test, start = None, None, start_batch_size(probe, batch_sizes, None)
    precision, seconds = probe.precision, budget
    try:
        planned = affordable_noise_scale(base.batch_size, probe, budget)
        if opened.steps_by_itself:
            planned = "no noise scale, since a train_step takes its gradients by itself"
        if isinstance(planned, str):
            skipped.append(planned)
        else:
            measure = MeasureNoiseScale(
                small=planned[0],
                large=planned[1],
                precision=precision,
                learning_rate=base.learning_rate,
                warm_up_steps=WARM_UP_STEPS,
                draws=DRAWS,
                seconds=seconds,
            )
            noise = worker.call(measure, timeout=LONG_SILENCE_SECONDS)
            budget -= planned[2]
        start = start_batch_size(probe, batch_sizes, noise)
        lowest, highest = rates_to_search(config)
        rates = max(base.learning_rate, lowest), highest
        steps = affordable_range_test(start, rates, probe, budget)
        if isinstance(steps, str):
            skipped.append(steps)
        else:
            rise = RunRangeTest(
                batch_size=start,
                precision=precision,
                lowest_rate=rates[0],
                highest_rate=rates[1],
                steps=steps,
                seconds=seconds,
            )
            test = worker.call(rise, timeout=LONG_SILENCE_SECONDS)
    except BatchtuneError as error:  # what the user's code says of a rate that is too high is no reason to stop
        skipped.append(f"not all was measured: {error}")
    if test is None or test.lowest_loss_learning_rate is None:
        # today's batch or the nearest to it: there today's learning rate is known to train
        start = min(batch_sizes, key=lambda size: abs(math.log(size / base.batch_size)))
    return noise, test, start, "; ".join(skipped) or None


def affordable_noise_scale(batch_size: int, probe: ProbeResult, seconds: float) -> tuple[int, int, float] | str:
    """The two micro-batch sizes and the seconds of a noise scale that stays within so many, or why there is none.

    Args:
        batch_size: of the baseline; the smaller size, or what of it fits.
        probe: the largest micro-batch and the fitted step time.
        seconds: that may be spent.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    if fit is None:
        return "no noise scale, since steps were not timed"
    small = min(batch_size, largest)
    large = min(LARGE_FACTOR * small, largest)
    if large < LEAST_FACTOR * small:
        return f"no noise scale, since {largest}, the largest batch to train at once, is not {LEAST_FACTOR} of today's"
    gradients = DRAWS * (SMALL_PER_LARGE * step_seconds(fit, small) + step_seconds(fit, large)) * FORWARD_SHARE
    needed = WARM_UP_STEPS * step_seconds(fit, small) + gradients
    return _too_long(f"a noise scale at batch {small} and {large}", needed, seconds) or (small, large, needed)


def affordable_range_test(batch_size: int, rates: tuple[float, float], probe: ProbeResult, seconds: float) -> int | str:
    """The steps of a range test at a batch size that stays within so many seconds, or why there is none.

    It starts at today's learning rate, with which training is known to go well: below it there is nothing to find; or
    at the user's least rate, where that is higher.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    if rates[0] > rates[1]:
        return f"no range test, since today's {rates[0]:g} is above {rates[1]:g}, the largest to search"
    if fit is None:
        return "no range test, since steps were not timed"
    if batch_size > largest:
        return f"no range test, since batch {batch_size} must be accumulated"
    steps = max(FEWEST_STEPS, math.ceil(STEPS_PER_DECADE * math.log10(rates[1] / rates[0])))
    what = f"{steps} steps of a range test at batch {batch_size}"
    return _too_long(what, steps * step_seconds(fit, batch_size), seconds) or steps


def _too_long(what: str, needed: float, seconds: float) -> str | None:
    if needed <= seconds:
        return None
    share = f"one run, or {PRIOR_SHARE:.0%} of budget.total, is for all of it"
    return f"no more was measured: {what} would take about {needed:.2g} s, and {share}"

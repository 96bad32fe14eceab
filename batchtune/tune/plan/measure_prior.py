"""What is settled between the probe and the study: the batch sizes, how a fixed one is made up, and where to start."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

from batchtune.config.schema import Config
from batchtune.document import NoiseScale, Prior, ProbeResult, RangeTest
from batchtune.errors import BatchtuneError, UserCodeError
from batchtune.observer import Observer
from batchtune.processes.worker import LONG_SILENCE_SECONDS, Worker, WorkerDied
from batchtune.protocol.commands import MeasureNoiseScale, Opened, RunRangeTest, TimeLoader, TimeSteps
from batchtune.tune.plan.configure import DECADES, WarmStart
from batchtune.tune.plan.open_task import multiple_of
from batchtune.tune.plan.prior import (
    Candidates,
    as_one_device,
    candidate_batch_sizes,
    fastest_split,
    nearest,
    rate_belief,
    splits_to_time,
    start_batch_size,
    step_seconds,
    with_loading,
)
from batchtune.tune.plan.space import Plan, rates_to_search
from batchtune.tune.plan.tokens import in_samples, prior_in_tokens, probe_in_tokens, token_batches

PRIOR_SHARE = 0.1  # of budget.total, and no more than one run: what range test and noise scale may take together
STEPS_PER_DECADE, FEWEST_STEPS = 14, 20  # of a range test
LARGE_FACTOR, LEAST_FACTOR = 8, 4  # between the two batch sizes of the noise scale
WARM_UP_STEPS, DRAWS, SMALL_PER_LARGE = 40, 4, 4  # of the noise scale
FORWARD_SHARE = 0.9  # of a step: the noise scale takes gradients and no optimizer step

_LOADER_SECONDS = 0.1  # loading alone
_SPLIT_SECONDS = 0.5  # timing of each micro-batch size for a fixed global batch


def make_plan(config: Config, opened: Opened, probe: ProbeResult, prior: Prior) -> Plan:
    """The plan of a study whose task was opened, probed and measured; `Plan` says what is what."""
    tokens = token_batches(config, probe)
    if tokens is not None:
        base = config.baseline.model_copy(update={"batch_size": tokens.baseline})
        config = config.model_copy(update={"baseline": base})
    timed = of_the_study(probe_in_tokens(probe, tokens), prior.loader_seconds_per_sample, opened)
    return Plan(
        config=config,
        tokens=tokens,
        probe=timed,
        prior=prior,
        precisions=[name for name, _ in opened.precision],
        gradient_clipping=opened.gradient_clipping,
        optimizer_defaults=opened.optimizer_defaults,
        has_schedule=opened.optimizer_settings.scheduler is not None,
        training_seconds=None if tokens else _training_seconds(config, opened, timed),
    )


def _training_seconds(config: Config, opened: Opened, probe: ProbeResult) -> float | None:
    """What the user's own training takes at the step time that was timed; None: it does not say how long it is."""
    fit, most, size = probe.throughput_fit, probe.max_batch_size, config.baseline.batch_size
    steps = opened.training_steps(size)
    if steps is None or fit is None or most is None:
        return None
    micro = min(size, most)
    return steps * step_seconds(fit, micro) * size / micro


def of_the_study(probe: ProbeResult, loader_seconds: float | None, opened: Opened) -> ProbeResult:
    """The probe as runs have it: with the time to load, and of all ranks together."""
    return as_one_device(with_loading(probe, loader_seconds, opened.device), opened.world_size)


def _candidates(config: Config, probe: ProbeResult, opened: Opened) -> Candidates:
    sizes = config.batch_size
    if sizes.global_ is not None:
        return Candidates((sizes.global_,), f"batch_size.global {sizes.global_} is kept")
    return candidate_batch_sizes(
        probe,
        minimum=sizes.min,
        maximum=None if sizes.max == "auto" else sizes.max,
        baseline=config.baseline.batch_size,
        multiple_of=multiple_of(config),
        data_size=opened.train_size,
        accumulates=opened.accumulates,
    )


def measure_prior(
    config: Config,
    probe: ProbeResult,
    opened: Opened,
    worker: Worker,
    observer: Observer,
    warm_start: WarmStart | None = None,
) -> Prior:
    """Measures what the search starts from, as far as an earlier study does not tell it; of a study in tokens, too.

    What cannot be measured is left out, and the reason says so.
    """
    started, asked, probed, config = time.perf_counter(), config, probe, in_samples(config)
    micro, micro_reason = _split(config, probe, worker)
    loading = _loader_seconds(config, probe, worker)
    probe = of_the_study(probe, loading, opened)
    chosen, base = _candidates(config, probe, opened), config.baseline
    skipped: str | None = None
    if warm_start is not None:
        noise, tests, start = warm_start.noise_scale, list(warm_start.range_tests), warm_start.batch_size
        start = nearest(start, chosen.batch_sizes)
        rate, decades, why = warm_start.learning_rate, DECADES, f"where study {warm_start.run} ended"
    else:
        noise, test, start, skipped = _measure(config, probe, opened, worker, chosen.batch_sizes)
        tests = [test] if test else []
        rate, decades, why = rate_belief(
            optimizer=opened.optimizer, baseline_rate=base.learning_rate, batch_size=start, range_test=test
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
        range_tests=tests,
        noise_scale=noise,
        seconds=round(time.perf_counter() - started, 3),
    )
    _tell(prior, observer)
    return prior_in_tokens(asked, probed, opened, prior)


def _tell(prior: Prior, observer: Observer) -> None:
    observer.note(f"batch sizes {', '.join(map(str, prior.batch_sizes))}: {prior.batch_sizes_reason}")
    if prior.micro_batch_reason:
        observer.note(f"micro-batch {prior.micro_batch_size:,}: {prior.micro_batch_reason}")
    believed = f"learning rate {prior.learning_rate:.2g} give or take {prior.learning_rate_decades:.1f} decades"
    observer.note(f"start: batch {prior.start_batch_size:,}, {believed}: {prior.learning_rate_reason}")


def _loader_seconds(config: Config, probe: ProbeResult, worker: Worker) -> float | None:
    """What it takes to load a sample, as runs do it; None where the loader fails by itself."""
    size = min(config.baseline.batch_size // config.ranks.of_each, probe.max_batch_size or 1)
    try:
        command = TimeLoader(batch_size=size, num_workers=0, pin_memory=False, seconds=_LOADER_SECONDS)
        rate = worker.call(command, timeout=LONG_SILENCE_SECONDS).samples_per_second
    except (WorkerDied, UserCodeError):  # the runs will tell
        return None
    return 1 / rate if rate else None


def _split(config: Config, probe: ProbeResult, worker: Worker) -> tuple[int | None, str | None]:
    """The micro-batch size for a fixed global batch, and why; nothing where the batch is searched."""
    fixed, ranks = config.batch_size.global_, config.ranks.of_each
    if fixed is None:
        return None, None
    sizes = splits_to_time(fixed // ranks, probe)
    if len(sizes) == 1:
        return sizes[0], f"global batch {fixed:,} is kept, and {sizes[0]:,} is its largest divisor that trains"
    timed = []
    for size in sizes:
        with contextlib.suppress(WorkerDied):  # what dies while it is timed is no candidate
            command = TimeSteps(
                batch_size=size,
                precision=probe.precision,
                seconds=_SPLIT_SECONDS,
                accumulation_steps=fixed // ranks // size,
            )
            timed.append(worker.call(command, timeout=LONG_SILENCE_SECONDS))
    if not timed:
        return max(sizes), f"global batch {fixed:,} is kept, and none of its divisors could be timed"
    return fastest_split(fixed, timed, ranks)


def _measure(
    config: Config, probe: ProbeResult, opened: Opened, worker: Worker, batch_sizes: Sequence[int]
) -> tuple[NoiseScale | None, RangeTest | None, int, str | None]:
    """Noise scale, range test and the batch size to start with, as far as they can be afforded, and why not all."""
    base, skipped = config.baseline, []
    budget = min(PRIOR_SHARE * config.budget.total, config.budget.run)  # a search without them takes some runs more
    noise, test, seconds = None, None, budget
    start = nearest(base.batch_size, batch_sizes)  # there the baseline's learning rate is known to train
    try:
        measured = _noise_scale(config, probe, opened, worker, budget)
        if isinstance(measured, str):
            skipped.append(measured)
        else:
            noise, needed = measured
            budget -= needed
        best = start_batch_size(probe, batch_sizes, noise)
        lowest, highest = rates_to_search(config)
        rates = max(base.learning_rate, lowest), highest
        steps = affordable_range_test(best, rates, probe, budget)
        if isinstance(steps, str):
            skipped.append(steps)
        else:
            rise = RunRangeTest(
                batch_size=best // opened.world_size,
                precision=probe.precision,
                lowest_rate=rates[0],
                highest_rate=rates[1],
                steps=steps,
                seconds=seconds,
            )
            test = worker.call(rise, timeout=LONG_SILENCE_SECONDS)
            start = start if test.lowest_loss_learning_rate is None else best
    except BatchtuneError as error:  # what the user's code says of a rate that is too high is no reason to stop
        skipped.append(f"not all was measured: {error}")
    return noise, test, start, "; ".join(skipped) or None


def _noise_scale(
    config: Config, probe: ProbeResult, opened: Opened, worker: Worker, seconds: float
) -> tuple[NoiseScale, float] | str:
    """The noise scale and the seconds that were set aside for it, or why there is none."""
    if opened.steps_by_itself:
        return "no noise scale, since a train_step takes its gradients by itself"
    ranks, apart = opened.world_size, opened.strategy == "ddp"
    planned = affordable_noise_scale(config.baseline.batch_size, probe, seconds, ranks_apart=apart)
    if isinstance(planned, str):
        return planned
    small, large, draws, needed = planned
    command = MeasureNoiseScale(
        small=small // ranks,
        large=large // ranks,
        ranks_apart=apart,
        precision=probe.precision,
        learning_rate=config.baseline.learning_rate,
        warm_up_steps=WARM_UP_STEPS,
        draws=draws,
        seconds=seconds,
    )
    return worker.call(command, timeout=LONG_SILENCE_SECONDS), needed


def affordable_noise_scale(
    batch_size: int, probe: ProbeResult, seconds: float, *, ranks_apart: bool = False
) -> tuple[int, int, int, float] | str:
    """The two batch sizes, the draws and the seconds of a noise scale that stays within so many, or why there is none.

    The smaller size is the baseline's `batch_size`, or what of it fits. Where the gradients of several ranks are seen
    apart, it is for warming up alone: a pass of the larger one tells what a rank's share of it does, too.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    if fit is None:
        return "no noise scale, since steps were not timed"
    small = min(batch_size, largest)
    large = min(LARGE_FACTOR * small, largest)
    warm_up = WARM_UP_STEPS * step_seconds(fit, small)
    if ranks_apart:
        draws = math.ceil(DRAWS * (SMALL_PER_LARGE * small / large + 1))  # of as many samples as below
        needed = warm_up + draws * step_seconds(fit, large) * FORWARD_SHARE
        told = f"a noise scale of the ranks' gradients at batch {large:,}"
        return _too_long(told, needed, seconds) or (small, large, draws, needed)
    if large < LEAST_FACTOR * small:
        return f"no noise scale, since {largest}, the largest batch to train at once, is not {LEAST_FACTOR} of today's"
    needed = warm_up + DRAWS * (SMALL_PER_LARGE * step_seconds(fit, small) + step_seconds(fit, large)) * FORWARD_SHARE
    told = f"a noise scale at batch {small:,} and {large:,}"
    return _too_long(told, needed, seconds) or (small, large, DRAWS, needed)


def affordable_range_test(batch_size: int, rates: tuple[float, float], probe: ProbeResult, seconds: float) -> int | str:
    """The steps of a range test at a batch size that stays within so many seconds, or why there is none.

    It starts at the baseline's learning rate, with which training is known to go well: below it there is nothing to
    find; or at the user's least rate, where that is higher.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    if rates[0] > rates[1]:
        return f"no range test, since today's {rates[0]:g} is above {rates[1]:g}, the largest to search"
    if fit is None:
        return "no range test, since steps were not timed"
    if batch_size > largest:
        return f"no range test, since batch {batch_size:,} must be accumulated"
    steps = max(FEWEST_STEPS, math.ceil(STEPS_PER_DECADE * math.log10(rates[1] / rates[0])))
    what = f"{steps} steps of a range test at batch {batch_size:,}"
    return _too_long(what, steps * step_seconds(fit, batch_size), seconds) or steps


def _too_long(what: str, needed: float, seconds: float) -> str | None:
    if needed <= seconds:
        return None
    share = f"one run, or {PRIOR_SHARE:.0%} of budget.total, is for all of it"
    return f"no more was measured: {what} would take about {needed:.2g} s, and {share}"

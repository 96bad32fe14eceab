"""What is settled between the probe and the study: the batch sizes, how a fixed one is made up, and where to start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from batchtune.config import Config
from batchtune.errors import BatchtuneError, DeviceError, UsageError
from batchtune.progress import Observer
from batchtune.results import NoiseScale, Prior, ProbeResult, RangeTest, ThroughputPoint
from batchtune.train.worker import Worker
from batchtune.tune.prior import Candidates, candidate_batch_sizes, fastest_split, rate_belief, splits_to_time
from batchtune.tune.space import argument_distributions

PRIOR_SHARE = 0.1  # of budget.run: what range tests and noise scale may take together
RANGE_STEPS = (100, 80, 60)  # of a range test, as many as can be afforded
LARGE_FACTORS = (16, 8, 4)  # between the two batch sizes measured, as far apart as can be afforded
_WARM_UP_STEPS, _DRAWS, _SMALL_PER_LARGE = 40, 8, 4  # of the noise scale
_FORWARD_SHARE = 0.9  # of a step: the noise scale takes gradients and no optimizer step
_SPLIT_SECONDS = 0.5  # timing of each micro-batch size for a fixed global batch
_SILENCE_SECONDS = 600.0


def require(config: Config, facts: dict[str, Any]) -> None:
    """Refuses what this task or this device cannot do, before anything runs.

    Raises:
        DeviceError: the objective is energy, and the device does not count it.
        UsageError: an argument under `space` cannot be searched as asked, or the data set is smaller than the batch.
    """
    if config.objective.kind == "energy_to_target" and not facts["counts_energy"]:
        raise DeviceError(
            f"objective.kind energy_to_target: {facts['environment']['device']} has no energy counter that NVML reads; "
            "use time_to_target, or an NVIDIA GPU from Volta on"
        )
    argument_distributions(config, facts["optimizer_defaults"])
    data_size, base = facts["train_size"], config.baseline.batch_size
    if data_size is not None and base > data_size:
        key = "baseline.batch_size" if config.batch_size.global_ is None else "batch_size.global"
        raise UsageError(f"{key} {base} is more than the {data_size} samples of train_dataset")


def candidates(config: Config, probe: ProbeResult, data_size: int | None) -> Candidates:
    """The global batch sizes to choose from."""
    sizes = config.batch_size
    if sizes.global_ is not None:
        return Candidates((sizes.global_,), f"batch_size.global {sizes.global_} is kept")
    return candidate_batch_sizes(
        probe,
        minimum=sizes.min,
        maximum=None if sizes.max == "auto" else sizes.max,
        baseline=config.baseline.batch_size,
        multiple_of=1 if sizes.multiple_of == "auto" else sizes.multiple_of,
        data_size=data_size,
    )


def prepare(config: Config, probe: ProbeResult, facts: dict[str, Any], worker: Worker, observer: Observer) -> Prior:
    """Measures what the search starts from; what cannot be measured is left out, and the reason says so.

    Args:
        config: the configuration.
        probe: the largest micro-batch and the step times.
        facts: what the child said of the task.
        worker: the child that measures.
        observer: told of what was found.
    """
    started = time.perf_counter()
    chosen, base = candidates(config, probe, facts["train_size"]), config.baseline
    micro, micro_reason = _split(config, probe, worker)
    tests, noise, skipped = _measure(config, probe, worker)
    rate, decades, why = rate_belief(
        optimizer=facts["optimizer"],
        batch_size=base.batch_size,
        rate_today=base.learning_rate,
        range_tests=tests,
        noise=noise,
    )
    prior = Prior(
        batch_sizes=list(chosen.batch_sizes),
        batch_sizes_reason=chosen.reason,
        learning_rate=rate,
        learning_rate_decades=decades,
        learning_rate_reason=f"{why}; {skipped}" if skipped else why,
        micro_batch_size=micro,
        micro_batch_reason=micro_reason,
        range_tests=tests,
        noise_scale=noise,
        seconds=round(time.perf_counter() - started, 3),
    )
    observer.note(f"batch sizes {', '.join(map(str, chosen.batch_sizes))}: {chosen.reason}")
    if micro_reason:
        observer.note(f"micro-batch {micro}: {micro_reason}")
    observer.note(f"learning rate {rate:.2g} give or take {decades:.1f} decades: {prior.learning_rate_reason}")
    return prior


def _split(config: Config, probe: ProbeResult, worker: Worker) -> tuple[int | None, str | None]:
    """The micro-batch size for a fixed global batch, and why; nothing where the batch is searched."""
    fixed = config.batch_size.global_
    if fixed is None:
        return None, None
    sizes = splits_to_time(fixed, probe)
    if len(sizes) == 1:
        return sizes[0], f"global batch {fixed} is kept, and {sizes[0]} is its largest divisor that trains"
    timed = [
        ThroughputPoint.model_validate(
            worker.call(
                "time_steps",
                timeout=_SILENCE_SECONDS,
                batch_size=size,
                precision=probe.precision,
                seconds=_SPLIT_SECONDS,
                accumulation_steps=fixed // size,
            )
        )
        for size in sizes
    ]
    return fastest_split(fixed, timed)


def _measure(
    config: Config, probe: ProbeResult, worker: Worker
) -> tuple[list[RangeTest], NoiseScale | None, str | None]:
    """Range tests and noise scale, as far as they can be afforded, and why not where they cannot."""
    budget = PRIOR_SHARE * config.budget.run
    planned = affordable(config.baseline.batch_size, probe, budget)
    if isinstance(planned, str):
        return [], None, planned
    small, large, steps = planned
    tests: list[RangeTest] = []
    common: dict[str, Any] = {"timeout": _SILENCE_SECONDS, "precision": probe.precision, "seconds": budget}
    rates: dict[str, Any] = {"lowest_rate": config.learning_rate.min, "highest_rate": config.learning_rate.max}
    try:
        for size in (small, large):
            answer = worker.call("range_test", batch_size=size, steps=steps, **rates, **common)
            tests.append(RangeTest.model_validate(answer))
        noise = worker.call(
            "noise_scale",
            small=small,
            large=large,
            learning_rate=config.baseline.learning_rate,
            warm_up_steps=_WARM_UP_STEPS,
            draws=_DRAWS,
            **common,
        )
    except BatchtuneError as error:  # what the user's code says of a rate that is too high is no reason to stop
        return tests, None, f"not all was measured: {error}"
    return tests, NoiseScale.model_validate(noise), None


def affordable(batch_size: int, probe: ProbeResult, seconds: float) -> tuple[int, int, int] | str:
    """The two micro-batch sizes and the steps of the range tests that stay within so many seconds, or why none do.

    Args:
        batch_size: of the baseline; the smaller size, or what of it fits.
        probe: the largest micro-batch and the fitted step time.
        seconds: for range tests and noise scale together.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    small = min(batch_size, largest)
    if fit is None:
        return "no range test, since steps were not timed"

    def step(size: int) -> float:
        return fit.alpha_seconds + fit.beta_seconds_per_sample * size

    larger: Sequence[int] = [small * factor for factor in LARGE_FACTORS if small * factor <= largest]
    if not larger:
        return f"no range test, since no batch of {LARGE_FACTORS[-1]} times the baseline's fits"
    least = 0.0
    for steps in RANGE_STEPS:
        for large in larger:
            gradients = _DRAWS * (_SMALL_PER_LARGE * step(small) + step(large)) * _FORWARD_SHARE
            least = steps * (step(small) + step(large)) + _WARM_UP_STEPS * step(small) + gradients
            if least <= seconds:
                return small, large, steps
    return (
        f"no range test, since {RANGE_STEPS[-1]} steps at batch {small} and {larger[-1]} and a noise scale would take "
        f"about {least:.2g} s, more than {PRIOR_SHARE:.0%} of budget.run"
    )

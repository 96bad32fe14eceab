"""The answer in words that every report shares: a configuration as rows, and why a largest batch can be relied on."""

from __future__ import annotations

from batchtune.document import DataParallel, Document, Environment, ProbeResult, Recommendation, Scaling, ThroughputFit
from batchtune.report.view.select import named_values
from batchtune.units import duration, interval, number, share, size, time_interval

_LIMITED_BY = {
    "memory": "the next size runs out of memory",
    "max": "that is the most that was to be tried",
    "dataset": "that is the whole training set",
}


def configurations(result: Document) -> list[tuple[str, list[str]]]:
    """The recommended configuration and, where it was measured, today's: a row for each fact known of the first.

    The first row is the batch size. A metric may be called what another row is.
    """
    found, base = result.recommendation, result.baseline
    shown = [each for each in (found, base) if each is not None]
    if found is None:
        return []
    metric = result.target.metric if result.target else "metric"
    rows = [
        ("batch size", [batch_text(each) for each in shown]),
        ("learning rate", [number(each.learning_rate) for each in shown]),
        ("optimizer", [named_values(each.optimizer_arguments) or "-" for each in shown]),
        ("schedule", [f"{each.total_steps:,} steps" if each.total_steps else "-" for each in shown]),
        ("precision", [each.precision for each in shown]),
        ("time to target", [time_interval(each.time_to_target_seconds) for each in shown]),
        ("energy to target", [interval(each.energy_to_target_joules, " J") for each in shown]),
        (metric, [interval(each.value) for each in shown]),
        ("speed-up", [interval(found.speedup_over_baseline, "×"), "1×"][: len(shown)]),
        ("energy saving", [interval(found.energy_saving_over_baseline, "×"), "1×"][: len(shown)]),
    ]
    return [(name, cells) for name, cells in rows if cells[0] != "-"]


def largest_batch(probe: ProbeResult) -> str:
    """The largest batch of a probe, or that there is none: not always is it memory that was missing."""
    if probe.max_batch_size is not None:
        return f"{probe.max_batch_size:,}"
    if any(each.purpose == "verify" for each in probe.attempts):
        return "nothing passed the final check"
    raises = bool(probe.attempts) and all(each.outcome == "user_error" for each in probe.attempts)
    return "nothing trains" if raises else "nothing fits"


CONFIGURATIONS = ("train with", "today")
"""What the columns of `configurations` are called."""


def batch_text(recommendation: Recommendation) -> str:
    """A batch size with how it is made up, where it is more than one micro-batch."""
    text = str(recommendation.global_batch_size)
    if recommendation.gradient_accumulation_steps > 1 or recommendation.world_size > 1:
        text += f" = {recommendation.micro_batch_size} × {recommendation.gradient_accumulation_steps} accumulated"
        text += f" × {recommendation.world_size} devices" if recommendation.world_size > 1 else ""
    return text


def machine(where: Environment) -> str:
    """The device and the versions that something was measured with, as far as they are known."""
    versions = [f"{name} {version}" for name, version in (("torch", where.torch), ("CUDA", where.cuda)) if version]
    return ", ".join([where.device, *versions])


def certificate(probe: ProbeResult) -> str:
    """Why the largest batch can be relied on, as one sentence without its subject."""
    parts = []
    if probe.verified_in_fresh_process:
        parts.append(f"ran {probe.verify_steps} steps, evaluation and saving in a fresh process")
    else:
        parts.append("not yet checked in a fresh process")
    if probe.first_failing_batch_size is not None:
        last = {attempt.batch_size: attempt.outcome for attempt in probe.attempts}
        parts.append(f"{probe.first_failing_batch_size:,} did not ({last.get(probe.first_failing_batch_size, 'fail')})")
    elif probe.limited_by:
        parts.append(_LIMITED_BY.get(probe.limited_by, probe.limited_by))
    if probe.peak_reserved_bytes and probe.memory_limit_bytes:
        parts.append(f"peak {size(probe.peak_reserved_bytes)} of {size(probe.memory_limit_bytes)}")
    return "; ".join(parts)


def ranks(found: DataParallel) -> str:
    """Several ranks in one sentence: the global batch, who limited it, and what their communication costs."""
    accumulated = found.global_batch_size // (found.batch_size * found.world_size)
    made_up = f"{found.batch_size:,} × " + (f"{accumulated} accumulated × " if accumulated > 1 else "")
    parts = [f"{found.world_size} with {found.strategy} ({found.backend})"]
    parts.append(f"global batch {found.global_batch_size:,} = {made_up}{found.world_size}")
    if found.limiting_rank is not None:
        parts.append(f"limited by rank {found.limiting_rank}")
    if found.communication_seconds is not None and found.step_seconds is not None:
        took = f"communication takes {duration(found.communication_seconds)} of a step's {duration(found.step_seconds)}"
        parts.append(f"{took} ({share(found.communication_share)})")
    elif found.step_seconds_without_communication is not None:
        parts.append("communication takes less than could be measured")
    if found.scaling_efficiency is not None:
        parts.append(f"scaling efficiency {share(found.scaling_efficiency)}")
    return "; ".join(parts)


def expected_times(found: Scaling) -> dict[str, list[str]]:
    """What to train with on 1, 2, 4 and 8 ranks: a column for each fact, a row for each world size."""
    return {
        "ranks": [str(each.world_size) for each in found.points],
        "batch": [f"{each.global_batch_size:,}" for each in found.points],
        "of each rank": [
            f"{each.micro_batch_size:,}"
            + (f" × {each.gradient_accumulation_steps}" if each.gradient_accumulation_steps > 1 else "")
            for each in found.points
        ],
        "learning rate": [number(each.learning_rate) for each in found.points],
        "time to target": [time_interval(each.time_to_target_seconds) for each in found.points],
        "": ["estimated" if each.is_estimate else "measured" for each in found.points],
    }


def step_time(fit: ThroughputFit) -> str:
    """The fitted step time, and where half of the peak speed is reached if that is a batch size."""
    text = f"{duration(fit.alpha_seconds)} + {duration(fit.beta_seconds_per_sample)} per sample"
    if fit.saturation_batch_size is not None and fit.saturation_batch_size >= 1:
        text += f"; half of the peak speed at batch {fit.saturation_batch_size:,.0f}"
    return text

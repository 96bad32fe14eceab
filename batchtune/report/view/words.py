"""The words of a result: each code's, and the sentences that are made from codes and figures, in one place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from textwrap import shorten

from batchtune.document import (
    DataParallel,
    Environment,
    Estimate,
    GradientClipping,
    MemoryDetail,
    Prior,
    ProbeResult,
    Recommendation,
    Target,
    ThroughputFit,
    Value,
)
from batchtune.report.view.model import Fact, Tone, facts
from batchtune.units import LEAST_PEAK, duration, number, share, size

OUTCOMES = {
    "oom": "out of memory",
    "kernel_limit": "kernel limit",
    "crash": "crashed",
    "timeout": "timed out",
    "user_error": "the task's code raised",
}
"""Of attempts that did not fit."""
IDLE = "machine idle (estimate)"
"""Said of times that are those of steps timed in turn, which nobody's runs took."""
_FAR_ABOVE = 1.02  # times the answer: a size that fitted is worth a word
_LIMITED_BY: dict[str, str | None] = {
    "max": "the largest size allowed",
    "dataset": "the size of the training set",
    "timeout": "the time that steps of larger sizes take",
}
_TONES: dict[str, Tone] = dict.fromkeys(("fit", "reached", "finished", "complete"), "good")
_TONES |= dict.fromkeys((*OUTCOMES, "diverged", "fail"), "bad")
_NAMED = 3  # GPUs before a note
_LONGEST_GIST = 150
_GIST = re.compile(rf".{{20,{_LONGEST_GIST}}}?(?=: |; |\. | \(|$)")


def tone(outcome: str) -> Tone:
    """Whether an outcome of an attempt or a run is welcome."""
    return _TONES.get(outcome, "caution")


def sentence(text: str) -> str:
    """A text with a capital and a full stop."""
    return text[:1].upper() + stopped(text[1:])


def stopped(text: str) -> str:
    """A text with a full stop."""
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."


def gist(text: str) -> str:
    """What a text begins with: as far as its reason, its remedy or its second sentence."""
    found = _GIST.match(text)
    return found[0] if found else shorten(text, _LONGEST_GIST, placeholder=" …")


def clipping_text(found: GradientClipping | None) -> str:
    """Gradient clipping in words; '' where there is none, or it is not known."""
    given = {"norm": found.norm, "each": found.value} if found else {}
    return ", ".join(f"{name} ≤ {number(value)}" for name, value in given.items() if value is not None)


def checkpointing_text(found: bool | None) -> str:
    """Activation checkpointing in a word; '' where it is as the task has it."""
    return {True: "on", False: "off", None: ""}[found]


def named_values(values: Mapping[str, Value]) -> str:
    """Arguments as one writes them in a call."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


def largest_batch(probe: ProbeResult) -> str:
    """The largest batch of a probe, or that there is none: not always is it memory that was missing."""
    return f"nothing {nothing_does(probe)}" if probe.max_batch_size is None else f"{probe.max_batch_size:,}"


def nothing_does(probe: ProbeResult) -> str:
    """What no batch size does, where there is no largest."""
    if any(each.purpose == "verify" for each in probe.attempts):
        return "passed the final check"
    raises = bool(probe.attempts) and all(each.outcome == "user_error" for each in probe.attempts)
    return ("runs" if probe.inference else "trains") if raises else "fits"


def batch_text(recommendation: Recommendation) -> str:
    """A batch size with how it is made up, where it is more than one micro-batch."""
    text = f"{recommendation.global_batch_size:,}"
    text += " tokens" if recommendation.batch_unit == "tokens" else ""
    if recommendation.gradient_accumulation_steps > 1 or recommendation.world_size > 1:
        text += f" = {recommendation.micro_batch_size:,} × {recommendation.gradient_accumulation_steps} accumulated"
        text += f" × {recommendation.world_size} devices" if recommendation.world_size > 1 else ""
    return text


def moment(text: str) -> str:
    """When something was measured, to the minute."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def machine(where: Environment) -> str:
    """The device and the versions that something was measured with, as far as they are known."""
    versions = [f"{name} {version}" for name, version in (("torch", where.torch), ("CUDA", where.cuda)) if version]
    return ", ".join([where.device, *versions])


def _limit_of(probe: ProbeResult) -> str | None:
    return _LIMITED_BY.get(probe.limited_by or "", probe.limited_by)


def certificate(probe: ProbeResult) -> str:
    """Why the largest batch can be relied on, as one sentence without its subject."""
    parts = []
    if probe.verified_in_fresh_process:
        ran = "forward passes without gradients" if probe.inference else "steps, evaluation and saving"
        parts.append(f"ran {probe.verify_steps} {ran} in a fresh process")
    else:
        parts.append("not yet checked in a fresh process")
    if probe.first_failing_batch_size is not None:
        failed = {attempt.batch_size: attempt for attempt in probe.attempts}.get(probe.first_failing_batch_size)
        how = "may not in every process" if failed and failed.kept_back_bytes else "did not"
        parts.append(f"{probe.first_failing_batch_size:,} {how} ({failed.outcome if failed else 'fail'})")
    elif probe.limited_by:
        by_memory = probe.limited_by == "memory"
        parts.append("the next size runs out of memory" if by_memory else f"limited by {_limit_of(probe)}")
    fitted = max((each.batch_size for each in probe.attempts if each.fits), default=0)
    if probe.verified_in_fresh_process and fitted > _FAR_ABOVE * (probe.max_batch_size or fitted):
        parts.append(f"{fitted:,} fitted in one process, and others may need more memory for it")
    if probe.peak_reserved_bytes is not None and probe.memory_limit_bytes:
        parts.append(f"peak {size(probe.peak_reserved_bytes, LEAST_PEAK)} of {size(probe.memory_limit_bytes)}")
    return "; ".join(parts)


def certificate_facts(probe: ProbeResult) -> list[Fact]:
    """The same, and more, fact by fact; those that are not known are left out."""
    failing, limit, peak = probe.first_failing_batch_size, probe.memory_limit_bytes, probe.peak_reserved_bytes
    failure = next((each for each in reversed(probe.attempts) if each.batch_size == failing and not each.fits), None)
    why = OUTCOMES.get(failure.outcome, failure.outcome) if failure else "did not run"
    ran = "forward passes" if probe.inference else "steps, then evaluation and saving,"
    checked = f"ran {probe.verify_steps} {ran} in a fresh process"
    of_limit = f" ({peak / limit:.1%} of the limit)" if peak and limit and peak >= LEAST_PEAK else ""
    checks = [each for each in probe.attempts if each.fits and each.batch_size == probe.max_batch_size]
    kept = checks[-1].kept_back_bytes if checks else None
    failures = sum(not attempt.fits for attempt in probe.attempts)
    known = {
        "precision": probe.precision,
        "of": "inference: forward passes without gradients" if probe.inference else None,
        "largest that fits": largest_batch(probe),
        "checked": checked if probe.verified_in_fresh_process else "not yet in a fresh process",
        "smallest that fails": "none was met" if failing is None else f"{failing:,} ({why})",
        "reason given": failure.message if failure else None,
        "limited by": _limit_of(probe),
        "peak reserved": f"{size(peak, LEAST_PEAK)}{of_limit}" if peak is not None else None,
        "kept back": f"{size(kept)}, as the same training takes unlike amounts in unlike processes" if kept else None,
        "peak allocated": size(probe.peak_allocated_bytes, LEAST_PEAK),
        "memory limit": size(limit),
        "attempts": f"{len(probe.attempts)}, of which {failures} failed" if probe.attempts else None,
        "took": duration(probe.seconds) if probe.seconds else None,
    }
    return facts(known)


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


def step_time(fit: ThroughputFit) -> str:
    """The fitted step time as far as the steps measured bear it out, and where nearly all of the speed is reached."""
    said, half, near = [], fit.saturation_batch_size, fit.batch_size_within_5_percent
    if fit.holds:
        error = f"fitted, ±{max(0.01, fit.error_share or 0.0):.0%}"
        fixed, each = duration(fit.alpha_seconds), f"{duration(fit.beta_seconds_per_sample)} per sample"
        line = f"{fixed} + {each}" if fit.alpha_seconds else each
        said.append(f"{line if fit.beta_seconds_per_sample else f'{fixed} at every size timed'} ({error})")
        said += [f"half of the peak speed at batch {half:,.0f}"] if half is not None and half >= 1 else []
    elif fit.holds is False:
        said.append("too noisy for a fit")
    said += [f"within 5% of the best measured speed from batch {near:,}"] if near is not None else []
    return "; ".join(said)


def target_text(target: Target) -> str:
    """What counts as solved."""
    return f"{target.metric} {'at most' if target.goal == 'minimize' else 'at least'} {number(target.value, 4)}"


def start_of_search(prior: Prior) -> list[Fact]:
    """Why the search looked where it did."""
    at = f" at batch {prior.start_batch_size:,}" if prior.start_batch_size else ""
    about = f"about {prior.learning_rate:.2g}{at}, give or take {prior.learning_rate_decades:.1f} decades"
    reasons = {"why these batch sizes": prior.batch_sizes_reason, "why this micro-batch": prior.micro_batch_reason}
    return facts(reasons | {"why these learning rates": f"{about}: {prior.learning_rate_reason}"}, detail=True)


def estimated(row: Estimate, largest: int | None, *, down: bool = False) -> str:
    """One of an estimate's sizes with the digits that its error leaves; '-' where there is none.

    Marked where larger ones were not looked at: that size is what was looked at, and whole.
    """
    if largest is None:
        return "-"
    if row.limited_by == "max" and largest >= (row.max_batch_size or 0):
        return f"≥{largest:,}"
    digits = max(2, math.ceil(-math.log10(row.error_share))) if row.error_share else 2
    unit = 10 ** max(0, len(str(largest)) - digits)
    return f"{(largest // unit if down else round(largest / unit)) * unit:,}"


def estimated_safe(row: Estimate) -> str:
    """The safe size, rounded down."""
    return estimated(row, row.safe_max_batch_size, down=True)


def estimate_notes(estimates: Sequence[Estimate]) -> Iterator[str]:
    """Every note once, with the GPUs it is about where those are not all."""
    about: dict[str, list[str]] = {}
    for row in estimates:
        for note in row.notes:
            about.setdefault(note, []).append(row.gpu)
    for note, rows in about.items():
        names = list(dict.fromkeys(rows))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        whose = "" if len(rows) == len(estimates) else f" for {', '.join(names[:_NAMED])}{more}"
        yield f"note{whose}: {note}"


def held_most(row: MemoryDetail) -> str:
    """What holds the most activations at the estimated peak, and when that is."""
    first = row.holders[0]
    place = f" ({first.line})" if first.line else ""
    return (
        f"at the peak, in {row.peak_moment}, most activations are held by {first.module}{place}: "
        f"{size(first.activation_bytes)} at {row.precision}, estimated"
    )

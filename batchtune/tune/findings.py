"""What is to be said of a study besides its numbers, as warnings of its document."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from batchtune.config.schema import Config
from batchtune.device.sharing import sharing_warnings
from batchtune.document import Environment, Prior, ProbeResult, Recommendation, Target, Trial
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.prior import as_one_device, step_seconds, with_loading
from batchtune.tune.plan.space import rates_to_search
from batchtune.tune.plan.tokens import probe_in_tokens, token_batches
from batchtune.tune.verdict.scores import slowdown
from batchtune.units import duration, number
from batchtune.vocabulary import Kind

_INPUT_BOUND = 2.0  # times as long as a step alone: then it is mostly the data that training waits for
_ANOTHER_LENGTH = 1.5  # times as long, or as short: the schedule's rates are others for most of a run
_TWICE = 2  # a rank that is slow in a single run may be so by accident
_HARDLY = 0.02  # of where training starts
_AT = 1.1  # times a bound: near enough to have been kept from going on
UNEVEN = 0.2  # of the counted time; less is the ordinary noise of a machine


def device_warnings(environment: Environment | None, probe: ProbeResult | None) -> list[str]:
    """What there is to say of the device, and what the probe said so far."""
    return sharing_warnings(environment) + (list(probe.warnings) if probe else [])


def probe_warnings(config: Config, probe: ProbeResult, prior: Prior | None, device: str) -> list[str]:
    """What the probe, and what was measured after it, say of the steps to come."""
    ranks = config.ranks.of_each
    counted = probe_in_tokens(probe, token_batches(config, probe))
    loading = loading_warnings(counted, prior, device, ranks) if prior else []
    return loading + baseline_warnings(as_one_device(probe, ranks), config.baseline.batch_size)


def loading_warnings(probe: ProbeResult, prior: Prior, device: str, world_size: int = 1) -> list[str]:
    """One where steps at the batch size that the search starts with wait for their data for most of the time.

    The probe is that of one of so many ranks.
    """
    size, seconds = prior.start_batch_size, prior.loader_seconds_per_sample
    alone = as_one_device(probe, world_size).throughput_fit
    loaded = as_one_device(with_loading(probe, seconds, device), world_size).throughput_fit
    if alone is None or loaded is None or not seconds or not size:
        return []
    slower = step_seconds(loaded, size) / max(step_seconds(alone, size), 1e-9)
    if slower < _INPUT_BOUND:
        return []
    rate = f"{1 / seconds:,.0f} samples/s{' on each rank' if world_size > 1 else ''}"
    told = f"input-bound: loading data makes steps at batch {size:,} {number(slower)} times as long ({rate})"
    return [f"{told}: load it with more workers, or prepare it beforehand (decoded, collated), and tune again"]


def default_warnings(config: Config, opened: Opened) -> list[str]:
    """One where nobody has given the baseline, and the task does not say that it is the default."""
    known = {key: told for key, told in opened.current_settings if told}
    taken = {key: getattr(config.baseline, key) for key in config.baseline.defaults}
    taken = {key: value for key, value in taken.items() if key not in known or known[key][0] != value}
    if not taken:
        return []
    named = " and ".join(f"baseline.{key}={value}" for key, value in taken.items())
    says = " and ".join(f"{known[key][0]} in {known[key][1]}" for key in taken if key in known)
    instead = f", where the task says {says}" if says else ""
    return [f"'today' is {named} by default{instead}: set what you train with, and start over with --fresh"]


def baseline_warnings(probe: ProbeResult, batch_size: int) -> list[str]:
    """One where bounds or slow steps keep the probe below the baseline's batch size, so that it was accumulated."""
    most, ended = probe.max_batch_size, probe.limited_by
    if most is None or ended not in {"max", "timeout"} or batch_size <= most:
        return []
    bound = "what batch_size allows" if ended == "max" else "what budget.run has time for"
    text = f"the baseline's batch {batch_size:,} is above {bound} ({most:,} at once): it was measured in"
    return [f"{text} accumulated micro-batches, which may be slower than what you run today"]


def target_warnings(target: Target, trials: Sequence[Trial] = ()) -> list[str]:
    """One where the baseline's run, which sets the target, diverged before its end or hardly learnt."""
    curve = next((trial.curve for trial in trials if trial.role == "baseline"), None)
    start = curve[0].value if curve else None
    if target.baseline_diverged_after_seconds is None:
        if start is None or target.value is None or not 0 < start - target.value < _HARDLY * start:
            return []
        text = f"the target is only {1 - target.value / start:.1%} below where training starts"
        return [f"{text} ({target.metric} {number(start)}): your baseline hardly learns; is its learning rate right?"]
    text = "the baseline diverged (NaN, infinite, or long worse than at its start) before its budget.run was over"
    return [f"{text}; what it had reached is the target: set objective.target, or fix it, and start over with --fresh"]


def precision_warnings(config: Config, opened: Opened) -> list[str]:
    """One where today's setting ran in a half precision that nobody has asked for, or in fp32 since that is refused."""
    ((precision, _), *_) = opened.precision
    if opened.instead:
        return [opened.instead]
    if config.precision != "auto" or precision == "fp32":
        return []
    text = f"what you run today was run in {precision}, too, which this device does well"
    return [f"{text}: if you train in fp32, precision=[fp32,{precision}] with --fresh compares with that"]


def schedule_warnings(opened: Opened, trials: Sequence[Trial], run: float) -> list[str]:
    """Where the schedule waits for the end of an epoch that no run has come to, or is not as long as the user's own.

    Schedules were made for `run` seconds of training.
    """
    scheduler, size = opened.optimizer_settings.scheduler, opened.train_size
    ran = [trial for trial in trials if trial.curve]
    today = next((trial for trial in ran if trial.role == "baseline" and trial.total_steps), None)
    steps = opened.training_steps(today.batch_size) if today else None
    if today is not None and today.total_steps is not None and steps is not None:
        share = steps / today.total_steps
        if not 1 / _ANOTHER_LENGTH <= share <= _ANOTHER_LENGTH:
            text = f"the schedule was made for {today.total_steps:,} optimizer steps of batch {today.batch_size}"
            needed = f"budget.run={_seconds(share * run)} budget.total={_seconds(10 * share * run)} --fresh"
            return [f"{text}, and your training has {steps:,}: {needed} is as long"]
    if not ran or size is None or "ReduceLROnPlateau" not in (scheduler or ""):
        return []
    if any(trial.curve[-1].samples + trial.batch_size > size for trial in ran):
        return []
    text = f"no run came to the end of an epoch ({size:,} samples), where ReduceLROnPlateau changes the learning rate"
    return [f"{text}: they tell nothing of it; raise budget.run"]


def _seconds(value: float) -> str:
    """A duration as a configuration takes it."""
    return f"{math.ceil(value)}s" if value >= 10 else f"{value:.2g}s"  # noqa: PLR2004 - of which a tenth matters


def bound_warnings(config: Config, found: Recommendation | None) -> list[str]:
    """One where the answer's learning rate is an end of what was searched."""
    ends = dict(zip(("min", "max"), rates_to_search(config), strict=True))
    rate = found.learning_rate if found else None
    if rate is None or ends["max"] <= _AT * ends["min"]:
        return []
    at = [end for end, bound in ends.items() if 1 / _AT <= rate / bound <= _AT]
    text = f"learning rate {number(rate)} is at the end of what was searched"
    return [
        f"{text}: beyond it there may be a better one, so move learning_rate.{end} and start over with --fresh"
        for end in at
    ]


def search_warnings(trials: Sequence[Trial], enough: str, kind: Kind = "time_to_target") -> list[str]:
    """One where a study that has ended had no time to search, or where the task raised errors in it."""
    reached = [trial.time_to_target_seconds for trial in trials if trial.time_to_target_seconds]
    best = min(reached, default=0.0) if kind == "time_to_target" else 0.0
    searched = [trial for trial in trials if trial.role == "search" and trial.outcome]
    if not any(trial.outcome != "capped" or (trial.training_seconds or 0.0) >= best for trial in searched):
        tried = f"trained as long as the fastest run to the target ({duration(best)})" if searched else "was tried"
        text = f"no other configuration {tried}: probe and baseline took nearly all of budget.total"
        return [f"{text}; start again with budget.total={enough}"]
    raised = [trial.message for trial in searched if trial.outcome == "user_error"]
    if not raised:
        return []
    runs = f"{len(raised)} of {len(searched)} runs of the search, which tell nothing"
    return [f"the task raised an error in {runs}: {raised[-1]}"]


def straggler_warnings(trials: Sequence[Trial]) -> list[str]:
    """One where the same rank was far slower than the others in most runs, twice at least."""
    ran = [trial for trial in trials if trial.curve and trial.outcome]
    slow = [trial.straggler for trial in ran if trial.straggler]
    if not slow:
        return []
    rank = statistics.mode(each.rank for each in slow)
    times = [each.times for each in slow if each.rank == rank]
    if len(times) < _TWICE or 2 * len(times) <= len(ran):
        return []
    text = (
        f"rank {rank} is {number(statistics.median(times))} times as slow as the others, in {len(times)} of {len(ran)}"
    )
    return [f"{text} runs, and they wait for it in every step: look at its device, what else runs there, and its data"]


def uneven_warnings(trials: Sequence[Trial], found: Recommendation | None) -> list[str]:
    """One where runs of the recommendation or the baseline took much longer than they count.

    Stretches that are far slower than the usual pace count as if they were not: mostly it is another program that slows
    them, but batches of very unequal length look the same.
    """
    ours = None if found is None else (found.global_batch_size, found.learning_rate)
    shown = [each for each in trials if each.role != "search" or (each.batch_size, each.learning_rate) == ours]
    times = slowdown(shown)
    if times <= 1 + UNEVEN:
        return []
    longer = f"by the clock, training took {number(times)} times as long as the times shown"
    text = f"{longer}: stretches far slower than the usual pace are put down to other programs"
    rest = "where it is your data, in batches of very unequal length, times are that much longer for you"
    return [f"{text} on this machine; {rest}"]

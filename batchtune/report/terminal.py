"""The report in a terminal: the answer first, then the evidence, then what to paste."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchtune.report.export import snippet
from batchtune.report.precisions import comparison
from batchtune.report.units import duration, number, share, size
from batchtune.results import Attempt, Estimate, Interval, ProbeResult, Recommendation, Result, Trial

_COLOURS = {"fit": "green", "oom": "red", "complete": "green", "pruned": "yellow", "fail": "red"}
_MAX_TRIALS = 12
_MAX_WHY = 96  # of characters; the message of a failure that matters is told in full elsewhere
_LIMITED_BY = {
    "memory": "the next size runs out of memory",
    "max": "that is the most that was allowed",
    "dataset": "that is the whole training set",
}


def render(result: Result) -> RenderableType:
    """The whole report of one result."""
    return Group(*_parts(result))


def _parts(result: Result) -> Iterator[RenderableType]:
    if result.status != "complete":
        reason = f": {result.error.message}" if result.error else ""
        yield Text(f"{result.status}{reason}", style="bold yellow" if result.status == "interrupted" else "bold red")
    if result.recommendation is not None:
        yield _recommendation(result)
    yield from _evidence(result)
    if result.recommendation is not None:
        yield Text("\npaste", style="bold")
        yield Text(snippet(result), style="cyan")
    for warning in result.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    if result.environment is not None:
        where = [result.environment.device, f"torch {result.environment.torch}"]
        where += [f"CUDA {result.environment.cuda}"] if result.environment.cuda else []
        yield Text(f"measured on {', '.join(where)}, batchtune {result.batchtune_version}", style="dim")


def _evidence(result: Result) -> Iterator[RenderableType]:
    """What the answer rests on: target, probe, runs, or estimates."""
    if result.target is not None and result.target.value is not None:
        target = result.target
        sign = "at most" if target.goal == "minimize" else "at least"
        yield Text.assemble(("target  ", "bold"), f"{target.metric} {sign} {target.value:.4g}: {target.reason}")
    yield from _probes(result)
    if result.trials:
        yield _trials(result)
    if result.estimates:
        yield _estimates(result.estimates)
        notes = {note: None for estimate in result.estimates for note in estimate.notes}
        yield from (Text(f"note: {note}", style="dim") for note in notes)


def _interval(value: Interval | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{number(value.median)}{unit} ({number(value.low)} to {number(value.high)})"


def batch_text(recommendation: Recommendation) -> str:
    """A batch size with how it is made up, where it is more than one micro-batch."""
    text = str(recommendation.global_batch_size)
    if recommendation.gradient_accumulation_steps > 1 or recommendation.world_size > 1:
        text += f" = {recommendation.micro_batch_size} × {recommendation.gradient_accumulation_steps} accumulated"
        text += f" × {recommendation.world_size} devices" if recommendation.world_size > 1 else ""
    return text


def _recommendation(result: Result) -> RenderableType:
    found = result.recommendation
    assert found is not None  # noqa: S101 - the caller looked
    table = Table(box=None, show_header=True, header_style="bold", pad_edge=False)
    table.add_column("")
    table.add_column("train with", style="bold green")
    rows = [
        ("batch size", batch_text(found)),
        ("learning rate", number(found.learning_rate)),
        ("precision", found.precision),
    ]
    if found.time_to_target_seconds:
        rows.append(("time to target", _interval(found.time_to_target_seconds, " s")))
    if found.value:
        rows.append((result.target.metric if result.target else "metric", _interval(found.value)))
    if found.speedup_over_baseline:
        rows.append(("speed-up", _interval(found.speedup_over_baseline, "×")))
    base = result.baseline
    if base is not None:
        table.add_column("today")
        today = [batch_text(base), number(base.learning_rate), base.precision]
        today += [_interval(base.time_to_target_seconds, " s")] if base.time_to_target_seconds else []
        today += [_interval(base.value)] if base.value else []
        today += ["1×"] * (len(rows) - len(today))
        for (name, value), other in zip(rows, today, strict=True):
            table.add_row(name, value, other)
    else:
        for name, value in rows:
            table.add_row(name, value)
    title = f"[bold]{result.name or 'batchtune'}[/bold]" if "[" not in result.name else "batchtune"
    return Panel(Group(table, Text(f"\n{found.reason}", style="italic")), title=title, box=box.ROUNDED, expand=False)


def _probes(result: Result) -> Iterator[RenderableType]:
    if result.probes and len(result.probes) > 1:
        yield comparison(result.probes, chosen=result.probe)
    for probe in result.probes or ([result.probe] if result.probe else []):
        yield from _probe(probe, details=result.kind == "probe")


def _probe(probe: ProbeResult, *, details: bool) -> Iterator[RenderableType]:
    if probe.max_batch_size is None:
        yield Text(f"probe {probe.precision}: nothing fits", style="bold red")
    else:
        yield Text.assemble(
            (f"probe {probe.precision}  ", "bold"),
            ("largest batch ", ""),
            (f"{probe.max_batch_size:,}", "bold green"),
            f" {certificate(probe)}",
        )
    if details:
        yield attempts_table(probe.attempts, probe.memory_limit_bytes)
        if probe.throughput:
            yield _throughput(probe)
    yield from _speed(probe)


def _speed(probe: ProbeResult) -> Iterator[RenderableType]:
    fit = probe.throughput_fit
    if fit is not None:
        line = f"step time {duration(fit.alpha_seconds)} + {duration(fit.beta_seconds_per_sample)} per sample"
        if fit.saturation_batch_size:
            line += f"; half of the peak speed at batch {fit.saturation_batch_size:.0f}"
        yield Text(f"{line}; within 5 % of the best measured speed from batch {fit.batch_size_within_5_percent}")
    if probe.input_pipeline is not None:
        yield Text.assemble(("data  ", "bold"), probe.input_pipeline.verdict)


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


def attempts_table(attempts: list[Attempt], limit_bytes: int | None) -> Table:
    """Every attempt in order, its memory drawn against the limit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "outcome", "peak", "of limit", "step"):
        table.add_column(name, justify="left" if name in {"outcome", "of limit"} else "right", no_wrap=True)
    table.add_column("why", max_width=48)  # the one column that gives way in a narrow terminal
    for attempt in attempts:
        peak = attempt.peak_reserved_bytes if attempt.fits else None
        why = attempt.message or ("final check" if attempt.purpose == "verify" else "")
        outcome = Text(attempt.outcome, style=_COLOURS.get(attempt.outcome, "yellow"))
        bar = _bar(peak / limit_bytes) if peak and limit_bytes else ""
        step = duration(attempt.step_seconds) if attempt.fits else "-"
        table.add_row(f"{attempt.batch_size:,}", outcome, size(peak), bar, step, Text(shorten(why, _MAX_WHY)))
    return table


def _throughput(probe: ProbeResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = {"batch": [f"{point.batch_size:,}" for point in probe.throughput]}
    columns["samples/s"] = [number(point.samples_per_second) for point in probe.throughput]
    best = max(point.samples_per_second for point in probe.throughput)
    columns[" "] = [_bar(point.samples_per_second / best) for point in probe.throughput]
    columns["step"] = [duration(point.step_seconds) for point in probe.throughput]
    sensors = {
        "MFU": [share(point.mfu) for point in probe.throughput],
        "GPU": [share(point.gpu_utilization) for point in probe.throughput],
        "memory bus": [share(point.memory_controller_utilization) for point in probe.throughput],
        "memory": [size(point.memory_used_bytes) for point in probe.throughput],
        "power": [f"{number(point.power_watts)} W" if point.power_watts else "-" for point in probe.throughput],
        "°C": [number(point.temperature_celsius) for point in probe.throughput],
        "J/sample": [number(point.joules_per_sample) for point in probe.throughput],
        "held back by": [", ".join(point.throttle_reasons or []) or "-" for point in probe.throughput],
    }
    columns |= {name: values for name, values in sensors.items() if any(value != "-" for value in values)}
    for name in columns:
        table.add_column(name, justify="left" if name == " " else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _estimates(estimates: list[Estimate]) -> Table:
    """Largest batches by calculation, and how sure each is; nothing here was measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="estimated, not measured", title_justify="left")
    for name in ("GPU", "memory", "precision", "largest batch", "safe", "samples/s", "sure"):
        table.add_column(name, justify="left" if name in {"GPU", "precision", "sure"} else "right", no_wrap=True)
    for each in sorted(estimates, key=lambda estimate: (estimate.memory_bytes, estimate.gpu)):
        table.add_row(
            each.gpu,
            size(each.memory_bytes),
            each.precision,
            *("-" if most is None else f"{most:,}" for most in (each.max_batch_size, each.safe_max_batch_size)),
            number(each.samples_per_second),
            (each.confidence or "-").partition(" ")[0],
        )
    return table


def _bar(fraction: float, width: int = 12) -> str:
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _trials(result: Result) -> Table:
    trials = [trial for trial in result.trials or [] if trial.state != "waiting"]
    timed = any(trial.time_to_target_seconds is not None for trial in trials)
    minimize = result.target is None or result.target.goal == "minimize"

    def rank(trial: Trial) -> float:
        value = trial.time_to_target_seconds if timed else trial.value
        return float("inf") if value is None else value if timed or minimize else -value

    shown = sorted(trials, key=rank)[:_MAX_TRIALS]
    columns = {
        "run": [str(trial.number) for trial in shown],
        "role": [trial.role for trial in shown],
        "batch": [f"{trial.batch_size:,}" for trial in shown],
        "learning rate": [number(trial.learning_rate) for trial in shown],
        "precision": [trial.precision for trial in shown],
        "time to target": [duration(trial.time_to_target_seconds) for trial in shown],
        "best metric": [number(trial.value, 4) for trial in shown],
        "outcome": [trial.outcome or trial.state for trial in shown],
    }
    if len({trial.precision for trial in shown}) == 1:
        del columns["precision"]  # the recommendation names it
    if not timed:
        del columns["time to target"]
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{len(shown)} best of {len(trials)} runs", title_justify="left"
    )
    for name in columns:
        table.add_column(name, justify="left" if name in {"role", "precision", "outcome"} else "right")
    for trial, row in zip(shown, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*row[:-1], Text(row[-1], style=_COLOURS.get(trial.state, "")))
    return table

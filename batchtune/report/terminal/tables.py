"""The tables of the terminal report: attempts, speeds, precisions, runs and estimates."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from batchtune.document import Document, Estimate, MemoryDetail, ProbeResult, Scaling, Trial
from batchtune.report.terminal.fitted_table import Column, FittedTable, bar
from batchtune.report.view.select import JOULES, VALUE, estimated, is_of, named_values, objective, score
from batchtune.report.view.words import expected_times, largest_batch
from batchtune.units import aligned, bytes_unit, number, share, size, sizes, times

COLOURS = {"fit": "green", "oom": "red", "complete": "green", "pruned": "yellow", "fail": "red"}
"""Of the outcomes of attempts and the states of trials; any other outcome is yellow."""

_MAX_TRIALS = 12
_MAX_WHY = 96  # of characters; the message of a failure that matters is told in full elsewhere


def attempts(probe: ProbeResult) -> FittedTable:
    """Every attempt in order, its memory drawn against the limit."""
    tried, limit = probe.attempts, probe.memory_limit_bytes
    peaks = [attempt.peak_reserved_bytes if attempt.fits else None for attempt in tried]
    memory_unit, memory = sizes(peaks)
    step_unit, steps = times([attempt.step_seconds if attempt.fits else None for attempt in tried])
    why = [attempt.message or ("final check" if attempt.purpose == "verify" else "") for attempt in tried]
    columns = [
        Column("batch", [f"{attempt.batch_size:,}" for attempt in tried]),
        Column(
            "outcome",
            [attempt.outcome for attempt in tried],
            left=True,
            styles=[COLOURS.get(attempt.outcome, "yellow") for attempt in tried],
        ),
        Column(f"peak, {memory_unit}", memory),
        _bars("of limit", [peak / limit if peak and limit else None for peak in peaks], spare=3),
        Column(f"step, {step_unit}", steps, spare=2),
        Column("why", [shorten(reason, _MAX_WHY) for reason in why], spare=1, left=True, wraps=True),
    ]
    return FittedTable(f"attempts at {probe.precision}, in their order", columns)


def _bars(name: str, shares: Sequence[float | None], *, spare: int) -> Column:
    cells = ["" if share is None else bar(share) for share in shares]
    return Column(name, cells, spare, left=True, styles=["cyan"] * len(cells))


def throughput(probe: ProbeResult) -> FittedTable:
    """Speed at each size timed, and what the sensors said that were there."""
    points = probe.throughput
    best = max(point.samples_per_second for point in points)
    step_unit, steps = times([point.step_seconds for point in points])
    memory_unit, memory = sizes([point.memory_used_bytes for point in points])
    columns = [
        Column("batch", [f"{point.batch_size:,}" for point in points]),
        Column("samples/s", aligned([number(point.samples_per_second) for point in points])),
        _bars(" ", [point.samples_per_second / best for point in points], spare=8),
        Column(f"step, {step_unit}", steps, spare=1),
        Column("MFU", [share(point.mfu) for point in points], spare=3),
        Column("GPU busy", [share(point.gpu_utilization) for point in points], spare=2),
        Column("memory bus", [share(point.memory_controller_utilization) for point in points], spare=7),
        Column(f"used, {memory_unit}", memory, spare=5),
        Column("power, W", aligned([number(point.power_watts) for point in points]), spare=4),
        Column("°C", aligned([number(point.temperature_celsius) for point in points]), spare=6),
        Column("J/sample", aligned([number(point.joules_per_sample) for point in points]), spare=5),
        Column(
            "held back by",
            [", ".join(point.throttle_reasons or []) for point in points],
            spare=4,
            left=True,
            wraps=True,
        ),
    ]
    return FittedTable(f"throughput at {probe.precision}", columns)


def precisions(probes: Sequence[ProbeResult], *, chosen: ProbeResult | None) -> FittedTable:
    """One row for each precision: largest batch, peak there, best speed and the batch size it came from.

    Args:
        probes: one for each precision.
        chosen: the one that stands for the result; its row stands out.
    """
    best = [max(probe.throughput, key=lambda point: point.samples_per_second, default=None) for probe in probes]
    memory_unit, memory = sizes([probe.peak_reserved_bytes for probe in probes])
    largest = [largest_batch(probe) for probe in probes]
    columns = [
        Column("precision", [probe.precision for probe in probes], left=True),
        Column("largest batch", largest),
        Column(f"peak, {memory_unit}", memory, spare=3),
        Column("samples/s", aligned([number(point.samples_per_second if point else None) for point in best]), spare=1),
        Column("at batch", [f"{point.batch_size:,}" if point else "-" for point in best], spare=2),
        Column("MFU", [share(point.mfu if point else None) for point in best], spare=4),
    ]
    strong = [row for row, probe in enumerate(probes) if chosen is not None and probe.precision == chosen.precision]
    return FittedTable("precisions compared, each at its best speed", columns, strong)


def estimates(result: Document) -> FittedTable:
    """Largest batches by calculation, and how sure each is; nothing here was measured."""
    rows = sorted(result.estimates or [], key=lambda estimate: (estimate.memory_bytes, estimate.gpu))
    memory_unit, memory = sizes([row.memory_bytes for row in rows])

    def counts(key: str) -> list[str]:
        return [estimated(row, getattr(row, key)) for row in rows]

    columns = [
        Column("GPU", [row.gpu for row in rows], left=True, wraps=True),
        Column(memory_unit, memory, spare=3),
        Column("precision", [row.precision for row in rows], spare=2, left=True),
        Column("largest", counts("max_batch_size")),
        Column("safe", counts("safe_max_batch_size")),
        Column("expandable", counts("expandable_segments_max_batch_size"), spare=5),
        Column("samples/s", aligned([number(row.samples_per_second) for row in rows]), spare=2),
        Column("samples/J", aligned([number(row.samples_per_joule) for row in rows]), spare=4),
        Column("sure", [_sure(row) for row in rows], spare=1, left=True),
    ]
    return FittedTable("largest micro-batch on each GPU, estimated, not measured", columns)


def memory_details(result: Document) -> FittedTable:
    """What memory is for at the estimated peak of each precision, and what holds the most activations."""
    rows = result.details or []
    unit, scale = bytes_unit(max(row.peak_allocated_bytes for row in rows))

    def held(key: str) -> list[str]:
        return aligned([number(getattr(row, key) / scale) for row in rows])

    phases = {
        "parameters": "parameters_bytes",
        "gradients": "gradients_bytes",
        "optimizer": "optimizer_states_bytes",
        "activations": "activations_bytes",
        "temporary": "temporaries_bytes",
    }
    columns = [
        Column("precision", [row.precision for row in rows], left=True, spare=2),
        Column("batch", [f"{row.batch_size:,}" for row in rows]),
        Column("peak", held("peak_allocated_bytes")),
        *(Column(name, held(key), spare=3) for name, key in phases.items()),
        Column("peak in", [row.peak_moment for row in rows], left=True, spare=4),
    ]
    return FittedTable(f"what memory is for at its peak, estimated, {unit}", columns)


def held_most(row: MemoryDetail) -> str:
    """What holds the most activations at the estimated peak, and when that is."""
    first = row.holders[0]
    place = f" ({first.line})" if first.line else ""
    return (
        f"at the peak, in {row.peak_moment}, most activations are held by {first.module}{place}: "
        f"{size(first.activation_bytes)} at {row.precision}, estimated"
    )


def _sure(row: Estimate) -> str:
    """The confidence with its error band: 'high (±4% of memory)' in fewer characters."""
    return (row.confidence or "-").replace("(", "").replace(" of memory)", "")


def scaling(found: Scaling) -> FittedTable:
    """What several ranks would take."""
    spare = {"of each rank": 2}
    spare = {"of each rank": 2, "learning rate": 1}
    columns = [
        Column(name, cells, spare.get(name, 0), left=not name, wraps=name.startswith("time"))
        for name, cells in expected_times(found).items()
    ]
    return FittedTable("on several devices", columns)


def trials(result: Document) -> FittedTable:
    """The best runs of a study, those of the recommended configuration marked."""
    ran = [trial for trial in result.trials or [] if trial.state != "waiting"]
    key = objective(result)
    key = key if any(score(trial, key) is not None for trial in ran) else VALUE  # nothing got there yet
    minimize = result.target is None or result.target.goal == "minimize"

    def rank(trial: Trial) -> float:
        value = score(trial, key)
        return float("inf") if value is None else value if key != VALUE or minimize else -value

    shown = sorted(ran, key=rank)[:_MAX_TRIALS]
    unit, seconds = times([trial.time_to_target_seconds for trial in shown])
    joules = [number(trial.energy_to_target_joules) for trial in shown]
    several = len({trial.precision for trial in shown}) > 1  # else the recommendation names it
    metric = result.target.metric if result.target else "metric"
    strong = [row for row, trial in enumerate(shown) if is_of(trial, result.recommendation)]
    columns = [
        Column("", ["●" if row in strong else "" for row in range(len(shown))]),
        Column("run", [str(trial.number) for trial in shown], spare=4),
        Column("role", [trial.role for trial in shown], spare=2, left=True),
        Column("batch", [f"{trial.batch_size:,}" for trial in shown]),
        Column("learning rate", aligned([number(trial.learning_rate) for trial in shown])),
        Column("optimizer", [named_values(trial.optimizer_arguments) for trial in shown], spare=3, left=True),
        Column("precision", [trial.precision if several else "" for trial in shown], spare=2, left=True),
        Column(f"to target, {unit}", seconds, spare=3 if key == JOULES else 0),
        Column("to target, J", aligned(joules), spare=0 if key == JOULES else 3),
        Column(f"best {metric}", aligned([number(trial.value, 4) for trial in shown]), spare=0 if key == VALUE else 3),
        Column(
            "outcome",
            [trial.outcome or trial.state for trial in shown],
            spare=1,
            left=True,
            styles=[COLOURS.get(trial.state, "") for trial in shown],
        ),
    ]
    count = f"the {len(shown)} best of {len(ran)} runs" if len(shown) < len(ran) else "all runs, best first"
    title = count + ("; ● with what is recommended" if strong else "")
    return FittedTable(title, columns, strong)

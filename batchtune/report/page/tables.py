"""The tables of the HTML report: runs, attempts, precisions and estimates."""

from __future__ import annotations

from batchtune.document import Document, ProbeResult, Trial
from batchtune.report.page.markup import Markup, table, tag
from batchtune.report.view.select import estimated, is_of, named_values, probes_of
from batchtune.report.view.words import expected_times, ranks
from batchtune.units import duration, number, share, size

_Cell = object
_PRECISION = 5  # its column among those of the runs


def _sortable(shown: str, value: float | None) -> _Cell:
    """A cell that is sorted by its value; without one it stays at the end."""
    return (shown, "" if value is None else repr(value))


def _count(number_of: int, name: str) -> str:
    return f"{number_of:,} {name}{'' if number_of == 1 else 's'}"


def trials(result: Document) -> Markup:
    """Every run of the study, which its reader can sort."""
    metric = result.target.metric if result.target else "metric"
    columns = [
        ("run", True),
        ("role", False),
        ("batch", True),
        ("micro × acc.", True),
        ("learning rate", True),
        ("precision", False),
        ("to target", True),
        ("energy", True),
        ("samples", True),
        (f"best {metric}", True),
        ("trained", True),
        ("outcome", False),
        ("note", False),
    ]
    shown = [trial for trial in result.trials or [] if trial.state != "waiting"]
    marked = ["best" if is_of(trial, result.recommendation) else None for trial in shown]
    rows = [_run(trial) for trial in shown]
    if len({trial.precision for trial in shown}) == 1:
        rows = [[*row[:_PRECISION], "-", *row[_PRECISION + 1 :]] for row in rows]  # the recommendation names it
    caption = _count(len(shown), "run") + ("; those of the recommended configuration are marked" if any(marked) else "")
    return table(columns, rows, caption=caption, sortable=True, marked=marked)


def _run(trial: Trial) -> list[_Cell]:
    samples, joules = trial.samples_to_target, trial.energy_to_target_joules
    accumulated = (trial.gradient_accumulation_steps or 1) > 1
    return [
        _sortable(str(trial.number), trial.number),
        trial.role,
        _sortable(f"{trial.batch_size:,}", trial.batch_size),
        f"{trial.micro_batch_size} × {trial.gradient_accumulation_steps}" if accumulated else "-",
        _sortable(number(trial.learning_rate), trial.learning_rate),
        trial.precision,
        _sortable(duration(trial.time_to_target_seconds), trial.time_to_target_seconds),
        _sortable("-" if joules is None else f"{number(joules)} J", joules),
        _sortable("-" if samples is None else f"{samples:,}", samples),
        _sortable(number(trial.value, 4), trial.value),
        _sortable(duration(trial.training_seconds), trial.training_seconds),
        tag("span", trial.outcome or trial.state, class_=f"outcome {trial.outcome or trial.state}"),
        ", ".join(filter(None, [named_values(trial.optimizer_arguments), trial.message])) or "-",
    ]


def scaling(result: Document) -> Markup | None:
    """What several ranks would take, and which were timed for that."""
    found = result.recommendation.scaling if result.recommendation else None
    if found is None:
        return None
    columns = expected_times(found)
    rows: list[list[_Cell]] = [list(row) for row in zip(*columns.values(), strict=True)]
    return table([(name, bool(name)) for name in columns], rows, caption=f"Timed: {ranks(found.measured)}")


def attempts(probe: ProbeResult) -> Markup:
    """Every attempt of a probe, in the order in which they ran."""
    columns = [
        ("#", True),
        ("batch", True),
        ("outcome", False),
        ("peak reserved", True),
        ("of limit", True),
        ("peak allocated", True),
        ("step", True),
        ("took", True),
        ("why", False),
    ]
    limit = probe.memory_limit_bytes
    rows: list[list[_Cell]] = []
    for count, attempt in enumerate(probe.attempts, start=1):
        peak = attempt.peak_reserved_bytes if attempt.fits else None
        allocated = attempt.peak_allocated_bytes if attempt.fits else None
        rows.append(
            [
                _sortable(str(count), count),
                _sortable(f"{attempt.batch_size:,}", attempt.batch_size),
                tag("span", attempt.outcome, class_=f"outcome {attempt.outcome}"),
                _sortable(size(peak), peak),
                _sortable(f"{peak / limit:.1%}", peak / limit) if peak and limit else "-",
                _sortable(size(allocated), allocated),
                _sortable(duration(attempt.step_seconds), attempt.step_seconds),
                _sortable(duration(attempt.seconds), attempt.seconds),
                attempt.message or ("final check" if attempt.purpose == "verify" else "-"),
            ]
        )
    return table(
        columns, rows, caption=f"{_count(len(rows), 'attempt')} at {probe.precision}, in their order", sortable=True
    )


def precisions(result: Document) -> Markup | None:
    """The precisions side by side, where several were probed."""
    probes = probes_of(result)
    if len(probes) < 2:  # noqa: PLR2004 - nothing to compare
        return None
    columns = [
        ("precision", False),
        ("largest", True),
        ("fails at", True),
        ("peak", True),
        ("best samples/s", True),
        ("at batch", True),
        ("MFU", True),
    ]
    rows: list[list[_Cell]] = []
    for probe in probes:
        best = max(probe.throughput, key=lambda point: point.samples_per_second, default=None)
        largest, failing = probe.max_batch_size, probe.first_failing_batch_size
        rows.append(
            [
                probe.precision,
                _sortable("-" if largest is None else f"{largest:,}", largest),
                _sortable("-" if failing is None else f"{failing:,}", failing),
                _sortable(size(probe.peak_reserved_bytes), probe.peak_reserved_bytes),
                _sortable(number(best.samples_per_second), best.samples_per_second) if best else "-",
                _sortable(f"{best.batch_size:,}", best.batch_size) if best else "-",
                _sortable(share(best.mfu), best.mfu) if best else "-",
            ]
        )
    return table(columns, rows, caption="The precisions side by side", sortable=True)


def estimates(result: Document) -> Markup:
    """The calculated answer for each GPU and precision."""
    columns = [
        ("GPU", False),
        ("memory", True),
        ("precision", False),
        ("expected", True),
        ("safe", True),
        ("expandable segments", True),
        ("peak", True),
        ("samples/s", True),
        ("samples/J", True),
        ("confidence", False),
    ]
    rows: list[list[_Cell]] = []
    for row in result.estimates or []:
        sizes = [row.max_batch_size, row.safe_max_batch_size, row.expandable_segments_max_batch_size]
        rows.append(
            [
                row.gpu,
                _sortable(size(row.memory_bytes), row.memory_bytes),
                row.precision,
                *(_sortable(estimated(row, value), value) for value in sizes),
                _sortable(size(row.peak_bytes), row.peak_bytes),
                _sortable(number(row.samples_per_second), row.samples_per_second),
                _sortable(number(row.samples_per_joule), row.samples_per_joule),
                row.confidence or "-",
            ]
        )
    return table(columns, rows, caption="Estimated largest batch on each GPU", sortable=True)


def memory_details(result: Document) -> Markup | None:
    """What memory is for at the estimated peak of each precision."""
    if not result.details:
        return None
    phases = ("peak_allocated", "parameters", "gradients", "optimizer_states", "activations", "temporaries")
    columns = [("precision", False), ("batch", True), *((name.replace("_", " "), True) for name in phases)]
    rows: list[list[_Cell]] = []
    for row in result.details:
        held = [getattr(row, f"{name}_bytes") for name in phases]
        cells = [_sortable(size(value), value) for value in held]
        rows.append([row.precision, _sortable(f"{row.batch_size:,}", row.batch_size), *cells, row.peak_moment])
    return table([*columns, ("peak in", False)], rows, caption="What memory is for at its peak, estimated")


def holders(result: Document) -> Markup | None:
    """The modules and lines whose activations are alive at the peak of the first precision, largest first."""
    found = next((row for row in result.details or [] if row.holders), None)
    if found is None:
        return None
    rows: list[list[_Cell]] = [
        [each.module, each.line or "-", _sortable(size(each.activation_bytes), each.activation_bytes)]
        for each in found.holders
    ]
    caption = f"What holds activations at the peak, at {found.precision} and batch {found.batch_size:,}, estimated"
    return table([("module", False), ("line", False), ("activations", True)], rows, caption=caption, sortable=True)

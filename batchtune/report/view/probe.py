"""What a report shows of a probe: its answer, its tables, and the points of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from batchtune.document import ProbeResult, ThroughputFit
from batchtune.report.view.figure import Axis, Mark, Plot, Series, with_points
from batchtune.report.view.model import (
    Certificate,
    Column,
    Fact,
    Headline,
    Table,
    byte_sizes,
    counts,
    numbers,
    seconds,
    shares,
)
from batchtune.report.view.select import fastest, peak_of, used_by_others
from batchtune.report.view.words import (
    OUTCOMES,
    certificate,
    certificate_facts,
    largest_batch,
    nothing_does,
    ranks,
    step_time,
    tone,
)
from batchtune.units import LEAST_PEAK, bytes_unit, counted, duration, number, size
from batchtune.vocabulary import length_text

_BATCH = "micro-batch size"
_CURVE_POINTS = 80
_FAR_ABOVE = 2.5  # a limit so many times the highest peak would press the curve to the ground
_SENSORS = {
    "gpu_utilization": ("GPU busy", "%", 100.0),
    "memory_controller_utilization": ("memory bus busy", "%", 100.0),
    "mfu": ("model FLOPs utilisation", "%", 100.0),
    "power_watts": ("power", "W", 1.0),
    "temperature_celsius": ("temperature", "°C", 1.0),
    "joules_per_sample": ("energy", "J/sample", 1.0),
}


def headline(probe: ProbeResult) -> Headline:
    """The largest batch, or that there is none."""
    if probe.max_batch_size is None:
        return Headline("nothing", nothing_does(probe), reason=f"at {probe.precision}: {_why_nothing(probe)}")
    choice = [Fact("precision", probe.precision)]
    best, fit = fastest(probe), probe.throughput_fit
    if best is not None:
        speed = f"{'≥ ' if used_by_others(best) else ''}{number(best.samples_per_second)} samples/s"
        choice.append(Fact("best speed", f"{speed} at batch {best.batch_size:,}"))
        near = fit.batch_size_within_5_percent if fit else None
        choice += [Fact("within 5% of it", f"from batch {near:,}")] if near not in {None, best.batch_size} else []
    what = "inference batch size, not one to train with" if probe.inference else "micro-batch size that trains"
    so_far = "" if probe.verified_in_fresh_process else " so far"
    where = f" at length {length_text(probe.lengths[-1].length)}" if probe.lengths else ""
    return Headline(largest_batch(probe), f"is the largest {what}{where}{so_far}", choice, certificate(probe))


def _why_nothing(probe: ProbeResult) -> str:
    """What ended the last attempt at the smallest size."""
    failed = [each for each in reversed(probe.attempts) if not each.fits]
    least = min(failed, key=lambda each: each.batch_size, default=None)
    return f"{OUTCOMES[least.outcome]} at batch {least.batch_size:,}" if least else "nothing was tried"


def certified(probe: ProbeResult) -> Certificate:
    """The largest batch and why it can be relied on."""
    proof = certificate(probe) if probe.max_batch_size is not None else ""
    batch = "inference batch" if probe.inference else "batch"  # the former is never to be taken for the latter
    return Certificate(batch, probe.precision, largest_batch(probe), proof, certificate_facts(probe))


def lines(probe: ProbeResult) -> list[Fact]:
    """What else was measured: the step, the ranks, the data loader."""
    said = []
    if probe.throughput_fit is not None and (text := step_time(probe.throughput_fit)):
        said.append(Fact("pass time" if probe.inference else "step time", text, detail=True))
    if probe.data_parallel is not None:
        said.append(Fact("ranks", ranks(probe.data_parallel)))
    if probe.input_pipeline is not None:
        said.append(Fact("data", probe.input_pipeline.verdict, detail=not probe.input_pipeline.input_bound))
    return said


def precisions(probes: Sequence[ProbeResult], chosen: ProbeResult | None) -> Table:
    """One row for each precision: largest batch, peak there, best speed and its batch size; the chosen one's marked."""
    best = [fastest(probe) for probe in probes]
    columns = [
        Column("precision", [probe.precision for probe in probes]),
        counts("largest batch", [probe.max_batch_size for probe in probes], cells=[*map(largest_batch, probes)]),
        counts("fails at", [probe.first_failing_batch_size for probe in probes], spare=5),
        byte_sizes("peak", [probe.peak_reserved_bytes for probe in probes], least=LEAST_PEAK, spare=3),
        numbers("samples/s", [point.samples_per_second if point else None for point in best], spare=1),
        counts("at batch", [point.batch_size if point else None for point in best], spare=2),
        shares("MFU", [point.mfu if point else None for point in best], spare=4),
    ]
    marked = [row for row, probe in enumerate(probes) if chosen is not None and probe.precision == chosen.precision]
    title = "precisions compared" + (", each at its best speed" if any(best) else "")
    return Table(title, columns, marked=marked, summary=True)


def throughput(probe: ProbeResult) -> Table:
    """Speed at each size timed, and what the sensors said that were there."""
    points = probe.throughput
    best = max(point.samples_per_second for point in points)
    columns = [
        counts("batch", [point.batch_size for point in points]),
        numbers("samples/s", [point.samples_per_second for point in points]),
        shares("of best", [point.samples_per_second / best if best else None for point in points], drawn=True, spare=8),
        seconds("step", [point.step_seconds for point in points], spare=1),
        shares("MFU", [point.mfu for point in points], spare=3),
        shares("GPU busy", [point.gpu_utilization for point in points], spare=2),
        shares("memory bus", [point.memory_controller_utilization for point in points], spare=7),
        byte_sizes("used", [point.memory_used_bytes for point in points], spare=5),
        numbers("power", [point.power_watts for point in points], unit="W", spare=4),
        numbers("°C", [point.temperature_celsius for point in points], spare=6),
        numbers("J/sample", [point.joules_per_sample for point in points], spare=5),
        shares("other programs", [used_by_others(point) for point in points], spare=4),
        Column("held back by", [", ".join(each.throttle_reasons or []) for each in points], spare=4, wraps=True),
    ]
    return Table(f"{'inference ' if probe.inference else ''}throughput at {probe.precision}", columns, summary=True)


def attempts(probe: ProbeResult) -> Table:
    """Every attempt in order, its memory as a share of the limit."""
    tried, limit = probe.attempts, probe.memory_limit_bytes
    outcomes = [attempt.outcome for attempt in tried]
    peaks = [attempt.peak_reserved_bytes if attempt.fits else None for attempt in tried]
    allocated = [attempt.peak_allocated_bytes if attempt.fits else None for attempt in tried]
    of_limit = [peak / limit if peak and limit and peak >= LEAST_PEAK else None for peak in peaks]
    columns = [
        counts("#", range(1, len(tried) + 1), detail=True),
        counts("batch", [attempt.batch_size for attempt in tried]),
        Column("outcome", outcomes, tones=[*map(tone, outcomes)]),
        byte_sizes("peak", peaks, least=LEAST_PEAK),
        shares("of limit", of_limit, digits=1, drawn=True, spare=3),
        byte_sizes("allocated", allocated, least=LEAST_PEAK, detail=True),
        seconds("step", [attempt.step_seconds if attempt.fits else None for attempt in tried], spare=2),
        seconds("took", [attempt.seconds for attempt in tried], detail=True),
        Column(
            "why",
            [attempt.message or ("final check" if attempt.purpose == "verify" else "") for attempt in tried],
            spare=1,
            wraps=True,
        ),
    ]
    return Table(f"{counted(len(tried), 'attempt')} at {probe.precision}, in their order", columns)


def memory_plot(probes: Sequence[ProbeResult]) -> Plot | None:
    """Peak memory against batch size: every attempt, the limit, what fitted and what did not."""
    probes = [probe for probe in probes if probe.attempts]
    peaks = [peak for probe in probes for attempt in probe.attempts if (peak := peak_of(attempt)) is not None]
    limit_bytes = max((probe.memory_limit_bytes or 0 for probe in probes), default=0)
    failed = any(not attempt.fits for probe in probes for attempt in probe.attempts)
    if not peaks and not (failed and limit_bytes):
        return None
    near = limit_bytes > 0 and (failed or not peaks or limit_bytes <= _FAR_ABOVE * max(peaks))
    highest = max([*peaks, limit_bytes if near else 0])
    unit, scale = bytes_unit(highest)
    top, limit = highest / scale, f"limit {size(limit_bytes)}"
    series = [
        each
        for group, (probe, name) in enumerate(_named(probes))
        for each in (*_fits(probe, group, name, scale), *_failures(probe, group, name, top))
    ]
    if near:
        series.append(Series("limit", limit, [(0, limit_bytes / scale)]))
    return Plot(
        "Peak memory against batch size",
        Axis(_BATCH, from_zero=True, whole=True),
        Axis(f"peak memory, {unit}", from_zero=True),
        with_points(series),
        note="" if near or not limit_bytes else limit,
    )


def _named(probes: Sequence[ProbeResult]) -> list[tuple[ProbeResult, str]]:
    """Probes with what begins the names of their points: the precision where there are several."""
    return [(probe, f"{probe.precision} " if len(probes) > 1 else "") for probe in probes]


def _fits(probe: ProbeResult, group: int, name: str, scale: int) -> Iterator[Series]:
    fits = sorted(
        ((attempt.batch_size, peak, attempt) for attempt in probe.attempts if (peak := peak_of(attempt)) is not None),
        key=lambda each: each[:2],
    )
    marks: list[tuple[Mark, str, str]] = [("fit", "search", "fits"), ("checked", "verify", "final check")]
    for mark, purpose, meaning in marks:
        shown = [each for each in fits if each[2].purpose == purpose]
        points = [(float(batch), peak / scale) for batch, peak, _ in shown]
        hover = [(f"batch {batch:,}", f"peak {size(peak)}", f"{each.steps} steps") for batch, peak, each in shown]
        yield Series(mark, f"{name}{meaning}", points, hover, group)


def _failures(probe: ProbeResult, group: int, name: str, top: float) -> Iterator[Series]:
    for outcome, meaning in OUTCOMES.items():
        failed = [attempt for attempt in probe.attempts if attempt.outcome == outcome]
        points = [(float(attempt.batch_size), top) for attempt in failed]
        hover = [(f"batch {each.batch_size:,}", each.message or meaning) for each in failed]
        yield Series("oom" if outcome == "oom" else "failed", f"{name}{meaning}", points, hover, group)


def throughput_plot(probes: Sequence[ProbeResult]) -> Plot | None:
    """Training speed against batch size, with the fitted step time and the size from which more gains little."""
    probes = [probe for probe in probes if probe.throughput]
    points = [point for probe in probes for point in probe.throughput]
    if not points:
        return None
    low, high = min(point.batch_size for point in points), max(point.batch_size for point in points)
    series = [
        each for group, (probe, name) in enumerate(_named(probes)) for each in _speeds(probe, group, name, low, high)
    ]
    across, up = Axis(_BATCH, log=True, whole=True), Axis("throughput, samples/s", from_zero=True)
    return Plot("Throughput against batch size", across, up, with_points(series))


def _speeds(probe: ProbeResult, group: int, name: str, low: int, high: int) -> Iterator[Series]:
    fit, measured = probe.throughput_fit, sorted(probe.throughput, key=lambda point: point.batch_size)
    knee = fit.batch_size_within_5_percent if fit else None
    speeds = [(float(point.batch_size), point.samples_per_second) for point in measured]
    fitted = _fitted_speeds(fit, low, high) if fit and fit.holds else []
    hover = [
        (f"batch {each.batch_size:,}", f"{number(each.samples_per_second)} samples/s", duration(each.step_seconds))
        for each in measured
    ]
    yield Series("curve", f"{name}t = α + β·B", fitted, (), group)
    yield Series("measured", f"{name}measured", speeds, hover, group)
    best = [(batch, speed) for batch, speed in speeds if batch == knee]
    yield Series("knee", f"{name}within 5% of best", best, [(f"from batch {knee:,}",)] if best else (), group)


def _fitted_speeds(fit: ThroughputFit, low: float, high: float) -> list[tuple[float, float]]:
    """Points (batch size, samples per second) of the fitted curve between two batch sizes, equal ratios apart."""
    sizes = [low * (high / low) ** (step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
    steps = [(batch, fit.alpha_seconds + fit.beta_seconds_per_sample * batch) for batch in sizes]
    return [(batch, batch / took) for batch, took in steps if took > 0]


def sensors_plot(probe: ProbeResult) -> Plot | None:
    """What the device's sensors said at each batch size, one below the other; None where there were none."""
    points = sorted(probe.throughput, key=lambda point: point.batch_size)
    drawn: list[Plot] = []
    for key, (name, unit, factor) in _SENSORS.items():
        read = [(float(point.batch_size), getattr(point, key)) for point in points]
        seen = [(batch, value * factor) for batch, value in read if value is not None]
        if seen:
            hover = [(f"batch {batch:,.0f}", f"{name} {number(value, 4)} {unit}") for batch, value in seen]
            axis = Axis(f"{name}, {unit}", from_zero=True, end=105 if unit == "%" else None)
            reading = Series("reading", "", seen, hover)
            drawn.append(
                Plot("The device's sensors over batch size", Axis(_BATCH, log=True, whole=True), axis, [reading])
            )
    return replace(drawn[0], below=drawn[1:]) if drawn else None

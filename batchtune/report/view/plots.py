"""The points of a probe's figures: memory, speed and what the sensors said over batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from batchtune.document import ProbeResult, ThroughputFit
from batchtune.report.view.model import Axis, Mark, Plot, Series
from batchtune.report.view.select import peak_of
from batchtune.report.view.words import OUTCOMES
from batchtune.units import bytes_unit, duration, number, size

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


def memory(probes: Sequence[ProbeResult]) -> Plot | None:
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
        [each for each in series if each.points],
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
    for mark, purpose, words in marks:
        shown = [each for each in fits if each[2].purpose == purpose]
        points = [(float(batch), peak / scale) for batch, peak, _ in shown]
        hover = [(f"batch {batch:,}", f"peak {size(peak)}", f"{each.steps} steps") for batch, peak, each in shown]
        yield Series(mark, f"{name}{words}", points, hover, group)


def _failures(probe: ProbeResult, group: int, name: str, top: float) -> Iterator[Series]:
    for outcome, words in OUTCOMES.items():
        failed = [attempt for attempt in probe.attempts if attempt.outcome == outcome]
        points = [(float(attempt.batch_size), top) for attempt in failed]
        hover = [(f"batch {each.batch_size:,}", each.message or words) for each in failed]
        yield Series("oom" if outcome == "oom" else "failed", f"{name}{words}", points, hover, group)


def throughput(probes: Sequence[ProbeResult]) -> Plot | None:
    """Training speed against batch size, with the fitted step time and the size from which more gains little."""
    probes = [probe for probe in probes if probe.throughput]
    points = [point for probe in probes for point in probe.throughput]
    if not points:
        return None
    low, high = min(point.batch_size for point in points), max(point.batch_size for point in points)
    series = [
        each for group, (probe, name) in enumerate(_named(probes)) for each in _speeds(probe, group, name, low, high)
    ]
    return Plot(
        "Throughput against batch size",
        Axis(_BATCH, log=True, whole=True),
        Axis("throughput, samples/s", from_zero=True),
        [each for each in series if each.points],
    )


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
    return [(batch, batch / seconds) for batch, seconds in steps if seconds > 0]


def sensors(probe: ProbeResult) -> Plot | None:
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

"""What a report shows of a probe: its answer, and the tables of its precisions, speeds and attempts."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.document import ProbeResult
from batchtune.report.view.columns import byte_sizes, counts, numbers, seconds, shares, table, words
from batchtune.report.view.model import Certificate, Fact, Headline, Table
from batchtune.report.view.select import fastest
from batchtune.report.view.words import (
    batch_name,
    certificate,
    certificate_facts,
    counted,
    largest_batch,
    nothing_does,
    ranks,
    step_time,
    tone,
)
from batchtune.units import LEAST_PEAK, number, size


def headline(probe: ProbeResult) -> Headline:
    """The largest batch, or that there is none."""
    if probe.max_batch_size is None:
        return Headline("nothing", nothing_does(probe), reason=f"at {probe.precision}: the attempts below say why")
    choice, peak = [Fact("precision", probe.precision)], probe.peak_reserved_bytes
    choice += [Fact("peak memory", size(peak, LEAST_PEAK))] if peak is not None else []
    best, fit = fastest(probe), probe.throughput_fit
    if best is not None:
        choice.append(Fact("best speed", f"{number(best.samples_per_second)} samples/s at {best.batch_size:,}"))
    if fit is not None and fit.batch_size_within_5_percent is not None:
        choice.append(Fact("within 5 % of it", f"from batch {fit.batch_size_within_5_percent:,}"))
    what = "inference batch size, not one to train with" if probe.inference else "micro-batch size that trains"
    return Headline(largest_batch(probe), f"is the largest {what}", choice, certificate(probe))


def certified(probe: ProbeResult) -> Certificate:
    """The largest batch and why it can be relied on."""
    proof = certificate(probe) if probe.max_batch_size is not None else ""
    return Certificate(batch_name(probe), probe.precision, largest_batch(probe), proof, certificate_facts(probe))


def lines(probe: ProbeResult) -> list[Fact]:
    """What else was measured: the step, the ranks, the data loader."""
    said = []
    if probe.throughput_fit is not None and (text := step_time(probe.throughput_fit)):
        said.append(Fact("pass time" if probe.inference else "step time", text))
    if probe.data_parallel is not None:
        said.append(Fact("ranks", ranks(probe.data_parallel)))
    if probe.input_pipeline is not None:
        said.append(Fact("data", probe.input_pipeline.verdict))
    return said


def precisions(probes: Sequence[ProbeResult], chosen: ProbeResult | None) -> Table:
    """One row for each precision: largest batch, peak there, best speed and the batch size it came from.

    Args:
        probes: one for each precision.
        chosen: the one that stands for the result; its row stands out.
    """
    best = [fastest(probe) for probe in probes]
    columns = [
        words("precision", [probe.precision for probe in probes]),
        counts("largest batch", [probe.max_batch_size for probe in probes], cells=[*map(largest_batch, probes)]),
        counts("fails at", [probe.first_failing_batch_size for probe in probes], spare=5),
        byte_sizes("peak", [probe.peak_reserved_bytes for probe in probes], least=LEAST_PEAK, spare=3),
        numbers("samples/s", [point.samples_per_second if point else None for point in best], spare=1),
        counts("at batch", [point.batch_size if point else None for point in best], spare=2),
        shares("MFU", [point.mfu if point else None for point in best], spare=4),
    ]
    marked = [row for row, probe in enumerate(probes) if chosen is not None and probe.precision == chosen.precision]
    return table("precisions compared, each at its best speed", columns, marked=marked, summary=True)


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
        words("held back by", [", ".join(each.throttle_reasons or []) for each in points], spare=4, wraps=True),
    ]
    return table(f"{'inference ' if probe.inference else ''}throughput at {probe.precision}", columns, summary=True)


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
        words("outcome", outcomes, tones=[*map(tone, outcomes)]),
        byte_sizes("peak", peaks, least=LEAST_PEAK),
        shares("of limit", of_limit, _tenths, drawn=True, spare=3),
        byte_sizes("allocated", allocated, least=LEAST_PEAK, detail=True),
        seconds("step", [attempt.step_seconds if attempt.fits else None for attempt in tried], spare=2),
        seconds("took", [attempt.seconds for attempt in tried], detail=True),
        words(
            "why",
            [attempt.message or ("final check" if attempt.purpose == "verify" else "") for attempt in tried],
            spare=1,
            wraps=True,
        ),
    ]
    return table(f"{counted(len(tried), 'attempt')} at {probe.precision}, in their order", columns)


def _tenths(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

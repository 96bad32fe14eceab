"""Whether a result got worse than an earlier one: what can be compared, and which differences mean something."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from batchtune.document import Document, Interval, ProbeResult
from batchtune.errors import UsageError
from batchtune.report.formats import table_lines
from batchtune.report.terminal import FittedTable
from batchtune.report.view.model import Column, Table, Tone
from batchtune.report.view.select import peak_of, probes_of
from batchtune.report.view.words import IDLE, moment
from batchtune.units import LEAST_PEAK, duration, number, share, size

WORSE_EXIT_CODE = 1
Verdict = Literal["worse", "better", "same", "uncertain"]
_VERDICTS: dict[Verdict, tuple[str, Tone]] = {
    "worse": ("worse", "bad"),
    "better": ("better", "good"),
    "same": ("as before", ""),
    "uncertain": ("too uncertain to tell", "caution"),
}
_CERTAIN = 2.0  # standard errors
_HOST = "the CPU"  # whose name says nothing of memory


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of both results."""

    figure: str
    words: str  # its name for people
    of: str  # the precision, and the GPU of an estimate
    before: float
    now: float | None  # in the later one; None: it has none any more
    error_share: float = 0.0  # how much of a difference may come from measuring; infinite where nothing tells
    more_is_better: bool = False  # whether less is worse
    write: Callable[[float | None], str] = number

    @property
    def change_share(self) -> float | None:
        """By what share of the earlier figure it rose or fell."""
        return None if self.now is None else self.now / self.before - 1

    def verdict(self, allow: float) -> Verdict:
        """What the difference comes to where so large a share of it is allowed."""
        if self.change_share is None:
            return "worse"
        loss = -self.change_share if self.more_is_better else self.change_share
        if math.isinf(self.error_share):
            return "uncertain"
        if abs(loss) <= allow + 1e-9:
            return "same"
        if abs(loss) - self.error_share <= allow:
            return "uncertain"
        return "worse" if loss > 0 else "better"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results of one task on one device, figure by figure."""

    title: str
    changes: list[Change]
    notes: list[str]  # what else differs, and what could not be compared
    allow: float  # the share by which a figure may be worse

    @property
    def worse(self) -> list[Change]:
        """The figures that got worse by more than is allowed."""
        return [change for change in self.changes if change.verdict(self.allow) == "worse"]

    @property
    def answer(self) -> str:
        """What it comes to, in one sentence."""
        named = ", ".join(f"{change.words} ({change.of})" for change in self.worse)
        allowed = f"more than the {share(self.allow)} allowed"
        return f"worse by {allowed}: {named}" if named else f"nothing is worse by {allowed}"

    def to_json(self) -> str:
        """For programs."""
        keys = ("figure", "of", "before", "now", "change_share")
        rows = [
            {key: getattr(change, key) for key in keys} | {"verdict": change.verdict(self.allow)}
            for change in self.changes
        ]
        found = {"schema": "batchtune.comparison/1", "title": self.title, "allow_share": self.allow}
        return json.dumps(found | {"worse": bool(self.worse), "changes": rows, "notes": self.notes}, indent=2)

    def to_markdown(self) -> str:
        """For a comment on a pull request."""
        lines = [f"## batchtune {self.title}", "", f"**{self.answer}**", "", *table_lines(self._table()), ""]
        return "\n".join(lines + [f"> {note}" for note in self.notes]).rstrip("\n") + "\n"

    def to_text(self) -> str:
        """For a terminal, as wide as it is."""
        page = Console(file=io.StringIO(), width=Console().width, force_terminal=False)
        with page.capture() as captured:
            page.print(FittedTable(self._table()))
        lines = [line.rstrip() for line in captured.get().splitlines()]
        return "\n".join([*lines, *self.notes, self.answer]) + "\n"

    def _table(self) -> Table:
        shares = [change.change_share for change in self.changes]
        verdicts = [_VERDICTS[change.verdict(self.allow)] for change in self.changes]
        columns = [
            Column("", [change.words for change in self.changes], wraps=True),
            Column("of", [change.of for change in self.changes]),
            Column("before", [change.write(change.before) for change in self.changes]),
            Column("now", [change.write(change.now) for change in self.changes]),
            Column("change", ["-" if each is None else f"{each:+.1%}" for each in shares]),
            Column("verdict", [text for text, _ in verdicts], tones=[tone for _, tone in verdicts]),
        ]
        return Table(self.title, columns)


def compare(now: Document, before: Document, allow: float) -> Comparison:
    """Sets a result against an earlier one.

    Raises:
        UsageError: they are of different tasks, devices, precisions or limits, or one of them is not complete.
    """
    for result in (now, before):
        if result.status != "complete":
            why = f": {result.error.message}" if result.error else ""
            raise UsageError(f"the result of {result.created_at} is {result.status}{why}; compare complete ones")
    conditions, earlier = _conditions(now), _conditions(before)
    for name, value in earlier.items():
        found = conditions.get(name, "not measured")
        if found != value:
            raise UsageError(f"{name}: {found} now, {value} before; only what was measured alike can be compared")
    _require_one_limit(now, before)
    changes = [*_of_probes(now, before), *_of_estimates(now, before), *_of_study(now, before)]
    if not changes:
        raise UsageError("there is no figure that both results have; nothing can be compared")
    notes = [
        f"{name}: {new or 'unknown'} now, {old or 'unknown'} before"
        for name, new, old in _versions(now, before)
        if new != old
    ]
    about = " on ".join(conditions[name] for name in ("task", "device") if name in conditions)
    title = " ".join(f"{now.kind} of {about}, against {moment(before.created_at)}".split())
    return Comparison(title, changes, notes, allow)


def _conditions(result: Document) -> dict[str, str]:
    """What must be the same for figures to be compared."""
    found = {"kind of result": result.kind, "task": Path(result.task.path).name}
    if result.environment is not None and result.kind != "estimate":
        found["device"] = _HOST if result.environment.device_type == "cpu" else result.environment.device
    for probe in probes_of(result):
        ranks = probe.data_parallel
        told = ["forward passes" if probe.inference else "training"]
        told += [f"{ranks.world_size} ranks, {ranks.strategy}"] if ranks else []
        found[f"precision {probe.precision}"] = ", ".join(told)
    for row in result.estimates or []:
        told = ["forward passes" if row.inference else "training", f"within {size(row.memory_bytes)}"]
        found[f"{row.gpu} at {row.precision}"] = ", ".join(told)
    if result.target is not None:
        found["target"] = f"{result.target.metric}, {result.target.goal}, {result.target.kind or ''}".rstrip(", ")
    return found


def _require_one_limit(now: Document, before: Document) -> None:
    """Where memory ended a search, both had the same of it; what is free on a device changes from run to run."""
    for new, old in _pairs(now, before):
        sizes = [size(each) if each else "all memory" for each in (new.memory_limit_bytes, old.memory_limit_bytes)]
        if "memory" in (new.limited_by, old.limited_by) and sizes[0] != sizes[1]:
            raise UsageError(
                f"precision {old.precision}: within {sizes[0]} now, within {sizes[1]} before; only what was measured "
                "alike can be compared: probe both with the same --memory-limit"
            )


def _versions(now: Document, before: Document) -> Iterator[tuple[str, str | None, str | None]]:
    yield "batchtune", now.batchtune_version, before.batchtune_version
    new, old = now.environment, before.environment
    if new is not None and old is not None:
        for name in ("device", "torch", "cuda", "driver", "python"):
            yield name, getattr(new, name), getattr(old, name)


def _pairs(now: Document, before: Document) -> list[tuple[ProbeResult, ProbeResult]]:
    """The probes of each precision, which are alike: `_conditions` has seen to that."""
    later = {probe.precision: probe for probe in probes_of(now)}
    return [(later[old.precision], old) for old in probes_of(before)]


def _of_probes(now: Document, before: Document) -> Iterator[Change]:
    alike = now.environment is None or before.environment is None or now.environment.device == before.environment.device
    for new, old in _pairs(now, before):
        of, earlier = old.precision, old.max_batch_size
        if earlier is not None:
            gap = max(_gap(new), _gap(old))
            yield Change("max_batch_size", "largest batch", of, earlier, new.max_batch_size, gap, more_is_better=True)
        for at, peak, previous in _at_largest(_peaks(new), _peaks(old)):
            yield Change("peak_bytes", f"peak at batch {at:,}", of, previous, peak, LEAST_PEAK / previous, write=size)
        for at, speed, previous in _at_largest(_speeds(new), _speeds(old)):
            error = _CERTAIN * math.hypot(_scatter(new), _scatter(old)) if alike else math.inf
            name = f"samples/s at batch {at:,}"
            yield Change("samples_per_second", name, of, previous, speed, error, more_is_better=True)


def _at_largest(now: Mapping[int, float], before: Mapping[int, float]) -> list[tuple[int, float, float]]:
    """The largest batch size that both have, if there is one, with the figures of both."""
    return [(at, now[at], before[at]) for at in sorted(now.keys() & before.keys())[-1:]]


def _speeds(probe: ProbeResult) -> dict[int, float]:
    return {point.batch_size: point.samples_per_second for point in probe.throughput}


def _gap(probe: ProbeResult) -> float:
    """By what share the largest batch may be more than the one that ran."""
    if probe.max_batch_size is None or probe.first_failing_batch_size is None:
        return 0.0
    return max(0, probe.first_failing_batch_size - 1 - probe.max_batch_size) / probe.max_batch_size


def _peaks(probe: ProbeResult) -> dict[int, int]:
    """The peak at each batch size that ran: of several attempts, the highest."""
    found: dict[int, int] = {}
    for attempt in probe.attempts:
        peak = peak_of(attempt)
        if peak is not None:
            found[attempt.batch_size] = max(peak, found.get(attempt.batch_size, 0))
    return found


def _scatter(probe: ProbeResult) -> float:
    """By what share timed steps lie beside their line; infinite where they tell nothing."""
    fit = probe.throughput_fit
    return fit.error_share if fit is not None and fit.holds and fit.error_share is not None else math.inf


def _of_estimates(now: Document, before: Document) -> Iterator[Change]:
    later = {(row.gpu, row.precision): row.safe_max_batch_size for row in now.estimates or []}
    for old in before.estimates or []:
        if old.safe_max_batch_size:
            key, of, safe = (old.gpu, old.precision), f"{old.gpu}, {old.precision}", old.safe_max_batch_size
            yield Change("safe_max_batch_size", "largest batch that is safe", of, safe, later[key], more_is_better=True)


def _of_study(now: Document, before: Document) -> Iterator[Change]:
    """The time to a target that both had; one that was set by a run of the baseline is another each time."""
    found, earlier = now.recommendation, before.recommendation
    old = earlier.time_to_target_seconds if earlier else None
    if earlier is None or old is None or now.target is None or before.target is None:
        return
    new = found.time_to_target_seconds if found else None
    same = now.target.value == before.target.value
    name = "time to target" if same else "time to a target of another value"
    if found is not None and bool(found.timed_in_turn) != bool(earlier.timed_in_turn):
        same, name = False, f"{name}, {'now' if found.timed_in_turn else 'before'} with the {IDLE}"
    error = math.hypot(_half(new), _half(old)) if same and new else math.inf if new else 0.0
    median = new.median if new else None
    yield Change("time_to_target_seconds", name, earlier.precision, old.median, median, error, write=duration)


def _half(interval: Interval) -> float:
    """Half of an interval as a share of its median; infinite where it has no width, or no upper bound."""
    half = (interval.high - interval.low) / 2
    return half / interval.median if half > 0 and not interval.at_least else math.inf

"""What the HTML report says, in which order: the answer, what to paste, the proof, the evidence, the circumstances."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from batchtune.document import Document, ProbeResult
from batchtune.report.export.snippets import SNIPPETS
from batchtune.report.page.answer import answer
from batchtune.report.page.markup import Markup, facts, tag
from batchtune.report.page.tables import attempts, estimates, holders, memory_details, precisions, scaling, trials
from batchtune.report.view.select import estimate_notes, probes_of
from batchtune.report.view.words import largest_batch
from batchtune.units import duration, size

_OUTCOMES = {
    "oom": "out of memory",
    "kernel_limit": "kernel limit",
    "crash": "crash",
    "timeout": "timeout",
    "user_error": "the task's code raised",
}
_KINDS = {"probe": "Probe report", "tune": "Tuning report", "estimate": "Estimate"}


def title(result: Document) -> str:
    """What the report is about."""
    return result.name or result.task.path


def header(result: Document) -> Markup:
    """Name, kind, state and place of the run."""
    where = result.environment
    parts = [_moment(result.created_at), where.device if where else None]
    parts.append(f"torch {where.torch}" if where and where.torch else None)
    about = [tag("span", part) for part in parts if part]
    status = tag("span", result.status, class_=f"status {result.status}")
    return tag(
        "header",
        tag("p", tag("strong", "batchtune"), f" {_KINDS[result.kind]}", class_="brand"),
        tag("h1", title(result)),
        tag("p", status, *about, class_="about"),
    )


def footer(result: Document) -> Markup:
    """Who wrote this, from what."""
    rule = "Calculated, not measured." if result.kind == "estimate" else "What was not measured is not shown."
    return tag("footer", tag("p", f"Written by batchtune {result.batchtune_version}. {rule}"))


def sections(result: Document, figures: dict[str, Markup]) -> Iterator[Markup | None]:
    """The page from top to bottom; None stands for what this result has no figures for."""
    if result.status != "complete":
        reason = result.error.message if result.error else "what was measured until then follows"
        yield tag("p", tag("strong", result.status), " – ", reason, class_=f"banner {result.status}", role="status")
    yield answer(result)
    if result.warnings:
        count = f"{len(result.warnings)} warning{'s' if len(result.warnings) > 1 else ''}"
        yield tag("p", tag("a", count, href="#warnings"), " about this result", class_="pointer")
    yield _paste(result)
    certificates = [_certificate(probe) for probe in probes_of(result)]
    yield _section("Certificate", *certificates, precisions(result), id_="certificate") if certificates else None
    yield _section("Figures", tag("div", *figures.values(), class_="plots")) if figures else None
    noted = tag("ul", *(tag("li", note) for note in estimate_notes(result.estimates or [])))
    yield _section("Estimates", estimates(result), noted) if result.estimates else None
    yield _section("Memory", memory_details(result), holders(result)) if result.details else None
    several = scaling(result)
    yield _section("Several devices", several) if several else None
    yield _section("Runs", trials(result)) if result.trials else None
    tried = [attempts(probe) for probe in probes_of(result) if probe.attempts]
    yield _section("Attempts", *tried) if tried else None
    warned = tag("ul", *(tag("li", warning) for warning in result.warnings))
    yield _section("Warnings", warned, id_="warnings") if result.warnings else None
    yield _section("Environment", _environment(result))


def _section(heading: str, *children: Markup | None, id_: str | None = None) -> Markup:
    return tag("section", tag("h2", heading), *children, id_=id_)


def _paste(result: Document) -> Markup | None:
    written = {name: text for name, write in SNIPPETS.items() if (text := write(result))}
    if not written:
        return None
    panels = [
        tag("div", tag("h3", name), tag("pre", tag("code", text)), class_="panel", id_=f"paste-{number}")
        for number, (name, text) in enumerate(written.items())
    ]
    return _section("Paste", tag("div", *panels, class_="tabs"), id_="paste")


def _certificate(probe: ProbeResult) -> Markup:
    outcomes = {attempt.batch_size: attempt for attempt in probe.attempts if not attempt.fits}
    failing = probe.first_failing_batch_size
    failure = outcomes.get(failing) if failing is not None else None
    checked = f"ran {probe.verify_steps} steps, then evaluation and saving, in a fresh process"
    limit, peak = probe.memory_limit_bytes, probe.peak_reserved_bytes
    share = f" ({peak / limit:.1%} of the limit)" if peak and limit else ""
    failures = sum(not attempt.fits for attempt in probe.attempts)
    why = None if failing is None else _OUTCOMES.get(failure.outcome, failure.outcome) if failure else "did not run"
    rows: list[tuple[str, object]] = [
        ("precision", probe.precision),
        ("largest that fits", largest_batch(probe)),
        ("checked", checked if probe.verified_in_fresh_process else "not yet in a fresh process"),
        ("smallest that fails", "none was met" if failing is None else f"{failing:,} ({why})"),
        ("reason given", failure.message if failure else None),
        ("limited by", {"max": "the cap", "dataset": "the training set"}.get(probe.limited_by or "", probe.limited_by)),
        ("peak reserved", f"{size(peak)}{share}" if peak else None),
        ("peak allocated", size(probe.peak_allocated_bytes)),
        ("memory limit", size(limit)),
        ("attempts", f"{len(probe.attempts)}, of which {failures} failed" if probe.attempts else None),
        ("took", duration(probe.seconds) if probe.seconds else None),
    ]
    return facts(rows)


def _environment(result: Document) -> Markup:
    where = result.environment
    shown = where.model_dump(exclude_none=True) if where else {}
    rows = [
        (
            key.removesuffix("_bytes").replace("_", " "),
            size(value) if key.endswith("_bytes") and isinstance(value, int) else value,
        )
        for key, value in shown.items()
        if isinstance(value, str | int | float)
    ]
    digest = tag("code", result.task.sha256[:16], "…") if result.task.sha256 else None
    about: list[tuple[str, object]] = [
        ("task", tag("code", result.task.path)),
        ("sha256 of the task", digest),
        ("batchtune", result.batchtune_version),
        ("measured at", _moment(result.created_at)),
    ]
    others = [
        f"process {each.pid}: {size(each.memory_bytes)}" for each in (where.other_processes if where else None) or []
    ]
    return facts([*rows, ("memory held by others", ", ".join(others)), *about])


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"

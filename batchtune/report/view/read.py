"""One reading of a result document, by its kind: everything that a report shows is put into words here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from batchtune.document import Document
from batchtune.report.export.settings import pytorch, recommendation_json
from batchtune.report.export.trainers import EXPORTS
from batchtune.report.view import configurations, estimate, probe, tune
from batchtune.report.view.model import Fact, Headline, Section, View
from batchtune.report.view.plots import memory, throughput
from batchtune.report.view.select import chosen_probe, probes_of
from batchtune.report.view.words import machine, start_of_search, target_text
from batchtune.units import size


def view_of(result: Document) -> View:
    """What every report shows of a result."""
    probes, chosen, where, found = probes_of(result), chosen_probe(result), result.environment, result.recommendation
    about = [
        _moment(result.created_at),
        where.device if where else "",
        f"torch {where.torch}" if where and where.torch else "",
    ]
    return View(
        kind=result.kind,
        title=result.name or result.task.path,
        status=result.status,
        problem=result.error.message if result.error else "",
        about=[each for each in about if each],
        headline=_headline(result),
        comparison=tune.comparison(result, found) if found else None,
        bars=tune.bars(result, found) if found else [],
        certificates=[probe.certified(each) for each in probes],
        plots=[plot for plot in (memory([chosen]), throughput([chosen])) if plot] if chosen else [],
        lines=_lines(result),
        sections=list(_sections(result)),
        settings=(settings := _settings(result)),
        notes={each.title: each.said_beside(result) for each in EXPORTS.values() if each.title in settings},
        warnings=result.warnings,
        measured_on=machine(where) if where else "",
        environment=_environment(result),
        version=result.batchtune_version,
    )


def _headline(result: Document) -> Headline | None:
    """The recommendation of a study, the largest batch of a probe or of an estimate; None where there is none."""
    if result.recommendation is not None:
        return tune.headline(result.recommendation)
    if result.kind == "estimate":
        return estimate.headline(result.estimates or [])
    chosen = chosen_probe(result)
    return probe.headline(chosen) if chosen else None


def _lines(result: Document) -> list[Fact]:
    target, chosen, found = result.target, chosen_probe(result), result.recommendation
    said = [Fact("to confirm", found.confirm_command)] if found is not None and found.confirm_command else []
    said += [Fact("target", target_text(target))] if target is not None and target.value is not None else []
    said += probe.lines(chosen) if chosen else []
    return said + (start_of_search(result.prior) if result.prior else [])


def _sections(result: Document) -> Iterator[Section]:
    """The evidence; a study's is its runs, and what its probe tried is a detail of it."""
    probes, detail = probes_of(result), result.kind != "probe"
    if len(probes) > 1:
        yield Section("Precisions", [probe.precisions(probes, chosen_probe(result))])
    if result.estimates:
        yield estimate.section(result.estimates)
    if result.details:
        yield estimate.memory(result.details)
    if result.recommendation is not None and result.recommendation.scaling is not None:
        yield tune.scaling(result.recommendation.scaling)
    if result.trials:
        yield Section("Runs", [configurations.table_of(result), tune.runs(result)])
    timed = [probe.throughput(each) for each in probes if each.throughput]
    tried = [probe.attempts(each) for each in probes if each.attempts]
    yield from (
        Section(title, tables, detail=detail)
        for title, tables in (("Throughput", timed), ("Attempts", tried))
        if tables
    )


def _settings(result: Document) -> dict[str, str]:
    written = {"PyTorch": pytorch(result)}
    written |= {export.title: export.snippet(result) for export in EXPORTS.values()}
    written["JSON"] = recommendation_json(result)
    return {name: text for name, text in written.items() if text}


def _environment(result: Document) -> list[Fact]:
    where, digest = result.environment, result.task.sha256
    facts = {}
    for key, value in (where.model_dump(exclude_none=True) if where else {}).items():
        if key.endswith("_bytes"):
            facts[key.removesuffix("_bytes").replace("_", " ")] = size(value)
        elif isinstance(value, str | int | float):
            facts[key.replace("_", " ")] = str(value)
    others = (where.other_processes if where else None) or []
    facts["memory held by others"] = ", ".join(f"process {each.pid}: {size(each.memory_bytes)}" for each in others)
    facts["task"], facts["sha256 of the task"] = result.task.path, f"{digest[:16]}…" if digest else ""
    facts |= {"batchtune": result.batchtune_version, "measured at": _moment(result.created_at)}
    return [Fact(name, text) for name, text in facts.items() if text not in {"", "-"}]


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"

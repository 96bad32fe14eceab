"""One reading of a result document, by its kind: everything that a report shows is put into words here."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator

from batchtune.document import Document
from batchtune.errors import UsageError
from batchtune.report.view import estimate, lengths, probe, study
from batchtune.report.view.figure import Plot
from batchtune.report.view.model import Fact, Headline, Section, View, facts
from batchtune.report.view.select import chosen_probe, probes_of
from batchtune.report.view.settings import pytorch
from batchtune.report.view.study_plots import bars, curves, landscape
from batchtune.report.view.trainers import EXPORTS
from batchtune.report.view.words import machine, moment, start_of_search, target_text
from batchtune.units import size
from batchtune.vocabulary import length_text

_KEYS = {
    "--precision": "precision",
    "--memory-limit": "memory.limit",
    "--margin": "memory.margin",
    "--device": "device",
}
_CHOSEN = {"batch size", "learning rate", "precision"}  # of all that is to be chosen, in one line
_LONGEST_LINE = 200
_PLOTS: dict[str, Callable[[Document], Plot | None]] = {
    "estimates": estimate.largest_plot,
    "efficiency": estimate.efficiency_plot,
    "step": estimate.step_plot,
    "curves": curves,
    "landscape": landscape,
    "memory": lambda result: probe.memory_plot(probes_of(result)),
    "lengths": lambda result: lengths.lengths_plot(probes_of(result)),
    "throughput": lambda result: probe.throughput_plot(probes_of(result)),
    "sensors": lambda result: probe.sensors_plot(chosen) if (chosen := chosen_probe(result)) else None,
}


def plot_of(result: Document, name: str) -> Plot | None:
    """One figure; None where the result has no measurements for it."""
    return _PLOTS[name](result)


def plots_of(result: Document) -> dict[str, Plot]:
    """Every figure that the result has the measurements for, by name, in reading order."""
    return {name: plot for name in _PLOTS if (plot := plot_of(result, name)) is not None}


def view_of(result: Document) -> View:
    """What every report shows of a result."""
    probes, chosen, where, found = probes_of(result), chosen_probe(result), result.environment, result.recommendation
    sections, alone = list(_sections(result)), [chosen] if chosen else []
    small = [lengths.lengths_plot(alone), probe.memory_plot(alone), probe.throughput_plot(alone)]
    about = [where.device, f"torch {where.torch}" if where.torch else ""] if where else []
    return View(
        kind=result.kind,
        title=result.name or result.task.path,
        status=result.status,
        problem=result.error.message if result.error else "",
        about=[each for each in (moment(result.created_at), *about) if each],
        headline=_headline(result),
        comparison=study.comparison(result, found) if found else None,
        bars=bars(result, found) if found else [],
        overview=sections[0].tables[0] if _is_of_several(result) else None,
        certificates=[probe.certified(each) for each in probes],
        plots=[each for each in small if each],
        lines=_lines(result),
        commands=_commands(result),
        sections=sections,
        settings=(settings := _settings(result)),
        notes={each.title: each.said_beside(result) for each in EXPORTS.values() if each.title in settings},
        warnings=result.warnings,
        measured_on=machine(where) if where else "",
        environment=_environment(result),
        version=result.batchtune_version,
    )


def in_short(result: Document) -> str:
    """What a result is of and what it comes to, in one line."""
    headline, problem = _headline(result), result.error.message if result.error else ""
    told = problem or (f"{headline.figure} {headline.words}" if headline else "nothing was measured yet")
    choice = [f"{each.name} {each.text}" for each in (headline.choice if headline else ()) if each.name in _CHOSEN]
    line = f"{result.kind} of {result.name or result.task.path}, {result.status}: {'; '.join([told, *choice])}"
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"


def _is_of_several(result: Document) -> bool:
    """Whether there are several answers, which the first table of the report has."""
    probes = probes_of(result)
    of_lengths = any(each.lengths for each in (probes if result.kind == "probe" else result.estimates or ()))
    return len(probes) > 1 or len(result.estimates or []) > 1 or of_lengths


def _headline(result: Document) -> Headline | None:
    """The recommendation of a study, the largest batch of a probe or of an estimate; None where there is none."""
    if result.recommendation is not None:
        return study.headline(result, result.recommendation)
    if result.kind == "estimate":
        return estimate.headline(result.estimates or [])
    chosen = chosen_probe(result)
    return probe.headline(chosen) if chosen else None


def _lines(result: Document) -> list[Fact]:
    target, chosen = result.target, chosen_probe(result)
    said = [Fact("target", target_text(target), target.reason)] if target and target.value is not None else []
    said += [*lengths.lengths_lines(chosen), *probe.lines(chosen)] if chosen else estimate.lines(result.estimates or [])
    return said + (start_of_search(result.prior) if result.prior else [])


def _commands(result: Document) -> list[Fact]:
    """What to run next, for each of what it is good for."""
    found, task, rows = result.recommendation, shlex.quote(result.task.path), result.estimates or []
    if found is not None and found.confirm_command:
        return [Fact("to confirm", found.confirm_command)]
    if found is not None:
        export = f"batchtune report {shlex.quote(result.name)} --format env"
        return [Fact("next", export, "or hf, lightning, deepspeed")]
    if result.kind == "estimate" and any(row.max_batch_size for row in rows):
        count, asked = len({row.gpu for row in rows}), ",".join(length_text(each.length) for each in rows[0].lengths)
        inference = "--inference" if any(row.inference for row in rows) else ""
        options = " ".join(filter(None, [task, result.options, inference, f"--lengths {asked}" if asked else ""]))
        more = Fact("next", f"batchtune estimate {options} --gpu A100-80GB", f"one of them; -v: all {count}")
        of_probe = options.replace("--world-size", "--nproc-per-node")
        there = Fact("next", f"batchtune probe {of_probe}", "there: what really runs")
        return [more, there] if count > estimate.MOST_ROWS else [there]
    if result.kind == "probe" and result.probe and result.probe.max_batch_size and not result.probe.inference:
        parallel = result.probe.data_parallel
        ranks = f" --ranks {parallel.world_size} --strategy {parallel.strategy}" if parallel else ""
        return [Fact("next", f"batchtune tune {task}{ranks}{_keys(result.options)}", "the learning rate, too")]
    return []


def _keys(options: str | None) -> str:
    """Options of a probe as the keys of a configuration that mean the same, which `tune` takes on its command line."""
    flags = (options or "").split()
    given = zip(flags[::2], flags[1::2], strict=False)
    return "".join(f" {_KEYS[flag]}={shlex.quote(value)}" for flag, value in given if flag in _KEYS)


def _sections(result: Document) -> Iterator[Section]:
    """The evidence; a study's is its runs, then what its probe tried."""
    probes = probes_of(result)
    if len(probes) > 1:
        yield Section("Precisions", [probe.precisions(probes, chosen_probe(result))])
    if result.estimates:
        if any(row.lengths for row in result.estimates):
            yield estimate.lengths(result.estimates)
        yield estimate.section(result.estimates)
    if result.details:
        yield estimate.memory(result.details)
    if result.recommendation is not None and result.recommendation.scaling is not None:
        yield study.scaling(result.recommendation.scaling)
    if result.trials:
        yield Section("Runs", [study.configurations(result), study.runs(result)])
    if found := [lengths.lengths_table(each) for each in probes if each.lengths]:
        yield Section("Lengths", found)
    if timed := [probe.throughput(each) for each in probes if each.throughput]:
        yield Section("Throughput", timed)
    if tried := [probe.attempts(each) for each in probes if each.attempts]:
        yield Section("Attempts", tried)


def _settings(result: Document) -> dict[str, str]:
    written = {"PyTorch": pytorch(result)}
    for export in EXPORTS.values():
        with contextlib.suppress(UsageError):
            written[export.title] = export.text(result)
    if result.recommendation is not None:
        written["JSON"] = result.recommendation.model_dump_json(exclude_none=True, exclude={"reason"}, indent=2)
    return {name: text for name, text in written.items() if text}


def _environment(result: Document) -> list[Fact]:
    where, digest = result.environment, result.task.sha256
    known = {}
    for key, value in (where.model_dump(exclude_none=True) if where else {}).items():
        if key.endswith("_bytes"):
            known[key.removesuffix("_bytes").replace("_", " ")] = size(value)
        elif isinstance(value, str | int | float):
            known[key.replace("_", " ")] = str(value)
    others = (where.other_processes if where else None) or []
    known["memory held by others"] = ", ".join(f"process {each.pid}: {size(each.memory_bytes)}" for each in others)
    known["task"], known["sha256 of the task"] = result.task.path, f"{digest[:16]}…" if digest else ""
    return facts(known | {"batchtune": result.batchtune_version, "measured at": moment(result.created_at)})

"""A result as Markdown, to paste into an issue or a pull request."""

from __future__ import annotations

from batchtune.document import Document, Interval
from batchtune.report.view.select import estimated, named_values
from batchtune.report.view.words import machine
from batchtune.units import duration, number


def to_markdown(result: Document) -> str:
    """A summary to paste into an issue or a pull request."""
    lines = [f"## batchtune {result.kind}: {result.name or result.task.path}", ""]
    if result.status != "complete":
        lines += [f"**{result.status}**" + (f": {_line(result.error.message)}" if result.error else ""), ""]
    found, base = result.recommendation, result.baseline
    if found is not None:
        lines += ["| | recommended | today |", "|---|---|---|"]
        rows: list[tuple[str, object, object]] = [
            ("batch size", found.global_batch_size, base.global_batch_size if base else ""),
            ("micro-batch size", found.micro_batch_size, base.micro_batch_size if base else ""),
            (
                "gradient accumulation steps",
                found.gradient_accumulation_steps,
                base.gradient_accumulation_steps if base else "",
            ),
            ("learning rate", number(found.learning_rate), number(base.learning_rate) if base else ""),
            (
                "optimizer",
                named_values(found.optimizer_arguments),
                named_values(base.optimizer_arguments) if base else "",
            ),
            ("precision", found.precision, base.precision if base else ""),
            (
                "time to target, s",
                _text(found.time_to_target_seconds),
                _text(base.time_to_target_seconds) if base else "",
            ),
            (
                "energy to target, J",
                _text(found.energy_to_target_joules),
                _text(base.energy_to_target_joules) if base else "",
            ),
            (
                result.target.metric if result.target else "metric",
                _text(found.value),
                _text(base.value) if base else "",
            ),
            ("speed-up", _text(found.speedup_over_baseline), ""),
            ("energy saving", _text(found.energy_saving_over_baseline), ""),
        ]
        lines += [f"| {_cell(name)} | {_cell(left)} | {_cell(right)} |" for name, left, right in rows if left != ""]
        lines += ["", _line(found.reason), ""]
    for probe in result.probes or ([result.probe] if result.probe else []):
        failing, limit = probe.first_failing_batch_size or "none met", probe.limited_by or "nothing met"
        largest = f"Largest micro-batch at {probe.precision}: **{probe.max_batch_size or 'none'}**"
        lines += [f"{largest} (first failing: {failing}, limited by {limit}).", ""]
        if probe.throughput:
            lines += ["| batch size | samples/s | step |", "|---:|---:|---:|"]
            lines += [
                f"| {point.batch_size} | {number(point.samples_per_second)} | {duration(point.step_seconds)} |"
                for point in probe.throughput
            ]
            lines.append("")
    if result.estimates:
        lines += ["| GPU (estimated, not measured) | precision | largest | safe |", "|---|---|---:|---:|"]
        lines += [
            f"| {_cell(each.gpu)} | {each.precision} | {estimated(each, each.max_batch_size)} "
            f"| {estimated(each, each.safe_max_batch_size)} |"
            for each in result.estimates
        ]
        lines.append("")
    lines += [f"> warning: {_line(warning)}" for warning in result.warnings]
    if result.environment:
        lines += [""] if result.warnings else []  # or else it goes on with the warning
        lines.append(f"Measured on {_line(machine(result.environment))}.")
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(value: object) -> str:
    """A value that neither ends its cell of a table nor its line."""
    return _line(str(value)).replace("|", "\\|")


def _text(value: Interval | None) -> str:
    if value is None:
        return ""
    if value.at_least:
        return f"at least {number(value.low)}"
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"

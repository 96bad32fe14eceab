"""Results for other programs: JSON, CSV, Markdown, and the lines to paste into a training script."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from batchtune.report.export.trainers import EXPORTS
from batchtune.report.view.pick import estimated, named_values, to_train_with
from batchtune.report.view.wording import machine
from batchtune.results import Interval, Result
from batchtune.units import duration, number, size


def to_json(result: Result) -> str:
    """The result document."""
    return result.to_json() + "\n"


def to_csv(result: Result) -> str:
    """The rows behind the answer; see `Result.to_frame`."""
    buffer = io.StringIO()
    result.to_frame().to_csv(buffer, index=False)
    return buffer.getvalue()


def snippet(result: Result) -> str:
    """The settings to train with as lines of plain PyTorch; '' where there are none that ran."""
    found = to_train_with(result)
    if found is None:
        return ""
    largest = f"  # {found.reason}" if result.recommendation is None else ""
    lines = [f"batch_size = {found.micro_batch_size}{largest}"]
    lines.append(f"accumulation_steps = {found.gradient_accumulation_steps}")
    if found.learning_rate is not None:
        lines.append(f"learning_rate = {found.learning_rate!r}")
    lines += [f"{name} = {value!r}" for name, value in found.optimizer_arguments.items()]
    if found.total_steps is not None:
        lines.append(f"total_steps = {found.total_steps}  # the horizon of the learning rate's schedule")
    types = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    if found.precision in types:
        lines.append(f"autocast = torch.autocast(device.type, dtype={types[found.precision]})")
    elif found.precision == "tf32":
        lines.append("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True")
    return "\n".join(lines)


def to_markdown(result: Result) -> str:
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


def environment_text(facts: dict[str, Any]) -> str:
    """The environment as lines to paste into an issue."""
    lines = {"batchtune": facts["batchtune"]} | facts["environment"] | facts["sensors"]
    width = max(len(name) for name in lines)
    shown = {name: size(value) if name.endswith("_bytes") else value for name, value in lines.items()}
    shown["other_processes"] = ", ".join(
        f"pid {each['pid']} {size(each['memory_bytes'])}" for each in lines.get("other_processes") or ()
    )
    return "".join(f"{name:<{width}}  {value}\n" for name, value in shown.items() if value not in (None, ""))


def _text(value: Interval | None) -> str:
    if value is None:
        return ""
    if value.at_least:
        return f"at least {number(value.low)}"
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"


def to_html(result: Result) -> str:
    """The whole report as one self-contained page."""
    from batchtune.report.page.html import to_html as page  # it shows the snippets of this module

    return page(result)


def recommendation_json(result: Result) -> str:
    """The recommendation alone, for a program's configuration."""
    found = result.recommendation
    return "" if found is None else found.model_dump_json(exclude_none=True, exclude={"reason"}, indent=2)


FORMATS: dict[str, Callable[[Result], str]] = {
    "json": to_json,
    "markdown": to_markdown,
    "html": to_html,
    "csv": to_csv,
}
"""What `report --format` can write besides the table and the settings for a training library (`trainers.EXPORTS`)."""

SNIPPETS: dict[str, Callable[[Result], str]] = {
    "PyTorch": snippet,
    **{export.title: export.snippet for export in EXPORTS.values()},
    "JSON": recommendation_json,
    "Markdown": to_markdown,
}
"""What the HTML report offers to paste, one tab each; a writer that has nothing to say for a result returns ''."""

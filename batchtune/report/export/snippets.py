"""The settings that ran, as text to paste: plain PyTorch, a training library's words, JSON, Markdown."""

from __future__ import annotations

from collections.abc import Callable

from batchtune.document import Document
from batchtune.report.export.markdown import to_markdown
from batchtune.report.export.trainers import EXPORTS
from batchtune.report.view.select import to_train_with


def snippet(result: Document) -> str:
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


def recommendation_json(result: Document) -> str:
    """The recommendation alone, for a program's configuration."""
    found = result.recommendation
    return "" if found is None else found.model_dump_json(exclude_none=True, exclude={"reason"}, indent=2)


SNIPPETS: dict[str, Callable[[Document], str]] = {
    "PyTorch": snippet,
    **{export.title: export.snippet for export in EXPORTS.values()},
    "JSON": recommendation_json,
    "Markdown": to_markdown,
}
"""What the HTML report offers to paste, one tab each; a writer that has nothing to say for a result returns ''."""

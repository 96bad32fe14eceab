"""The settings to train with, all of which ran: which they are, whether they were checked, and as plain PyTorch."""

from __future__ import annotations

import math

from batchtune.document import Document, Recommendation, Trial

UNCHECKED = "the largest batch that trained so far: not checked in a fresh process, larger or smaller may be the answer"
"""What is said of settings of which `is_checked` is false."""


def is_checked(result: Document) -> bool:
    """Whether the settings ran in a fresh process, with evaluation and saving, or in a study."""
    return result.recommendation is not None or result.probe is None or result.probe.verified_in_fresh_process


def to_train_with(result: Document) -> Recommendation | None:
    """The settings: those recommended, or the largest batch where only that was asked.

    A probe tries no learning rates, so its settings have none; one of inference has no settings to train with.
    """
    probe = result.probe if result.kind == "probe" else None
    if result.recommendation is not None or probe is None or probe.inference or probe.max_batch_size is None:
        return result.recommendation
    steps = probe.gradient_accumulation_steps or 1
    ranks = probe.data_parallel.world_size if probe.data_parallel else 1
    return Recommendation(
        micro_batch_size=probe.max_batch_size,
        gradient_accumulation_steps=steps,
        world_size=ranks,
        global_batch_size=probe.max_batch_size * steps * ranks,
        precision=probe.precision,
        reason="the largest batch that trains" if is_checked(result) else UNCHECKED,
    )


def is_of(trial: Trial, configuration: Recommendation | None) -> bool:
    """Whether a trial ran with exactly this configuration."""
    return (
        configuration is not None
        and configuration.learning_rate is not None
        and trial.batch_size == configuration.global_batch_size
        and trial.precision == configuration.precision
        and trial.optimizer_arguments == configuration.optimizer_arguments
        and trial.gradient_clipping == configuration.gradient_clipping
        and math.isclose(trial.learning_rate, configuration.learning_rate, rel_tol=1e-6)
    )


def pytorch(result: Document) -> str:
    """The settings as lines of plain PyTorch; '' where there are none that ran."""
    found = to_train_with(result)
    if found is None:
        return _evaluation_batch(result)
    largest = f"  # {found.reason}" if result.recommendation is None else ""
    lines = [f"batch_size = {found.micro_batch_size}{largest}"]
    lines.append(f"accumulation_steps = {found.gradient_accumulation_steps}")
    if found.learning_rate is not None:
        lines.append(f"learning_rate = {found.learning_rate!r}")
    lines += [f"{name} = {value!r}" for name, value in found.optimizer_arguments.items()]
    if found.learning_rate is not None and result.task.optimizer_settings and found.optimizer is None:
        made = "".join(f", {name}={value!r}" for name, value in result.task.optimizer_settings.values.items())
        lines.append(f"# optimizer: {result.task.optimizer}(model.parameters(), lr=learning_rate{made})")
    clipping = found.gradient_clipping
    for name, bound in [("norm", clipping.norm), ("value", clipping.value)] if clipping else []:
        if bound is not None:
            call = f"torch.nn.utils.clip_grad_{name}_(model.parameters(), {bound!r})"
            lines.append(f"clip_gradients = lambda: {call}  # call it before optimizer.step()")
    if found.total_steps is not None:
        lines.append(f"total_steps = {found.total_steps}  # the horizon of the learning rate's schedule")
    types = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    if found.precision in types:
        lines.append(f"autocast = torch.autocast(device.type, dtype={types[found.precision]})")
    elif found.precision == "tf32":
        lines.append("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True")
    return "\n".join(lines)


def _evaluation_batch(result: Document) -> str:
    probe = result.probe
    if probe is None or not probe.inference or probe.max_batch_size is None:
        return ""
    checked = "" if is_checked(result) else ", not checked in a fresh process"
    about = f"the largest under torch.inference_mode(){checked}; training takes more memory"
    return f"evaluation_batch_size = {probe.max_batch_size}  # {about}"


def recommendation_json(result: Document) -> str:
    """The recommendation alone, for a program's configuration."""
    found = result.recommendation
    return "" if found is None else found.model_dump_json(exclude_none=True, exclude={"reason"}, indent=2)

"""A Hugging Face `Trainer` that trains with a result."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

from transformers import TrainerCallback

from batchtune.errors import UsageError
from batchtune.task.adapting import recommended, require_world, say

Arguments = TypeVar("Arguments")


def apply_result(arguments: Arguments, result: str | os.PathLike[str]) -> Arguments:
    """A copy of `TrainingArguments` with what `batchtune tune` recommends, by a result file or run folder.

    Sets per_device_train_batch_size, gradient_accumulation_steps, learning_rate, max_grad_norm, bf16, fp16 and,
    where it was measured in that, tf32. How long to train is yours: where `max_steps` is not the horizon of the
    schedule that was measured, a warning says so.

    Raises:
        UsageError: the result recommends nothing.
    """
    found = recommended(result)
    changes: dict[str, bool | float] = {
        "per_device_train_batch_size": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "bf16": found.precision == "bf16",
        "fp16": found.precision == "fp16",
    }
    if found.gradient_clipping is not None and found.gradient_clipping.value is None:
        changes["max_grad_norm"] = found.gradient_clipping.norm or 0.0
    if found.learning_rate is not None:
        changes["learning_rate"] = found.learning_rate
    if found.precision == "tf32":
        changes["tf32"] = True
    steps, given = found.total_steps, getattr(arguments, "max_steps", None)
    if steps is not None and given != steps:
        say(f"measured with a schedule over {steps} steps, and max_steps is {given}; {steps} is as measured")
    return dataclasses.replace(arguments, **changes)  # type: ignore[type-var]  # they are a dataclass


class ApplyResult(TrainerCallback):  # type: ignore[misc]  # transformers is no dependency, its types are not looked at
    """Sees to it that a Trainer trains with what `batchtune tune` recommends, by a result file or run folder.

    A Trainer has noted batch size and precision before it asks a callback anything, so they belong in its arguments:

        Trainer(args=apply_result(args, "result.json"), callbacks=[ApplyResult("result.json")], ...)

    The callback sets accumulation and learning rate where the arguments differ, says so where the precision does, and
    stops a run whose batch size does.
    """

    def __init__(self, result: str | os.PathLike[str]) -> None:
        self._found, self._path = recommended(result), os.fspath(result)

    def on_init_end(self, args: Any, state: object, control: object, **_: object) -> None:
        """Before the optimizer is made; the batch size takes effect in versions that note it later than this."""
        del state, control
        found = self._found
        args.per_device_train_batch_size = found.micro_batch_size
        args.gradient_accumulation_steps = found.gradient_accumulation_steps
        if found.learning_rate is not None:
            args.learning_rate = found.learning_rate

    def on_train_begin(
        self, args: Any, state: object, control: object, train_dataloader: object = None, **_: object
    ) -> None:
        """Checks what the run is about to train with; raises UsageError where the batch size is another."""
        del state, control
        found = self._found
        loader = getattr(train_dataloader, "batch_sampler", None) or train_dataloader
        size = getattr(loader, "batch_size", None)
        if size != found.micro_batch_size or args.gradient_accumulation_steps != found.gradient_accumulation_steps:
            raise UsageError(
                f"this Trainer is about to train with batch size {size} × {args.gradient_accumulation_steps}, not the "
                f"{found.micro_batch_size} × {found.gradient_accumulation_steps} of {self._path}: give it "
                f"args=apply_result(args, {self._path!r}) and this callback in callbacks=[...]"
            )
        require_world(found, args.world_size)
        runs_in = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        wanted = "fp32" if found.precision == "tf32" else found.precision
        if runs_in != wanted:
            say(f"measured in {found.precision}, this Trainer runs in {runs_in}; apply_result sets it")

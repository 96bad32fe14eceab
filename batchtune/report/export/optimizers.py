"""What a recommended optimizer is made with, and which of it the Trainer's fields carry."""

from __future__ import annotations

from typing import Any

from batchtune.document import Document, Recommendation
from batchtune.errors import UsageError

_HF_OPTIMIZERS = {
    "AdamW": ("adamw_torch", {"weight_decay": "weight_decay", "eps": "adam_epsilon"}, ()),
    "SGD": ("sgd", {"weight_decay": "weight_decay"}, ("momentum", "dampening", "nesterov")),
    "Adagrad": ("adagrad", {"weight_decay": "weight_decay"}, ("lr_decay", "eps")),
    "RMSprop": ("rmsprop", {"weight_decay": "weight_decay"}, ("momentum", "alpha", "eps", "centered")),
}
"""Of torch's optimizers that the Trainer has: its `optim`, the fields of their settings, and those in `optim_args`."""


def optimizer_of(found: Recommendation, result: Document) -> str | None:
    """The class of the optimizer that was recommended: an argument of build_optimizer may have chosen another."""
    return found.optimizer or result.task.optimizer


def made_with(found: Recommendation, result: Document) -> dict[str, Any]:
    """All that is known of how the recommended optimizer is made, its learning rate left out."""
    known = result.task.optimizer_settings
    same = found.optimizer in {None, result.task.optimizer}
    searched = dict[str, Any](found.optimizer_arguments)
    return known.values | searched if known and same and found.learning_rate is not None else searched


def optimizer_notes(found: Recommendation, result: Document) -> list[str]:
    """What of the optimizer no export can say."""
    known, optimizer = result.task.optimizer_settings, optimizer_of(found, result)
    if found.learning_rate is None:
        return []
    if known is None or found.optimizer not in {None, result.task.optimizer}:
        return [f"what else {optimizer or 'your optimizer'} was made with is not known: add it yourself"]
    if not known.differing:
        return []
    names = ", ".join(known.differing)
    return [f"groups of parameters differ in {names} here: set those as your build_optimizer does"]


def hf_optimizer(found: Recommendation, result: Document) -> dict[str, Any]:
    """The optimizer and, where the task has none, the constant schedule: the Trainer's own would be linear.

    Raises:
        UsageError: the Trainer has no such optimizer; the learning rate is worth nothing with another.
    """
    if found.learning_rate is None:
        return {}
    optimizer, known = optimizer_of(found, result), result.task.optimizer_settings
    if optimizer is not None and optimizer not in _HF_OPTIMIZERS:
        raise UsageError(
            f"the learning rate is one for {optimizer}, which TrainingArguments cannot name; take --format env, and "
            "give your own to the Trainer: Trainer(..., optimizers=(build_optimizer(model, lr), None))"
        )
    name, fields, arguments = _HF_OPTIMIZERS[optimizer or "AdamW"]
    made = made_with(found, result)
    betas = made.get("betas", [None, None])
    return {
        "optim": name if optimizer else None,
        **{theirs: made.get(ours) for ours, theirs in fields.items()},
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "optim_args": ",".join(f"{each}={made[each]}" for each in arguments if each in made) or None,
        "lr_scheduler_type": "constant" if known and not known.scheduler and found.total_steps is None else None,
    }


def hf_optimizer_notes(found: Recommendation, result: Document) -> list[str]:
    """What the Trainer does otherwise than it was measured, or cannot be told."""
    notes = optimizer_notes(found, result)
    _, fields, arguments = _HF_OPTIMIZERS.get(optimizer_of(found, result) or "AdamW", ("", {}, ()))
    made = made_with(found, result)
    for name, value in made.items():
        if value is not False and name not in {*fields, *arguments, "betas"}:
            notes.append(f"no field says {name}={value!r}: give it to your optimizer")
    if made.get("weight_decay"):
        notes.append("the Trainer decays no biases and no norms; what was measured decays what build_optimizer says")
    return notes

"""What of a step the user's own Lightning Trainer decides: accumulation and gradient clipping."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from batchtune.document import GradientClipping

_ARGUMENTS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


@dataclass(frozen=True)
class OwnTrainer:
    """The user's own Trainer as far as it can be seen.

    Attributes:
        accumulation_steps: micro-batches of an optimizer step.
        clipping: None: there is none.
        unseen: a sentence on what of it cannot be seen; empty where there is no such thing.
    """

    accumulation_steps: int = 1
    clipping: GradientClipping | None = None
    unseen: str = ""


def own_trainer(given: Sequence[object], namespace: ModuleType) -> OwnTrainer:
    """Looks for the Trainer: beside the module, among the file's objects, then in the text of the file.

    Args:
        given: what the user's function returned beside the module.
        namespace: the user's file.
    """
    for each in (*given, *vars(namespace).values()):
        if _is_trainer(each):
            return _of({name: getattr(each, name, None) for name in _ARGUMENTS})
    try:
        calls = list(_calls(ast.parse(inspect.getsource(namespace))))
    except (OSError, TypeError, SyntaxError):  # code without a file
        return OwnTrainer()
    found = [{word.arg: word.value for word in call.keywords if word.arg in _ARGUMENTS} for call in calls]
    found = [each for each in found if each]
    try:
        read = [{name: ast.literal_eval(value) for name, value in each.items()} for each in found]
    except ValueError:
        read = []
    if found and (not read or any(each != read[0] for each in read)):
        wanted = ", ".join(
            dict.fromkeys(f"{name}={ast.unparse(value)}" for each in found for name, value in each.items())
        )
        return OwnTrainer(
            unseen=f"Trainer({wanted}) in the file is not applied, since it is not known before it runs: return the "
            "Trainer beside the module, or set gradient_clipping and --accumulation"
        )
    return _of(read[0]) if read else OwnTrainer()


def _of(arguments: dict[str, Any]) -> OwnTrainer:
    value, kind = arguments.get("gradient_clip_val"), arguments.get("gradient_clip_algorithm")
    name = str(getattr(kind, "value", kind) or "norm")
    clipping = GradientClipping.model_validate({name: float(value)}) if value else None
    return OwnTrainer(int(arguments.get("accumulate_grad_batches") or 1), clipping)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls of something named Trainer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Trainer":
            yield node


def _is_trainer(value: object) -> bool:
    kinds = inspect.getmro(type(value))
    return any(each.__name__ == "Trainer" and "lightning" in each.__module__.partition(".")[0] for each in kinds)

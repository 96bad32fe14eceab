"""What the user's own Lightning Trainer says: how steps are made up, and on how many devices by which strategy."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
from collections.abc import Mapping, Sequence
from types import ModuleType

from batchtune.document import GradientClipping
from batchtune.task.adapting import Adapted

_STEPS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_RANKS = ("strategy", "devices")
# how the names of callbacks end that change nothing of a training
_WATCH_ONLY = ("Checkpoint", "ProgressBar", "Monitor", "Summary", "EarlyStopping", "Timer", "ApplyResult")
_ALONE = {"auto", "single_device", "SingleDeviceStrategy", "None"}
_SAME = {"DDPStrategy": "ddp", "FSDPStrategy": "fsdp", "fsdp": "fsdp", "ddp": "ddp"}
_SAME |= {f"ddp_{how}": "ddp" for how in ("spawn", "fork", "notebook")}
_SAME |= {f"{name}_find_unused_parameters_false": "ddp" for name in ("ddp", *_SAME) if name.startswith("ddp")}


def take_over_trainer(task: Adapted, given: Sequence[object], namespace: ModuleType) -> None:
    """Gives a task the accumulation steps and the clipping of the user's own Trainer, and notes on what is not applied.

    It is looked for beside the module (`given`), among the file's objects, then in the text of the file.

    Raises:
        UsageError: its strategy has no equal here.
    """
    own = next((each for each in (*given, *vars(namespace).values()) if _is_trainer(each)), None)
    if own is not None:
        strategy = type(getattr(own, "strategy", None)).__name__
        shared = {"strategy": strategy, "devices": getattr(own, "num_devices", 1)}
        left_out = _left_out([type(each).__name__ for each in getattr(own, "callbacks", ())])
        _take_over(task, {name: getattr(own, name, None) for name in _STEPS}, shared, left_out)
        return
    try:
        nodes = list(ast.walk(ast.parse(inspect.getsource(namespace))))
    except (OSError, TypeError, SyntaxError):  # code without a file
        return
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node) == "Trainer"]
    (steps, unread_steps), (shared, unread_ranks) = _read(calls, _STEPS), _read(calls, _RANKS)
    lists = [word.value for call in calls for word in call.keywords if word.arg == "callbacks"]
    callbacks = [each for value in lists if isinstance(value, ast.List) for each in value.elts]
    notes = _left_out([_called(each) if isinstance(each, ast.Call) else ast.unparse(each) for each in callbacks])
    if unread_steps:
        notes.append(
            f"{unread_steps} in the file is not applied, since it is not known before it runs: return the Trainer "
            "beside the module, or set gradient_clipping and --accumulation"
        )
    if unread_ranks:
        notes.append(f"{unread_ranks} in the file is not applied: tune with --ranks N and --strategy ddp or fsdp")
    _take_over(task, steps, shared, notes)


def _left_out(callbacks: Sequence[str]) -> list[str]:
    """A sentence on callbacks, by the names of their classes, that may do more than watch a training."""
    names = ", ".join(dict.fromkeys(each for each in callbacks if not each.endswith(_WATCH_ONLY)))
    return [f"the Trainer's callbacks {names} are not called, whatever they do to the training"] if names else []


def _read(calls: Sequence[ast.Call], names: Sequence[str]) -> tuple[dict[str, object], str]:
    """The arguments of these names where all calls have the same; else, as they are written, what they have."""
    arguments = [{str(word.arg): word.value for word in call.keywords if word.arg in names} for call in calls]
    found = [each for each in arguments if each]
    with contextlib.suppress(ValueError):
        read = [{name: _literal(value) for name, value in each.items()} for each in found]
        if all(each == read[0] for each in read):
            return (read[0] if read else {}), ""
    words = (f"{name}={ast.unparse(value)}" for each in found for name, value in each.items())
    return {}, f"Trainer({', '.join(dict.fromkeys(words))})"


def _literal(value: ast.expr) -> object:
    """A value that is written out, or the name of the class of an object that is made there."""
    return _called(value) if isinstance(value, ast.Call) else ast.literal_eval(value)


def _take_over(
    task: Adapted, steps: Mapping[str, object], shared: Mapping[str, object], notes: Sequence[str] = ()
) -> None:
    value, kind = steps.get("gradient_clip_val"), steps.get("gradient_clip_algorithm")
    name = str(getattr(kind, "value", kind) or "norm")
    task.gradient_clipping = GradientClipping.model_validate({name: float(str(value))}) if value else None
    task.accumulation_steps = int(str(steps.get("accumulate_grad_batches") or 1))
    count, strategy = _count(shared.get("devices")), str(shared.get("strategy", "auto"))
    if strategy not in _ALONE and strategy not in _SAME:
        raise task.refused(
            f"its Trainer's strategy {strategy} is not taken over: leave it out, and tune with --ranks N and "
            "--strategy ddp, or fsdp (as ZeRO-3), which take its place"
        )
    is_shared = strategy in _SAME or count not in {"1", "N"}
    if is_shared and "WORLD_SIZE" not in os.environ:  # where it is set, ranks train as one
        told = ", ".join(f"{name}={each!r}" for name, each in shared.items())
        told = f"Trainer({told}) does not make a run of several devices: for that, tune with --ranks {count}"
        notes = [*notes, f"{told} --strategy {_SAME.get(strategy, 'ddp')}"]
    task.notes = tuple(notes)


def _count(devices: object) -> str:
    """How many devices are asked for; N where that depends on the machine."""
    count = len(devices) if isinstance(devices, list | tuple) else devices
    text = str(count)
    return text if text.isdecimal() and int(text) > 0 else "N"


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_trainer(value: object) -> bool:
    kinds = inspect.getmro(type(value))
    return any(each.__name__ == "Trainer" and "lightning" in each.__module__.partition(".")[0] for each in kinds)

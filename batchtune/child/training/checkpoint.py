"""A run laid aside: everything of its training that must be put back for it to go on as if it had never stopped."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from batchtune.child.training.trainer import Trainer, TrainingBatches
from batchtune.errors import UsageError
from batchtune.task.adapting.adapted import Adapted

LEAST_FREE_BYTES = 1 << 30  # what a disk has left after it: a run's memory must not fill up what others write to


def save(path: Path, trainer: Trainer, batches: TrainingBatches, progress: dict[str, Any]) -> bool:
    """Writes a run's state to a file, which is there whole or not at all.

    Args:
        path: the file; its folder is made.
        trainer: model, optimizer, scheduler and loss scaler.
        batches: where in the data the run stands.
        progress: plain numbers of the caller's.

    Returns:
        Whether it was written: not where the disk is nearly full, or something of the user's cannot be saved.
    """
    scheduler, source = trainer.scheduler, trainer.task.source
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        return False
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scheduled_steps": trainer.scheduled_steps,
            "scaler": trainer.precision.scaler.state_dict(),
            "batches": batches.state(),
            "adapted": source.state(trainer.model) if isinstance(source, Adapted) else None,
            "random": _random_state(trainer.device),
            "progress": progress,
        }
        if shutil.disk_usage(path.parent).free < LEAST_FREE_BYTES + _tensor_bytes(state):
            return False
        torch.save(state, partial)
        torch.load(partial, map_location="cpu", weights_only=True, mmap=True)  # nothing in it that needs unpickling
        partial.replace(path)
    except Exception:  # noqa: BLE001 - the user's state may hold anything; a run that cannot be kept is only pruned
        partial.unlink(missing_ok=True)
        return False
    return True


def load(path: Path, trainer: Trainer, batches: TrainingBatches) -> dict[str, Any]:
    """Puts a saved state back, the random numbers last; returns the caller's numbers.

    Raises:
        UsageError: the file is damaged, or another's: one that would have to be unpickled is not.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises what it likes
        kind = type(error).__name__
        raise UsageError(f"{path}: no run that can go on ({kind}); delete it, or start over with --fresh") from None
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.scheduled_steps = state["scheduled_steps"]
    trainer.precision.scaler.load_state_dict(state["scaler"])
    batches.restore(state["batches"])
    if isinstance(trainer.task.source, Adapted) and state.get("adapted"):
        trainer.task.source.restore(trainer.model, state["adapted"])
    _set_random_state(state["random"], trainer.device)
    progress: dict[str, Any] = state["progress"]
    return progress


def _tensor_bytes(state: Any) -> int:
    """What the tensors of nested dicts and lists take."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_tensor_bytes(part) for part in parts)


def _random_state(device: torch.device) -> dict[str, Any]:
    """The states of every generator of random numbers that training may draw from, as plain values."""
    numpy: Any = sys.modules.get("numpy")
    name, keys, *rest = numpy.random.get_state() if numpy else ("", torch.empty(0))
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
        "numpy": [name, keys.tolist(), *rest],
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    numpy: Any = sys.modules.get("numpy")
    if numpy and state["numpy"][0]:
        numpy.random.set_state(tuple(state["numpy"]))

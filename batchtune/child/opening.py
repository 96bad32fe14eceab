"""How a child begins: the device, who else is on it, the task, and how that steps."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from batchtune.child import heartbeat
from batchtune.child.evaluate import require_metric
from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.stepping import choose, every_precision
from batchtune.device.memory import count_devices, find_device, open_device, require_kind
from batchtune.device.nvml import Sensors
from batchtune.device.sharing import usable_now
from batchtune.document import NO_CLIPPING, Environment
from batchtune.protocol.commands import Describe, Machine, Opened, OpenTask
from batchtune.protocol.messages import Channel
from batchtune.task.contract import Task
from batchtune.task.load import current_settings, load_task, set_libraries_apart


class Session:
    """A device, and the task that is opened on it.

    Args:
        channel: the line to the parent.
        load: the task by its name, which may be there already.
        leave: ends this process in favour of the next fork of its image; None: it is no fork.
        fork: its number among those.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        load: Callable[[str], Task] = load_task,
        leave: Callable[[], None] | None = None,
        fork: int = 0,
    ) -> None:
        self._channel, self._load, self._leave, self._fork = channel, load, leave, fork
        self._ranks: Ranks = ALONE
        self._task: Task

    def describe(self, command: Describe) -> Machine:
        """The machine without a task."""
        self._open_device(command.device)
        return Machine(environment=self._environment(), sensors=self._sensors.read())

    def open(self, command: OpenTask) -> Opened | None:
        """Opens the device, imports the task, builds the model and evaluates it once, then sets the memory limit.

        In this order: what a user's code takes at import is not the model's, and a CPU's limit counts from there.
        """
        self._open_device(command.device)
        self._join()
        require_kind(self._memory, command.device_name)
        limit = self._default_limit(command.margin) if command.memory_limit is None else command.memory_limit
        self._task = self._load(command.task)
        self._task.require(command.purpose, self._ranks.world_size)
        if command.gradient_clipping is not None:
            self._task.gradient_clipping = command.gradient_clipping
        self._task.activation_checkpointing = command.activation_checkpointing
        set_libraries_apart()
        self._task.find_lengths(command.lengths, command.lengths_seen)
        self._task.find_worst_samples(command.samples)
        opened = None if command.again else self._look_at_task(command, limit)
        heartbeat.start(lambda: self._channel.send(alive=True))
        heartbeat.watch_compiling()  # now, for the stack of a thread would count as the model's later
        if limit is not None:
            with self._usable_now(only_if_full=True):
                self._memory.enforce(limit)
        return opened

    def _open_device(self, name: str) -> None:
        """Opens the device, and looks who holds memory of it before this process has a context there."""
        self._sensors = Sensors(find_device(name))
        self._seen = self._sensors.sharing()
        self._usable_now = functools.partial(usable_now, name, self._seen)
        with self._usable_now():
            self._memory = open_device(name)

    def _join(self) -> None:
        """A rank joins the others."""

    def _default_limit(self, margin: float) -> int | None:
        """The memory limit where the user names none."""
        return self._memory.default_limit(margin)

    def _look_at_task(self, command: OpenTask, limit: int | None) -> Opened:
        task, memory = self._task, self._memory
        names = every_precision(memory.device) if command.precision == ("all",) else command.precision
        chosen = tuple(choose(name, memory.device) for name in names)
        opened = Opened(
            device=str(memory.device),
            device_count=count_devices(memory.device),
            environment=self._environment(),
            nvml_uuid=self._sensors.uuid(),
            counts_energy=self._sensors.joules() is not None,
            precision=chosen,
            train_size=task.train_size(),
            samples=task.find_worst_samples(),
            lengths=task.lengths,
            has_train_dataset=task.has("train_dataset") and not task.has("train_loader"),
            memory_limit_bytes=limit,
            optimizer_defaults=task.optimizer_defaults(command.optimizer_arguments),
            forks=self._leave is not None,
            **_about_steps(task, self._ranks, command, limit, chosen[0][0]),
        )
        if command.metric is not None:
            is_free = command.precision == ("auto",)
            why = require_metric(task, memory.device, command.metric, chosen[0][0], self._ranks, or_fp32=is_free)
            memory.release()
            opened = opened.in_fp32(why) if why else opened
        return opened

    def _environment(self) -> Environment:
        """Versions and device, as the result document has them."""
        (name, total, free), seen = self._memory.describe(), self._seen
        return Environment(
            device=name,
            device_type=self._memory.device.type,
            device_memory_bytes=total,
            device_memory_free_bytes=seen.free_bytes if seen else free,
            other_processes=list(seen.processes) if seen else None,
            torch=torch.__version__,
            cuda=torch.version.cuda,
            driver=self._sensors.driver(),
            allocator_conf=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF")),
            python=platform.python_version(),
            platform=platform.platform(),
            cpu_count=os.cpu_count(),
        )


def _without_autocast(task: Task, precision: str) -> Iterator[str]:
    """A sentence where no line of a train_step's file asks for the precision that is measured."""
    if precision in {"bf16", "fp16"} and task.has("train_step"):
        with contextlib.suppress(OSError, TypeError):  # there is no file of it
            file = Path(inspect.getsourcefile(task.source.train_step) or "")
            if "autocast" not in file.read_text(encoding="utf-8", errors="replace"):
                yield (
                    f"{file.name} has no autocast: unless what its train_step calls has one, what is called "
                    f"{precision} here computes in fp32; put the forward pass under context.autocast()"
                )


def _put_in_training_mode(model: torch.nn.Module) -> Iterator[str]:
    """A sentence where parts of a new model are in eval mode, which training ends; a whole one comes so from a hub."""
    modes = {name: each.training for name, each in model.named_modules()}
    comes_so = not any(each.training for each in model.modules() if not any(each.children()))
    model.train()
    first = [
        name
        for name, each in model.named_modules()
        if name and not modes[name] and (modes | {"": True})[name.rpartition(".")[0]] and each.training
        if not comes_so and not any(parameter.requires_grad for parameter in each.parameters())
    ]
    if first:
        which, are, keep = first[0], "is", "it"
        if more := len(first) - 1:
            which, are, keep = f"{which} and {more} more", "are", "them"
        text = f"{which} {are} frozen, in eval mode when build_model returns, and in training mode when training begins"
        yield f"{text}: override train() of the model to keep {keep} in eval mode"


def _about_steps(task: Task, ranks: Ranks, command: OpenTask, limit: int | None, precision: str) -> dict[str, Any]:
    """What of `Opened` is about the task's optimizer steps."""
    # for inference, too, so that what is wrong with it is said
    model = ranks.sketch(task.model)
    notes = task.adapted.notes if task.adapted else ()
    if any(each.dtype in {torch.float64, torch.complex128} for each in model.parameters()):
        what = "weights are float64, which autocast leaves alone: what is called fp32 or bf16 here computes in float64"
        notes = (*notes, what)
    notes = (*notes, *_without_autocast(task, precision))
    if task.is_for_inference:
        return {"optimizer": "", "notes": notes}
    if not (task.adapted and task.adapted.keeps_modes):
        notes = (*notes, *_put_in_training_mode(model))
    optimizers, own = task.optimizers(model, 1e-3), {id(parameter) for parameter in model.parameters()}
    settings = optimizers.settings().model_copy(update=task.adapted.optimizer_settings if task.adapted else {})
    if command.purpose == "tune":  # what is wrong with its schedulers is to be said now
        known, told = task.look_at_schedule(model, optimizers, command.metric, command.goal)
        settings, notes = settings.model_copy(update=known), (*notes, *told)
    today = {"current_settings": current_settings(task)} if command.asks_for_current_settings else {}
    return today | {
        "optimizer": optimizers.name,
        "optimizer_settings": settings,
        "fits_alone": ranks.holds_whole(model, limit),
        "foreign_parameters": sum(id(parameter) not in own for parameter in optimizers.parameters),
        "gradient_clipping": task.gradient_clipping or NO_CLIPPING,
        "accumulation_steps": task.adapted.accumulation_steps if task.adapted else 1,
        **({"training_length": task.adapted.training_length} if task.adapted else {}),
        "notes": notes,
        "accumulates": task.accumulates(optimizers),
        "steps_by_itself": task.has("train_step"),
    }

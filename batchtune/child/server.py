"""The child process: it alone imports the user's code and holds the device; it answers one command after another.

They come over a `Channel`. A rank of a group is such a child, too (see `batchtune.child.rank`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from batchtune.child.commands.attempt import attempt
from batchtune.child.commands.count_flops import flops_per_sample
from batchtune.child.commands.noise_scale import noise_scale
from batchtune.child.commands.range_test import range_test
from batchtune.child.commands.time_loader import time_loader
from batchtune.child.commands.time_steps import time_steps
from batchtune.child.commands.train import train
from batchtune.child.training import heartbeat
from batchtune.child.training.evaluate import require_metric
from batchtune.child.training.parallel import Parallel
from batchtune.child.training.precision import choose, every_precision
from batchtune.device._base import DeviceMemory
from batchtune.device.failures import classify, leaves_device_usable
from batchtune.device.memory import count_devices, find_device, open_device
from batchtune.device.sharing import Sharing, usable_now
from batchtune.device.telemetry import Sensors
from batchtune.document import NO_CLIPPING, Environment
from batchtune.errors import BatchtuneError, DeviceError, UsageError, UserCodeError
from batchtune.protocol import commands
from batchtune.protocol.channel import Channel
from batchtune.protocol.messages import AnyCommand, Command, Json
from batchtune.protocol.run_spec import RunEnd
from batchtune.task.adapting.adapted import Adapted
from batchtune.task.contract import Task
from batchtune.task.load import describe_user_error, load_task
from batchtune.task.optimizers import optimizer_defaults

_SOME_STEPS = 1000  # of a schedule that is only looked at
_CLOCKS = {"perf_counter": time.perf_counter, "monotonic": time.monotonic}  # as they are before the user's code runs


class Child:
    """Does what a parent asks for.

    Args:
        channel: the line to the parent.
        parallel: the ranks that this child trains with; None: it trains alone.
        load: the task by its name, which may be there already.
        leave: ends this process in favour of the next fork of its image; None: it is no fork.
    """

    def __init__(
        self,
        channel: Channel,
        parallel: Parallel | None = None,
        *,
        load: Callable[[str], Task] = load_task,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._channel = channel
        self._parallel = parallel
        self._load, self._leave = load, leave
        self._task: Task
        self._memory: DeviceMemory
        self._sensors: Sensors

    def answer(self, command: AnyCommand) -> Any:  # noqa: C901, PLR0911 - one case for each command
        """Does what it is asked for; the answer is of the type that the command names."""
        match command:
            case commands.Describe():
                return self._describe(command)
            case commands.Renew() if self._leave is not None:
                return self._leave()  # the image answers
            case commands.OpenTask():
                return self.open(command)
            case commands.TryBatchSize():
                return attempt(self._task, self._memory, command, self._parallel)
            case commands.TimeSteps():
                with self._memory.timing():
                    parallel = self._parallel if command.communicate else None
                    return time_steps(self._task, self._memory, command, parallel)
            case commands.CountFlops():
                with self._memory.timing():  # counting takes memory of its own
                    return flops_per_sample(self._task, self._memory, command)
            case commands.TimeLoader():
                with self._memory.timing():
                    return time_loader(self._task, self._memory, command)
            case commands.RunRangeTest():
                return range_test(self._task, self._memory, command)
            case commands.MeasureNoiseScale():
                return noise_scale(self._task, self._memory, command)
            case commands.Train():
                return self._train(command)
        raise TypeError(f"no child knows {type(command).__name__}")

    def _describe(self, command: commands.Describe) -> commands.Machine:
        memory, sensors, seen = _open(command.device)
        return commands.Machine(environment=environment(memory, sensors, seen), sensors=sensors.read())

    def open(self, command: commands.OpenTask) -> commands.Opened | None:
        """Opens the device, imports the task, builds the model and evaluates it once, then sets the memory limit.

        In this order: what a user's code takes at import is not the model's, and a CPU's limit counts from there.
        """
        seen = self._open_device(command.device)
        _require_device(self._memory, command.device_name)
        limit = self._default_limit(command.margin) if command.memory_limit is None else command.memory_limit
        self._task = self._load(command.task)
        self._task.require(command.purpose)
        if self._parallel is not None and self._task.has("train_step"):
            raise UsageError(
                f"{command.task}: a task with a train_step trains on one device; leave out --nproc-per-node"
            )
        if command.gradient_clipping is not None:
            self._task.gradient_clipping = command.gradient_clipping
        set_libraries_apart()
        samples = self._task.find_worst_samples(command.samples)
        opened = None if command.again else self._look_at_task(command, limit, seen, samples)
        heartbeat.start(lambda: self._channel.send(alive=True))
        heartbeat.watch_compiling()  # now, for the stack of a thread would count as the model's later
        if limit is not None:
            with usable_now(command.device, seen, only_if_full=True):
                self._memory.enforce(limit)
        return opened

    def _look_at_task(
        self,
        command: commands.OpenTask,
        limit: int | None,
        seen: Sharing | None,
        samples: commands.SamplesSeen | None,
    ) -> commands.Opened:
        wanted = list(command.precision)
        names = every_precision(self._memory.device) if wanted == ["all"] else wanted
        chosen = [choose(name, self._memory.device) for name in names]
        opened = commands.Opened(
            device=str(self._memory.device),
            device_count=count_devices(self._memory.device),
            environment=environment(self._memory, self._sensors, seen),
            nvml_uuid=self._sensors.uuid(),
            counts_energy=self._sensors.joules() is not None,
            precision=tuple(chosen),
            train_size=self._task.train_size(),
            samples=samples,
            has_train_dataset=self._task.has("train_dataset") and not self._task.has("train_loader"),
            memory_limit_bytes=limit,
            optimizer_defaults=optimizer_defaults(self._task.source, command.optimizer_arguments),
            forks=self._leave is not None,
            **_about_steps(self._task, command.purpose),
        )
        if command.metric is not None:
            require_metric(self._task, self._memory.device, command.metric, chosen[0][0])
            self._memory.release()
        return opened

    def _open_device(self, name: str) -> Sharing | None:
        """Opens the device; returns who held memory of it before."""
        self._memory, self._sensors, seen = _open(name)
        return seen

    def _default_limit(self, margin: float) -> int | None:
        """The memory limit where the user names none."""
        return self._memory.default_limit(margin)

    def _train(self, command: commands.Train) -> RunEnd:
        """Every evaluation is sent, and the parent's `go_on` is waited for."""
        run = train(self._task, self._memory, command.spec, self._sensors.joules)
        go_on: bool | None = None
        try:
            while True:
                point = next(run) if go_on is None else run.send(go_on)
                self._channel.send(event=asdict(point))
                go_on = bool(self._channel.receive()["go_on"])
        except StopIteration as end:
            found: RunEnd = end.value
            return found


def _open(name: str) -> tuple[DeviceMemory, Sensors, Sharing | None]:
    """The device's memory, its sensors, and who held memory of it before this process had a context there."""
    sensors = Sensors(find_device(name))
    seen = sensors.sharing()
    with usable_now(name, seen):
        return open_device(name), sensors, seen


def _about_steps(task: Task, purpose: str) -> dict[str, Any]:
    """What of `Opened` is about the task's optimizer steps."""
    model = task.model()  # for inference, too, so that what is wrong with it is said
    source = task.source if isinstance(task.source, Adapted) else Adapted("")
    if task.is_for_inference:
        return {"optimizer": "", "notes": source.notes}
    optimizers, own = task.optimizers(model, 1e-3), {id(parameter) for parameter in model.parameters()}
    settings = optimizers.settings()
    if purpose == "tune":  # what is wrong with its schedulers is to be said now
        schedulers = task.schedulers(optimizers, _SOME_STEPS)
        names = " + ".join(dict.fromkeys(type(each).__name__ for each in schedulers))
        settings = settings.model_copy(update={"scheduler": names or None})
    return {
        "optimizer": optimizers.name,
        "optimizer_settings": settings,
        "foreign_parameters": sum(id(parameter) not in own for parameter in optimizers.parameters),
        "gradient_clipping": task.gradient_clipping or NO_CLIPPING,
        "accumulation_steps": source.accumulation_steps,
        "notes": source.notes,
        "accumulates": task.accumulates(optimizers),
        "steps_by_itself": task.has("train_step"),
    }


def _require_device(memory: DeviceMemory, wanted: str | None) -> None:
    """Raises DeviceError where a study would go on on another kind of device."""
    name = memory.describe()[0]
    if wanted not in {None, name}:
        which = os.environ.get("CUDA_VISIBLE_DEVICES", memory.device)
        raise DeviceError(
            f"workers: device {which} is a {name}, but the study is of {wanted}, and times on different devices do not "
            "compare; list devices of one kind in CUDA_VISIBLE_DEVICES (with Ray: name nodes of one kind, e.g. "
            "ray.resources={'accelerator_type:A100': 0.001}), or start over with --workers 1 --fresh"
        )


def set_libraries_apart() -> None:
    """Leaves what was imported out of the garbage collections around each attempt, most of whose time it takes."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)  # the first optimizer loads half of torch
    gc.collect()
    gc.freeze()


def environment(memory: DeviceMemory, sensors: Sensors, seen: Sharing | None) -> Environment:
    """Versions and device, as the result document has them."""
    name, total, free = memory.describe()
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return Environment(
        device=name,
        device_type=memory.device.type,
        device_memory_bytes=total,
        device_memory_free_bytes=seen.free_bytes if seen else free,
        other_processes=list(seen.processes) if seen else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=sensors.driver(),
        allocator_conf=next((os.environ[name] for name in variables if name in os.environ), None),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=os.cpu_count(),
    )


def run_command(child: Child, command: AnyCommand) -> Json:
    """The answer to one command: what it came to, or what went wrong and whose fault it is."""
    try:
        done = command.write(child.answer(command))
        _require_clocks()
    except BatchtuneError as error:
        frames = getattr(error, "frames", "")
        return {"error": error.detail, "setting": error.setting, "exit_code": error.exit_code, "frames": frames}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - every failure becomes an answer
        return _unexpected(error)
    return {"done": done}


def _require_clocks() -> None:
    """Steps are timed by clocks that nobody has stopped or replaced.

    Raises:
        UserCodeError: the task has; what was timed is worth nothing.
    """
    for name, clock in _CLOCKS.items():
        if getattr(time, name) is not clock:
            raise UserCodeError(f"the task replaces time.{name}, which times its steps; leave that clock as it is")


def _unexpected(error: BaseException) -> Json:
    innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if classify(error) == "oom":
        return {"outcome": "oom", "error": str(error).split("\n")[0][:300], "usable": leaves_device_usable(error)}
    package = Path(__file__).resolve().parents[1]
    if (
        innermost.is_relative_to(package) and innermost != package / "task" / "contract.py"
    ):  # that calls the user's code
        return {"error": traceback.format_exc(), "exit_code": BatchtuneError.exit_code, "frames": ""}
    described = describe_user_error(error, "in training")
    return {"error": str(described), "exit_code": UserCodeError.exit_code, "frames": described.frames}


def serve(child: Child, channel: Channel) -> None:
    """Answers commands until the parent closes the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption means
    while True:
        command = channel.receive()
        heartbeat.watch_compiling()
        channel.send(**run_command(child, Command.from_message(command)))
        with contextlib.suppress(Exception):  # the user's code may have closed it or put something else there
            sys.stdout.flush()

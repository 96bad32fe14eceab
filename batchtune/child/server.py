"""The child process: it alone imports the user's code and holds the device; it answers one command after another.

They come over a `Channel`. A rank of a group is such a child, too (see `batchtune.child.rank`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchtune.child.training.heartbeat import tell_through, tell_while_compiling
from batchtune.device.sharing import usable_now
from batchtune.errors import BatchtuneError, UserCodeError
from batchtune.protocol.channel import Channel

if TYPE_CHECKING:
    from batchtune.child.training.parallel import Parallel
    from batchtune.device.sharing import Sharing

_CLOCKS = {"perf_counter": time.perf_counter, "monotonic": time.monotonic}  # as they are before the user's code runs


class Child:
    """The commands a parent may give, by name.

    Args:
        channel: the line to the parent.
        parallel: the ranks that this child trains with; None: it trains alone.
    """

    def __init__(self, channel: Channel, parallel: Parallel | None = None) -> None:
        self._channel = channel
        self._parallel = parallel
        self._task: Any = None
        self._memory: Any = None
        self._sensors: Any = None

    def describe(self, *, device: str) -> dict[str, Any]:
        """The machine, without a task: what `batchtune env` shows."""
        memory, sensors, seen = _open(device)
        return {"environment": environment(memory, sensors, seen), "sensors": sensors.read()}

    def load_libraries(self) -> dict[str, Any]:
        """Imports what every task needs, before there is one."""
        _load_libraries()
        return {}

    def open(
        self,
        *,
        task: str,
        device: str,
        purpose: str,
        memory_limit: int | None,
        margin: float,
        precision: list[str],
        optimizer_arguments: list[str],
        metric: str | None,
    ) -> dict[str, Any]:
        """Opens the device, imports the task, builds the model and evaluates it once, then sets the memory limit.

        In this order: what a user's code takes at import is not the model's, and a CPU's limit counts from there.
        """
        from batchtune.child.training.precision import choose, every_precision
        from batchtune.device.memory import count_devices
        from batchtune.task.load import load_task

        seen = self._open_device(device)
        names = every_precision(self._memory.device) if precision == ["all"] else precision
        chosen = [choose(name, self._memory.device) for name in names]
        limit = self._default_limit(margin) if memory_limit is None else memory_limit
        self._task = load_task(task)
        self._task.require(purpose)
        _set_libraries_apart()
        facts = {
            "device": str(self._memory.device),
            "device_count": count_devices(self._memory.device),
            "environment": environment(self._memory, self._sensors, seen),
            "nvml_uuid": self._sensors.uuid(),
            "counts_energy": self._sensors.joules() is not None,
            "precision": chosen,
            "train_size": self._task.train_size(),
            "has_train_dataset": self._task.has("train_dataset"),
            "memory_limit_bytes": limit,
            "optimizer_defaults": self._task.optimizer_defaults(optimizer_arguments),
            "optimizer": type(self._task.optimizer(self._task.model(), 1e-3)).__name__,
        }
        if metric is not None:
            from batchtune.child.training.evaluate import require_metric

            require_metric(self._task, self._memory.device, metric, chosen[0][0])
            self._memory.release()
        tell_through(lambda: self._channel.send(alive=True))
        tell_while_compiling()  # now, for the stack of a thread would count as the model's later
        if limit is not None:
            with usable_now(device, seen, only_if_full=True):
                self._memory.enforce(limit)
        return facts

    def _open_device(self, name: str) -> Sharing | None:
        """Opens the device; returns who held memory of it before."""
        self._memory, self._sensors, seen = _open(name)
        return seen

    def _default_limit(self, margin: float) -> int | None:
        """The memory limit where the user names none."""
        limit: int | None = self._memory.default_limit(margin)
        return limit

    def apply(self, *, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A function of a floor above, `module:name`: the parent names it, so that this floor imports none of them."""
        module, _, name = function.partition(":")
        found: dict[str, Any] = getattr(importlib.import_module(module), name)(**arguments)
        return found

    def attempt(self, **arguments: Any) -> dict[str, Any]:
        """One attempt; see `batchtune.child.commands.attempt.attempt`."""
        from batchtune.child.commands.attempt import attempt

        result, usable = attempt(self._task, self._memory, parallel=self._parallel, **arguments)
        return {"attempt": result.model_dump(), "usable": usable}

    def time_steps(self, *, communicate: bool = True, **arguments: Any) -> dict[str, Any]:
        """One throughput point; see `batchtune.child.commands.time_steps`. Without communicating, a rank trains alone."""
        from batchtune.child.commands.time_steps import time_steps

        parallel = self._parallel if communicate else None
        with self._memory.timing():
            return time_steps(self._task, self._memory, parallel=parallel, **arguments).model_dump()

    def count_flops(self, **arguments: Any) -> dict[str, Any]:
        """FLOPs of a sample; see `batchtune.child.commands.count_flops`."""
        with self._memory.timing():  # counting takes memory of its own
            from batchtune.child.commands.count_flops import flops_per_sample

            return {"flops_per_sample": flops_per_sample(self._task, self._memory, **arguments)}

    def time_loader(self, **arguments: Any) -> dict[str, Any]:
        """One setting of the loader; see `batchtune.child.commands.time_loader`."""
        from batchtune.child.commands.time_loader import time_loader

        with self._memory.timing():
            return time_loader(self._task, self._memory, **arguments).model_dump()

    def range_test(self, **arguments: Any) -> dict[str, Any]:
        """Where training comes apart; see `batchtune.child.commands.range_test`."""
        from batchtune.child.commands.range_test import range_test

        return range_test(self._task, self._memory, **arguments).model_dump()

    def noise_scale(self, **arguments: Any) -> dict[str, Any]:
        """The gradient noise scale; see `batchtune.child.commands.noise_scale`."""
        from batchtune.child.commands.noise_scale import noise_scale

        return noise_scale(self._task, self._memory, **arguments).model_dump()

    def train(self, **arguments: Any) -> dict[str, Any]:
        """One run; every evaluation is sent, and the parent's `go_on` is waited for."""
        from batchtune.child.commands.train import train
        from batchtune.protocol.run_spec import RunSpec

        run = train(self._task, self._memory, RunSpec(**arguments), self._sensors.joules)
        answer: bool | None = None
        try:
            while True:
                point = next(run) if answer is None else run.send(answer)
                self._channel.send(event=asdict(point))
                answer = bool(self._channel.receive()["go_on"])
        except StopIteration as end:
            return asdict(end.value)


def _open(name: str) -> tuple[Any, Any, Sharing | None]:
    """The device's memory, its sensors, and who held memory of it before this process had a context there."""
    from batchtune.device.memory import find_device, open_device
    from batchtune.device.telemetry import Sensors

    sensors = Sensors(find_device(name))
    seen = sensors.sharing()
    with usable_now(name, seen):
        return open_device(name), sensors, seen


def _set_libraries_apart() -> None:
    """Leaves what was imported out of the garbage collections around each attempt, most of whose time it takes."""
    _load_libraries()
    gc.collect()
    gc.freeze()


def _load_libraries() -> None:
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)  # the first optimizer loads half of torch


def environment(memory: Any, sensors: Any, seen: Any = None) -> dict[str, Any]:
    """Versions and device, as the result document has them."""
    import torch

    name, total, free = memory.describe()
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {
        "device": name,
        "device_type": memory.device.type,
        "device_memory_bytes": total,
        "device_memory_free_bytes": seen.free_bytes if seen else free,
        "other_processes": [process.model_dump() for process in seen.processes] if seen else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": sensors.driver(),
        "allocator_conf": next((os.environ[name] for name in variables if name in os.environ), None),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def run_command(method: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command: what it returned, or what went wrong and whose fault it is."""
    try:
        done = method(**arguments)
        _require_clocks()
    except BatchtuneError as error:
        return {"error": str(error), "exit_code": error.exit_code, "frames": getattr(error, "frames", "")}
    except Exception as error:  # noqa: BLE001 - every failure becomes an answer
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


def _unexpected(error: Exception) -> dict[str, Any]:
    from batchtune.device.failures import classify, leaves_device_usable
    from batchtune.task.load import describe_user_error

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


def main() -> None:
    """The child of one parent."""
    channel = Channel.on_standard_streams()
    serve(Child(channel), channel)


def serve(child: Child, channel: Channel) -> None:
    """Answers commands until the parent closes the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption means
    names = (
        *("describe", "load_libraries", "open", "apply", "attempt", "time_steps", "count_flops", "time_loader"),
        *("range_test", "noise_scale", "train", "rejoin"),
    )
    methods = {name: getattr(child, name) for name in names if hasattr(child, name)}
    while True:
        command = channel.receive()
        tell_while_compiling()
        channel.send(**run_command(methods[command.pop("command")], command))
        with contextlib.suppress(Exception):  # the user's code may have closed it or put something else there
            sys.stdout.flush()

"""The child process: it alone imports the user's code and holds the device; it answers one command after another.

They come over a `Channel`. A rank of a group is such a child, too (see `batchtune.child.rank`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from batchtune.child import heartbeat
from batchtune.child.attempt import attempt
from batchtune.child.before_study import noise_scale, range_test
from batchtune.child.opening import Session
from batchtune.child.timing import flops_per_sample, time_loader, time_steps
from batchtune.child.training_run import time_in_turn, train
from batchtune.device.failures import classify, describe_user_error, leaves_device_usable
from batchtune.device.host_memory import shake_heap
from batchtune.errors import BatchtuneError, UserCodeError
from batchtune.protocol import commands
from batchtune.protocol.messages import AnyCommand, Channel, Command, Json, RunEnd, RunSpec

_CLOCKS = {"perf_counter": time.perf_counter, "monotonic": time.monotonic}  # as they are before the user's code runs


class Child(Session):
    """Does what a parent asks for."""

    def answer(self, command: AnyCommand) -> object:  # noqa: C901, PLR0911 - one case for each command
        """Does what it is asked for; the answer is of the type that the command names."""
        match command:
            case commands.Describe():
                return self.describe(command)
            case commands.Renew() if self._leave is not None:
                return self._leave()  # the image answers
            case commands.OpenTask():
                return self.open(command)
            case commands.TryBatchSize():
                shake_heap(command.process)
                return attempt(self._task, self._memory, command, self._ranks)
            case commands.TimeSteps():
                with self._memory.timing():
                    return time_steps(self._task, self._memory, command, self._ranks)
            case commands.CountFlops():
                with self._memory.timing():  # counting takes memory of its own
                    return flops_per_sample(self._task, self._memory, command)
            case commands.TimeLoader():
                with self._memory.timing():
                    return time_loader(self._task, self._memory, command, self._ranks)
            case commands.RunRangeTest():
                return range_test(self._task, self._memory, command, ranks=self._ranks)
            case commands.MeasureNoiseScale():
                return noise_scale(self._task, self._memory, command, ranks=self._ranks)
            case commands.TimeInTurn():
                return time_in_turn(self._task, self._memory, command, self._ranks)
            case commands.Train():
                return self._train(command.spec)
        raise TypeError(f"no child knows {type(command).__name__}")

    def _train(self, spec: RunSpec) -> RunEnd:
        """A run; every evaluation is told, and the parent's `go_on` waited for."""
        run = train(self._task, self._memory, spec, self._sensors.joules, self._ranks)
        try:
            point = next(run)
            while True:
                self._channel.send(event=asdict(point))
                point = run.send(bool(self._channel.receive()["go_on"]))
        except StopIteration as end:
            found: RunEnd = end.value
            return found


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
    """Raises UserCodeError where the task has replaced a clock: what was timed by it is worth nothing."""
    for name, clock in _CLOCKS.items():
        if getattr(time, name) is not clock:
            raise UserCodeError(f"the task replaces time.{name}, which times its steps; leave that clock as it is")


def _unexpected(error: BaseException) -> Json:
    if classify(error) == "oom":
        return {"outcome": "oom", "error": str(error).split("\n")[0][:300], "usable": leaves_device_usable(error)}
    innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(__file__).resolve().parents[1]
    calls_users_code = innermost == package / "task" / "contract.py"
    if innermost.is_relative_to(package) and not calls_users_code:
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

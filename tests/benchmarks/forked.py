"""A command line and its children as forks of a process that has imported what they need: most of their time.

A fork of a process without threads and without a CUDA context is as fresh as a new one; `plain_loop` does the same.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from batchtune.processes import local as process


class Forked:
    """What `LocalProcess` needs of `subprocess.Popen`, for a command `python -P -c CODE`."""

    _pipes: ClassVar[set[int]] = set()  # the parent's ends, which a child must not hold open

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        (stdin, to), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become((stdin, stdout, stderr), {to, out, err, *self._pipes}, env, lambda: exec(command[-1], {}))
        for end in (stdin, stdout, stderr):
            os.close(end)
        type(self)._pipes |= {to, out, err}
        self.stdin = os.fdopen(to, "w", encoding="utf-8")
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8", errors="replace") for end in (out, err))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 3600)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _become(streams: Sequence[int], others: set[int], env: Mapping[str, str], run: Callable[[], object]) -> None:
    """In a fork: takes its standard streams and environment, runs, and ends."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for end in {*streams, *others} - {0, 1, 2}:
            with contextlib.suppress(OSError):
                os.close(end)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
        )
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        for name in set(os.environ) - set(env):
            del os.environ[name]
        os.environ.update(env)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def run_command(command: Sequence[str], folder: Path, variables: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """What a command prints on both of its streams; it is ended after so many seconds."""
    from batchtune.cli import main

    def run() -> None:
        os.chdir(folder)
        process.subprocess = SimpleNamespace(  # type: ignore[assignment]
            Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
        )
        sys.argv[1:] = command
        main()

    paths = folder / "told.out", folder / "told.err"
    with paths[0].open("w") as out, paths[1].open("w") as err, Path(os.devnull).open() as nothing:
        pid = os.fork()
        if pid == 0:
            _become((nothing.fileno(), out.fileno(), err.fileno()), set(), {**os.environ, **variables}, run)
        deadline = time.monotonic() + seconds
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.01)
    return paths[0].read_text(), paths[1].read_text()


def warm_up() -> None:
    """Imports what the command and its children import."""
    tracing = ("estimate.tracing.answer", "estimate.tracing.trace")
    for name in ("cli", *tracing, "probe.run", "child.commands.attempt", "child.server"):
        importlib.import_module(f"batchtune.{name}")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)  # the first optimizer loads half of torch
    assert not torch.cuda.is_initialized()

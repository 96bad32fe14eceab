"""A child's line to its parent: commands come in and answers go out, as JSON lines.

A child has it on its original stdin and stdout. Both are moved away before the user's code is imported, so that nothing
it prints, reads or closes can disturb them; forks of one image have the line one after the other. A rank has a socket
in their place (see `batchtune.child.rank`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import threading
from typing import IO, Any, Self

from batchtune.protocol.messages import Json


class Channel:
    """The line to the parent; when the parent is gone, so is this process with all that it started.

    Args:
        commands: what the parent says, a line each.
        answers: what it is told.
        first: a command that was read before.
    """

    def __init__(self, commands: IO[str], answers: IO[str], first: Json | None = None) -> None:
        self._lock = threading.Lock()  # a thread says when torch.compile is at work
        self._answers, self._process = answers, os.getpid()
        self._commands: queue.Queue[Json] = queue.Queue()
        if first is not None:
            self._commands.put(first)
        threading.Thread(target=self._listen, args=(commands,), daemon=True).start()

    @classmethod
    def on_standard_streams(cls) -> Self:
        """The line on stdin and stdout, which are moved away."""
        return cls.on_files(*move_standard_streams())

    @classmethod
    def on_files(cls, commands: int, answers: int, first: Json | None = None) -> Self:
        """The line on two file descriptors."""
        return cls(os.fdopen(commands, "r", encoding="utf-8"), os.fdopen(answers, "w", encoding="utf-8"), first)

    def _listen(self, commands: IO[str]) -> None:
        try:
            for line in commands:
                self._commands.put(json.loads(line))
        except OSError as error:
            end_if_closed(error)
        end_with_parent()

    def receive(self) -> Json:
        """The next command."""
        return self._commands.get()

    def send(self, **message: Any) -> None:
        """One message to the parent; a copy of this process that the user's code has forked off ends here instead."""
        if os.getpid() != self._process:
            os._exit(0)
        try:
            with self._lock:
                self._answers.write(json.dumps(message) + "\n")
                self._answers.flush()
        except OSError as error:
            end_if_closed(error)
            raise


def end_if_closed(error: OSError) -> None:
    """Ends the process with a word on why where the user's code, and not the parent, has closed the line."""
    if error.errno == errno.EBADF:
        with contextlib.suppress(OSError):
            os.write(2, b"the task's code has closed file descriptors that it did not open\n")
        os._exit(1)


def end_with_parent() -> None:
    """Ends this process and all of its session's first group: what the parent started, and what that has started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getsid(0):
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def move_standard_streams() -> tuple[int, int]:
    """New file descriptors of stdin and stdout; what is printed from now on goes to stderr."""
    moved = os.dup(0), os.dup(1)
    give_standard_streams_away()
    return moved


def give_standard_streams_away() -> None:
    """From now on nothing can be read from stdin, and what is printed goes to stderr."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

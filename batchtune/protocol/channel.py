"""A child's line to its parent: commands come in and answers go out, as JSON lines.

A child has it on its original stdin and stdout. Both are moved away before the user's code is imported, so that nothing
it prints, reads or closes can disturb them. A rank has a socket in their place (see `batchtune.child.rank`).
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
    """

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        self._lock = threading.Lock()  # a thread says when torch.compile is at work
        self._answers, self._process = answers, os.getpid()
        self._commands: queue.Queue[Json] = queue.Queue()
        threading.Thread(target=self._listen, args=(commands,), daemon=True).start()

    @classmethod
    def on_standard_streams(cls) -> Self:
        """The line on stdin and stdout, which are moved away: what is printed from now on goes to stderr."""
        answers, commands = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), "r", encoding="utf-8")
        give_standard_streams_away()
        return cls(commands, answers)

    def _listen(self, commands: IO[str]) -> None:
        try:
            for line in commands:
                self._commands.put(json.loads(line))
        except OSError as error:
            _end_if_closed(error)
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

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
            _end_if_closed(error)
            raise


def _end_if_closed(error: OSError) -> None:
    """Ends the process with a word on why where the user's code, and not the parent, has closed the line."""
    if error.errno == errno.EBADF:
        with contextlib.suppress(OSError):
            os.write(2, b"the task's code has closed file descriptors that it did not open\n")
        os._exit(1)


def give_standard_streams_away() -> None:
    """From now on nothing can be read from stdin, and what is printed goes to stderr."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

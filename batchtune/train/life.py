"""Signs of life: what tells long steps, and torch.compile at work, from a hang."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable

_PERIOD_SECONDS = 5.0
_clock = time.monotonic  # as it is before the user's code runs


class _Signs:
    """Whom to tell, when that was done last, and the thread that waits for torch.compile."""

    tell: Callable[[], object] | None = None
    told_at = 0.0
    watch: threading.Thread | None = None


def tell_through(tell: Callable[[], object]) -> None:
    """From now on a process that gets on with its work calls this every few seconds."""
    _Signs.tell, _Signs.told_at = tell, _clock()


def got_on() -> None:
    """Says that a micro-batch is done: many of them may take longer than anybody would wait for one."""
    if _Signs.tell is not None and _clock() - _Signs.told_at > _PERIOD_SECONDS:
        _Signs.told_at = _clock()
        _Signs.tell()


def tell_while_compiling() -> None:
    """From now on says every few seconds that torch.compile is at work, as long as it is; asked again, nothing changes.

    Compiling a large model takes many minutes in which nothing else is heard of it, and is no hang.
    """
    if _Signs.watch is not None or "torch._dynamo" not in sys.modules:
        return
    event = _compiling()

    def watch() -> None:
        while event.wait():
            time.sleep(_PERIOD_SECONDS)
            if event.is_set() and _Signs.tell is not None:
                _Signs.tell()

    _Signs.watch = threading.Thread(target=watch, daemon=True)
    _Signs.watch.start()


@functools.cache
def _compiling() -> threading.Event:
    """Whether torch.compile is at work now."""
    from torch._dynamo.callback import callback_handler

    event = threading.Event()
    callback_handler.register_start_callback(lambda _: event.set())
    callback_handler.register_end_callback(lambda _: event.clear())
    return event

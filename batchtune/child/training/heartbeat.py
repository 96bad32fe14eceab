"""Signs of life: what tells long steps, and torch.compile at work, from a hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

PERIOD_SECONDS = 5.0
_clock = time.monotonic  # as it is before the user's code runs


class _Heartbeat:
    """Whom to tell, when that was done last, and the thread that waits for torch.compile."""

    tell: Callable[[], object] | None = None
    told_at = 0.0
    watch: threading.Thread | None = None
    compiling = threading.Event()


def start(tell: Callable[[], object]) -> None:
    """From now on a process that gets on with its work calls this every few seconds."""
    _Heartbeat.tell, _Heartbeat.told_at = tell, _clock()


def beat(*, at_once: bool = False) -> None:
    """Says that a micro-batch is done: many of them may take longer than anybody would wait for one.

    It is said every few seconds only, or `at_once` where what comes next may take as long as anybody would wait.
    """
    if _Heartbeat.tell is not None and (at_once or _clock() - _Heartbeat.told_at > PERIOD_SECONDS):
        _Heartbeat.told_at = _clock()
        _Heartbeat.tell()


def watch_compiling() -> None:
    """From now on says every few seconds that torch.compile is at work, as long as it is.

    Compiling a large model takes many minutes in which nothing else is heard of it, and is no hang. Asked again,
    nothing changes, unless torch.compiler.reset() came in between, which forgets whom to call.
    """
    if "torch._dynamo" not in sys.modules:
        return
    _listen()
    if _Heartbeat.watch is None:
        _Heartbeat.watch = threading.Thread(target=_watch, daemon=True)
        _Heartbeat.watch.start()


def _watch() -> None:
    while _Heartbeat.compiling.wait():
        time.sleep(PERIOD_SECONDS)
        if _Heartbeat.compiling.is_set() and _Heartbeat.tell is not None:
            _Heartbeat.tell()


def _listen() -> None:
    """Has torch say when it begins to compile and when it ends, unless it does already."""
    from torch._dynamo.callback import callback_handler

    if _begins not in callback_handler.start_callbacks:
        _Heartbeat.compiling.clear()
        callback_handler.register_start_callback(_begins)
        callback_handler.register_end_callback(_ends)


def _begins(_: object) -> None:
    _Heartbeat.compiling.set()


def _ends(_: object) -> None:
    _Heartbeat.compiling.clear()

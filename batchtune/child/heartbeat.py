"""Signs of life, which tell long steps from a hang, and torch.compile as a measurement meets it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

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
    """Says, every few seconds at most, that a micro-batch is done; `at_once` where what comes next may take long."""
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
    from torch._dynamo.callback import callback_handler

    if _begins not in callback_handler.start_callbacks:
        _Heartbeat.compiling.clear()
        callback_handler.register_start_callback(_begins)
        callback_handler.register_end_callback(_ends)
    if _Heartbeat.watch is None:
        _Heartbeat.watch = threading.Thread(target=_watch, daemon=True)
        _Heartbeat.watch.start()


def _watch() -> None:
    while _Heartbeat.compiling.wait():
        time.sleep(PERIOD_SECONDS)
        if _Heartbeat.compiling.is_set() and _Heartbeat.tell is not None:
            _Heartbeat.tell()


def _begins(_: object) -> None:
    _Heartbeat.compiling.set()


def _ends(_: object) -> None:
    _Heartbeat.compiling.clear()


SETTLED_STEPS = 2  # without a new graph; CUDA graphs are recorded in the second run after compiling
MAX_WARM_UP_STEPS = 20  # a model that compiles in every step is timed nevertheless


class CompileWatch:
    """Counts the graphs that torch.compile makes, step by step; `used` says whether there were any at all."""

    def __init__(self) -> None:
        self._seen = _graphs()
        self.used = False

    def new_graphs(self) -> int:
        """Graphs compiled since the last call."""
        before, self._seen = self._seen, _graphs()
        self.used = self.used or self._seen > before
        return self._seen - before


def warm_up(step: Callable[[], object], watch: CompileWatch, agree: Callable[[bool], bool] = bool) -> None:
    """Takes steps until caches are filled and nothing is left to compile; `agree` has ranks take the same number."""
    settled = 0
    for _ in range(MAX_WARM_UP_STEPS):
        step()
        settled = 0 if watch.new_graphs() else settled + 1
        if not agree(settled < SETTLED_STEPS):
            return


def forget_compiled() -> None:
    """Drops what torch.compile made for the last batch size.

    Otherwise the second size is compiled for any size, with other memory and speed than training has, and after a few
    sizes torch stops compiling.
    """
    if _graphs():
        torch.compiler.reset()
        _counters().clear()
        watch_compiling()


def _graphs() -> int:
    return _counters().get("stats", {}).get("unique_graphs", 0)


def _counters() -> dict[str, dict[str, int]]:
    """The counters of torch; empty as long as nothing was compiled, for importing them takes a second."""
    utils = sys.modules.get("torch._dynamo.utils")
    return getattr(utils, "counters", {})

"""torch.compile as a measurement meets it: which steps compiled something, and how one attempt forgets the last."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from batchtune.child.training import heartbeat

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


def forget_compiled() -> bool:
    """Drops what torch.compile made for the last batch size; returns whether there was anything.

    Otherwise the second size is compiled for any size, with other memory and speed than training has, and after a few
    sizes torch stops compiling.
    """
    if not _graphs():
        return False
    torch.compiler.reset()
    _counters().clear()
    heartbeat.watch_compiling()
    return True


def _graphs() -> int:
    return _counters().get("stats", {}).get("unique_graphs", 0)


def _counters() -> dict[str, dict[str, int]]:
    """The counters of torch; empty as long as nothing was compiled, for importing them takes a second."""
    utils = sys.modules.get("torch._dynamo.utils")
    return getattr(utils, "counters", {})

"""How fast a rank is by itself, which steps do not show: in each of them all ranks wait for the slowest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from torch import nn

SLOW, NOTICEABLE_SECONDS = 3.0, 1e-3  # times as long as the others, and by how much, what a rank does may take
_STEPS = 5  # of which the quickest counts


def own_seconds(
    model: nn.Module,
    step: Callable[[Iterator[object]], object],
    batches: Iterator[object],
    synchronize: Callable[[], None],
) -> float:
    """Seconds of a `step` on some `batches` in which this rank loads and the model's innermost modules compute forward.

    No rank waits for another in either, be the model sharded or not. Compiled modules are left alone.
    """
    spent = began = 0.0

    def before(*_: object) -> None:
        nonlocal began
        synchronize()
        began = time.perf_counter()

    def after(*_: object) -> None:
        nonlocal spent
        synchronize()
        spent += time.perf_counter() - began

    def loaded() -> Iterator[object]:
        while True:
            before()
            batch = next(batches)
            after()
            yield batch

    hooks = [module.register_forward_pre_hook(before) for module in _innermost(model)]
    hooks += [module.register_forward_hook(after) for module in _innermost(model)]
    taken, timed = [], loaded()
    for _ in range(_STEPS):
        spent = 0.0
        step(timed)
        taken.append(spent)
    for hook in hooks:
        hook.remove()
    return min(taken)


def _innermost(model: nn.Module) -> list[nn.Module]:
    modules = list(model.modules())
    if any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules):  # noqa: SLF001
        return []  # hooks would have them compiled anew
    return [each for each in modules if next(each.children(), None) is None]


def straggler(seconds: Sequence[float]) -> tuple[int, float] | None:
    """The rank that takes much longer than the others, and how many times as long; None where none does."""
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
    slow = seconds[rank] >= SLOW * others and seconds[rank] - others >= NOTICEABLE_SECONDS
    return (rank, seconds[rank] / max(others, 1e-9)) if slow else None

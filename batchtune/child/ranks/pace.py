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
    loss: Callable[[object], object],
    batches: Iterator[object],
    synchronize: Callable[[], None],
) -> float:
    """Seconds in which this rank loads a batch and computes its `loss`, but for what surrounds the innermost modules.

    No rank waits for another in these, be the model sharded or not: gathering shards is around modules. Of a model with
    compiled modules, which are left alone, loading counts.
    """
    inside, own, read = 0, 0.0, 0.0

    def lap(*, counts: bool) -> None:
        nonlocal own, read
        synchronize()
        now = time.perf_counter()
        own, read = own + (now - read if counts else 0.0), now

    def enter(*_: object) -> None:
        nonlocal inside
        lap(counts=inside == 0)
        inside += 1

    def leave(*_: object) -> None:
        nonlocal inside
        lap(counts=False)
        inside -= 1

    modules = list(model.modules())
    if any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules):  # noqa: SLF001
        modules = []  # hooks would have them compiled anew
    innermost = [each for each in modules if next(each.children(), None) is None]
    hooks = [each.register_forward_pre_hook(enter, prepend=True) for each in modules]
    hooks += [each.register_forward_pre_hook(lambda *_: lap(counts=False)) for each in innermost]
    hooks += [each.register_forward_hook(lambda *_: lap(counts=True), prepend=True) for each in innermost]
    hooks += [each.register_forward_hook(leave) for each in modules]
    taken = []
    for _ in range(_STEPS):
        own = 0.0
        lap(counts=False)
        batch = next(batches)
        lap(counts=True)
        loss(batch)
        lap(counts=bool(modules))
        taken.append(own)
    for hook in hooks:
        hook.remove()
    return min(taken)


def straggler(seconds: Sequence[float]) -> tuple[int, float] | None:
    """The rank that takes much longer than the others, and how many times as long; None where none does."""
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
    slow = seconds[rank] >= SLOW * others and seconds[rank] - others >= NOTICEABLE_SECONDS
    return (rank, seconds[rank] / max(others, 1e-9)) if slow else None

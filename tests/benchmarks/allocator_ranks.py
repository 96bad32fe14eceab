"""What the ranks of a case take, each in a process and on a card of its own, as torch's allocator has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zoo
from zoo import Case

from batchtune.config.ranks import Ranks
from batchtune.processes.ranks import RankLauncher
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask, TryBatchSize

SECONDS = 300.0  # that an attempt may take


def measured(
    case: Case,
    guess: dict[str, Any],
    limits: tuple[int, ...],
    steps: tuple[int, int],
    largest: Callable[[Callable[[int], bool], int], int],
) -> dict[str, Any]:
    """Peaks of the rank that takes most, and the largest batches of each rank; no expandable segments.

    Args:
        case: with more than one rank.
        guess: what was estimated.
        limits: bytes, on each card.
        steps: of an attempt, and of a final check.
        largest: the search, from a guess.
    """
    first, check = steps
    with _group(case, None) as group:
        peaks = {size: _tried(group, case, size, first)[1] for size in guess["peaks"]}
    found: dict[str, Any] = {"peaks": peaks, "limits": []}
    for limit, row in zip(limits, guess["limits"], strict=True):
        with _group(case, limit) as group:
            most = largest(lambda size, on=group: _tried(on, case, size, first)[0], row["max_batch_size"])
            group.renew()
            passes, _ = _tried(group, case, row["max_batch_size"], check, verify=True)
        most = max(most, row["max_batch_size"]) if passes else min(most, row["max_batch_size"] - 1)
        found["limits"].append({"max": most, "passes_max": passes})
    return found


def _group(case: Case, limit: int | None) -> Worker:
    ranks = Ranks.model_validate({"per_trial": case.world_size, "strategy": case.strategy})
    settings = OpenTask(
        task=f"{Path(zoo.__file__)}:{case.slug}", device="cuda", precision=(case.precision,), memory_limit=limit
    )
    return Worker(settings, RankLauncher(ranks.of_each, ranks.strategy, lambda line: print(line, flush=True)))


def _tried(group: Worker, case: Case, size: int, steps: int, *, verify: bool = False) -> tuple[bool, tuple[int, int]]:
    how = {"precision": case.precision, "accumulation_steps": case.accumulation_steps}
    tried = group.call(TryBatchSize(batch_size=size, steps=steps, verify=verify, **how), timeout=SECONDS)
    attempt = tried.attempt
    if attempt.outcome not in ("fit", "oom"):
        raise RuntimeError(f"{attempt.outcome} at {size}: {attempt.message}")
    return attempt.fits, (attempt.peak_allocated_bytes, attempt.peak_reserved_bytes)

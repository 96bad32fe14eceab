"""Where a trace and the allocator's own history of a real run part: the first difference, and its operator."""

from __future__ import annotations

import bisect
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from zoo import Case

from batchtune.estimate.memory.fit import Step

ROUNDING = 512
_LOOK_AHEAD = 40  # allocations, of both sides together, until which they are alike again
_KINDS = 4  # of differences that are told
_STEPS = 2  # as many as are traced


def first_difference(case: Case, traced: list[tuple[int, int, str]], size: int) -> str:
    """In words: at which operator of the trace an allocation or a free differs; run in a process without CUDA."""
    from estimate_allocator import forked

    return compare(traced, forked(_recorded, case, size))


def events_of(step: Step, size: int) -> list[tuple[int, int, str]]:
    """(number of the storage, its rounded size or 0 where it dies, what it is) for each event."""
    trace, sizes = step.traced(size), step.sizes(size)
    events = []
    for event in trace.events:
        birth, size_bytes = trace.births[abs(event) - 1], sizes[abs(event) - 1]
        if size_bytes:
            what = f"{birth.op} ({birth.moment.split()[0]})"
            events.append((abs(event), -(-size_bytes // ROUNDING) * ROUNDING if event > 0 else 0, what))
    return events


def _recorded(case: Case, size: int) -> list[tuple[int, int, str]]:
    """The same of real steps, from the allocator's history; what it is: the innermost Python line."""
    from estimate_allocator import attempted

    from batchtune.child.trainer import require_finite

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python")
    attempted(case, case.model(**case.options), size, None, steps=_STEPS)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    found, number, at = [], 0, {}
    for event in events:
        if event["action"] == "alloc" and not any(
            frame["name"] == require_finite.__name__ for frame in event["frames"]
        ):
            number += 1
            at[event["addr"]] = number
            frames = [each for each in event["frames"] if each["filename"] != "??"]
            line = f"{Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else "backward"
            rounded = max(1, -(-event["size"] // ROUNDING)) * ROUNDING
            found.append((number, rounded, line))
        elif event["action"] == "free_requested" and event["addr"] in at:
            found.append((at.pop(event["addr"]), 0, ""))
    return found


def compare(traced: list[tuple[int, int, str]], real: list[tuple[int, int, str]]) -> str:
    """In words, the first kinds of difference in the order in which they appear, each with how often it does."""
    mine, ours = (_lives(events) for events in (traced, real))
    matched, found = _matched(mine, ours)
    left, right = ([pair[side] for pair in matched] for side in (0, 1))
    for one, other in matched:
        dies = bisect.bisect_left(left, mine[one][1]), bisect.bisect_left(right, ours[other][1])
        if dies[0] != dies[1] and min(dies) < len(matched):
            found[f"freed {'earlier' if dies[1] < dies[0] else 'later'} than traced: {mine[one][2]}"] += 1
    kinds = [f"{what} x {count}" if count > 1 else what for what, count in found.items()]
    rest = f"; {len(kinds) - _KINDS} other kinds" if len(kinds) > _KINDS else ""
    return "; ".join(kinds[:_KINDS]) + rest or "none in allocations and frees"


def _matched(mine: list[list[Any]], ours: list[list[Any]]) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Pairs of allocations that are the same ones, and what else there is, by kind."""
    sizes = [life[0] for life in mine], [life[0] for life in ours]
    pairs, found = [], Counter[str]()
    one = other = 0
    while one < len(mine) and other < len(ours):
        if sizes[0][one] == sizes[1][other]:
            pairs.append((one, other))
            one, other = one + 1, other + 1
            continue
        for total, mine_too in ((both, part) for both in range(1, _LOOK_AHEAD) for part in range(both + 1)):
            after = one + mine_too, other + total - mine_too
            if sizes[0][after[0] : after[0] + 3] == sizes[1][after[1] : after[1] + 3]:
                break
        else:
            found[f"lost at traced {mine[one][2]}, {sizes[0][one]:,} B; really {sizes[1][other]:,} B"] += 1
            break
        last = mine[one - 1][2] if one else "the start"
        found.update(f"not traced: {size:,} B at {line} after {last}" for size, _, line in ours[other : after[1]])
        found.update(f"traced only: {size:,} B of {what}" for size, _, what in mine[one : after[0]])
        one, other = after
    return pairs, found


def _lives(events: list[tuple[int, int, str]]) -> list[list[Any]]:
    """[size, how many allocations had been made when it died, what it is] for each allocation, in order."""
    lives: list[list[Any]] = []
    at: dict[int, int] = {}
    for number, size, what in events:
        if size:
            at[number] = len(lives)
            lives.append([size, 1 << 40, what])
        else:
            lives[at[number]][1] = len(lives)
    return lives

"""Where a trace and the allocator's own history of a real run part: the first difference, and its operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import zoo
from zoo import Case

ROUNDING = 512
WORKSPACES = (8_519_680, 33_554_432)  # cuBLAS's, of a handle; where they are made is known and beside the question


def first_difference(case: Case, size: int) -> str:
    """In words: at which operator of the trace an allocation or a free differs; run in a process without CUDA."""
    from estimate_allocator import forked

    traced = forked(_traced, case, size)
    return compare(traced, forked(_recorded, case, size))


def _traced(case: Case, size: int) -> list[tuple[int, int, str]]:
    """(number of the storage, its rounded size or 0 where it dies, what it is) for each event."""
    from batchtune.estimate.answer import warm_up
    from batchtune.estimate.trace import Tracer

    warm_up()
    trace = Tracer(f"{Path(zoo.__file__)}:{case.slug}", case.precision, case.accumulation_steps).trace(size)
    found = []
    for event in trace.events:
        birth = trace.births[abs(event) - 1]
        what = f"{birth.op} in {birth.module or birth.moment} ({birth.moment})"
        rounded = max(1, -(-birth.size_bytes // ROUNDING)) * ROUNDING
        found.append((abs(event), rounded if event > 0 else 0, what))
    return found


def _recorded(case: Case, size: int) -> list[tuple[int, int, str]]:
    """The same of real steps, from the allocator's history; what it is: the innermost Python line."""
    from batchtune.train.step import Trainer

    batch = case.batch(size)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python")
    device = torch.device("cuda", 0)
    trainer = Trainer(case.task(), device, case.precision, loss_scale=1.0)
    for _ in range(2):
        for _ in range(min(2, case.accumulation_steps)):
            trainer.forward_backward(batch, case.accumulation_steps)
        trainer.update()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    found, number, at = [], 0, {}
    for event in events:
        if event["action"] == "alloc":
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
    """The first allocation of another size, or the first storage that dies between other allocations."""
    mine, ours = (_lives(without_workspaces(events)) for events in (traced, real))
    for position, (left, right) in enumerate(zip(mine, ours, strict=False)):
        if left[0] != right[0]:
            before = mine[position - 1][2] if position else "the start"
            return (
                f"allocation {position}: traced {left[0]:,} B for {left[2]}; really {right[0]:,} B at {right[2]} "
                f"(after {before})"
            )
    for position, (left, right) in enumerate(zip(mine, ours, strict=False)):
        if left[1] != right[1] and min(left[1], right[1]) < min(len(mine), len(ours)):
            kept = "earlier" if left[1] > right[1] else "later"
            return f"allocation {position}, {left[0]:,} B for {left[2]}: really freed {kept}"
    return "none in allocations and frees" if len(mine) <= len(ours) else "the real run ends earlier"


def without_workspaces(events: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The events but for storages as large as a workspace of cuBLAS."""
    known = {number for number, size, _ in events if size in WORKSPACES}
    return [event for event in events if event[0] not in known]


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

"""What a probe of lengths came to beside plain loops: rows, the goals missed, and the table."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CLOSE, MOST_ATTEMPTS, MOST_OOMS = 0.97, 2.5, 0.6
RANDOM_ORDERS = 24  # of the loop that the answers have to train in, and so have larger batches
CHECKED_ORDERS = 18  # in which the answers have passed their final check
MANY_ORDERS = 300  # those among them, in which the answers were replayed, where larger batches train in those above
FEW_ORDERS = 14  # of them, that larger ones had to train in until 2026-11: some do by luck, and not in the others
FIRST_SIZE, NEAR = 32, 0.05  # of the search that begins at each length anew, as NeMo's OOMptimizer, to 5 %


@dataclass
class Row:
    """What came of one model on one card.

    Attributes:
        sizes: batchtune's batches, by length.
        room: by how much the loop could train larger batches at all lengths, in the gradient habits that the answers
            train in; 1: by less than 3 %.
        room_in_few: the same where larger ones need not train in all of the orders.
        room_in_many: and where they have to train in many orders, those of final checks among them, in both gradient
            habits, measured where `room` is above 3 %.
        many_fail: of those, how many the answers do not train in.
        fails: orders of the plain loop that the answers do not train in.
        attempts: of the search, and those that tell of a final check, one a length.
        ooms: of them, of the search and of final checks that failed.
        nemo: attempts, OOMs and sizes of the search of each length from nothing.
        estimated: batches of `batchtune estimate --lengths` within the same limit, among others and alone, by length.
        band: of that estimate, as a share of memory.
        safe: its batches that are safe, error band included, by length.
        safe_fail: in how many orders of the plain loop they do not train.
    """

    model: str
    gib: int
    sizes: list[int] = field(default_factory=list)
    room: float = 1.0
    room_in_few: float = 1.0
    room_in_many: float | None = None
    many_fail: int = 0
    fails: list[str] = field(default_factory=list)
    orders: int = 0
    attempts: tuple[int, int] = (0, 0)
    ooms: tuple[int, int] = (0, 0)
    nemo: tuple[int, int, list[int]] = (0, 0, [])
    estimated: list[tuple[int, int]] = field(default_factory=list)
    band: float = 0.0
    safe: list[int] = field(default_factory=list)
    safe_fail: int | None = None
    seconds: float = 0.0
    trouble: str = ""


def attempts(rows: Sequence[Row]) -> float:
    """Of the search and final checks that failed, a length in the mean."""
    return sum(row.attempts[0] + row.ooms[1] for row in rows) / max(1, sum(len(row.sizes) for row in rows))


def ooms(rows: Sequence[Row]) -> float:
    """A length in the mean, of the search and of final checks."""
    return sum(sum(row.ooms) for row in rows) / max(1, sum(len(row.sizes) for row in rows))


def misses(rows: Sequence[Row]) -> list[str]:
    """The goals that were missed, in words."""
    found = []
    for row in rows:
        where = f"{row.model} at {row.gib} GiB"
        if row.trouble:
            found.append(f"{where}: {row.trouble}")
            continue
        if row.fails:
            found.append(f"{where}: does not train {', '.join(row.fails)}")
        if row.safe_fail:
            found.append(
                f"{where}: safe batches of the estimate do not train in {row.safe_fail} of {row.orders} orders"
            )
        if row.many_fail:
            found.append(f"{where}: does not train {row.many_fail} of {2 * MANY_ORDERS} in many orders")
        if (largest := row.room if row.room_in_many is None else row.room_in_many) * CLOSE > 1:
            found.append(f"{where}: batches {largest - 1:.1%} larger train, too")
    told = [row for row in rows if row.sizes]
    for which, most, each in (("attempts", MOST_ATTEMPTS, attempts(told)), ("OOMs", MOST_OOMS, ooms(told))):
        if told and each > most:
            found.append(f"{each:.2f} {which} a length in the mean, more than {most:g}")
    return found


def report(rows: Sequence[Row]) -> str:
    """The tables: means, one row for each model and card, and the batches of each length."""
    import torch
    from length_tasks import CASES

    from batchtune import __version__
    from batchtune.vocabulary import length_text

    told = [row for row in rows if row.sizes]
    count, trained = sum(len(row.sizes) for row in told), sum(row.orders - len(row.fails) for row in told)
    made_by = f"{dt.datetime.now(dt.UTC).date()}, batchtune {__version__}, torch {torch.__version__}, fake card"
    alone = [a / b for row in told for a, b in zip(row.sizes, row.nemo[2], strict=True)]
    ours = attempts(told), ooms(told)
    nemo = [sum(row.nemo[which] for row in told) / count for which in (0, 1)]
    lines = [
        "# The largest batch of every length, against plain loops that mix lengths",
        "",
        f"{made_by}: `python tests/benchmarks/probe_lengths.py`",
        "",
        f"{len({row.model for row in told})} models, {len(told)} probes, {count} batches. Plain loops train all",
        f"in {trained} of {sum(row.orders for row in told)} orders: long first, short first, and {RANDOM_ORDERS}",
        "at random that no probe has seen. Room: by how much larger batches train in all of these orders, too;",
        f"1 where they could not be {1 / CLOSE - 1:.0%} larger. In brackets: where those need to train in the first",
        f"{FEW_ORDERS} orders only, which some do by luck; where there is room, and last, where they need to train in",
        f"those {MANY_ORDERS} orders that were replayed of the answers, {CHECKED_ORDERS} of which final checks had,",
        "each with gradients freed before the forward pass and after the step. In the other orders they are freed in",
        "the one way and the other in turns. Alone, without the others, a length trains batches of",
        f"{1 / statistics.fmean(alone):.2f} times the size, in the mean.",
        "",
        "| search | attempts a length | OOMs a length |",
        "|---|--:|--:|",
        f"| `batchtune probe --lengths`, with final checks that failed | {ours[0]:.2f} | {ours[1]:.2f} |",
        f"| each length alone, from {FIRST_SIZE}, to {NEAR:.0%} | {nemo[0]:.2f} | {nemo[1]:.2f} |",
        "",
        "| model | GiB | search + failed checks | OOMs | from nothing | OOMs | room | orders that fail | s | |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|---|",
    ]
    lines += [
        (
            f"| {row.model} | {row.gib} | {row.attempts[0]} + {row.ooms[1]} | {row.ooms[0]} + {row.ooms[1]} | "
            f"{row.nemo[0]} | {row.nemo[1]} | {row.room:g} ({_others(row)}) | "
            f"{', '.join(row.fails) or 'none'} of {row.orders} | "
            f"{row.seconds:g} | {row.trouble} |"
        )
        for row in rows
    ]
    lines += ["", "Batches at each length: batchtune's, and from nothing, alone.", ""]
    for row in told:
        each = zip(CASES[row.model].lengths, row.sizes, row.nemo[2], strict=True)
        shown = ", ".join(f"{length_text(edge)}: {a:,} / {b:,}" for edge, a, b in each)
        lines.append(f"- {row.model}, {row.gib} GiB: {shown}")
    lines += estimates([row for row in told if row.estimated])
    return "\n".join(lines) + "\n"


def _others(row: Row) -> str:
    """Room by the other orders."""
    if row.room_in_many is None:
        return f"{row.room_in_few:g}"
    return f"{row.room_in_few:g}, {row.room_in_many:g}; {row.many_fail} of {2 * MANY_ORDERS} fail"


def estimates(rows: Sequence[Row]) -> list[str]:
    """How far off the estimate without a card is, a line for each model."""
    lines = [
        "",
        "`batchtune estimate --lengths` within the same limit: least and greatest of its batches over those probed,",
        "and alone over those from nothing, which are found to 5 % only; where it was measured, its safe batches over",
        "those probed, and the orders of the plain loop that do not train with them.",
        "",
        "| model | GiB | among others | alone | its band, of memory | safe | orders that fail |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        among = [each[0] / size for each, size in zip(row.estimated, row.sizes, strict=True)]
        alone = [each[1] / size for each, size in zip(row.estimated, row.nemo[2], strict=True)]
        spans = " | ".join(f"{min(some):.2f} to {max(some):.2f}" for some in (among, alone))
        safe = [each / size for each, size in zip(row.safe, row.sizes, strict=False)]
        shown = f"{min(safe):.2f} to {max(safe):.2f} | {row.safe_fail} of {row.orders}" if safe else "- | -"
        lines.append(f"| {row.model} | {row.gib} | {spans} | ±{row.band:.0%} | {shown} |")
    return lines if rows else []


def read(path: Path) -> dict[tuple[str, int], Row]:
    """What a state holds, one row a line of JSON."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(row.model, row.gib): row for row in rows}

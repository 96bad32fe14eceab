"""What a probe came to beside the largest batch that a plain loop trains: rows, the goals missed, and the table."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SIZES = (8, 24, 80, 141)
CLOSE = 0.01
FEWEST = 20  # probes of whose mean something can be asked
NOTES = "\n## Notes\n"  # what stands below it in a table was written by a person
_EASIER, _HIGH, _LOW = "1 % more trains with: ", "**too high** ", "**too low** "
_HEADER = (
    "| case | GiB | within | tolerance | answer | truth | attempts | OOMs | seconds | estimate | without estimate "
    "| commit | |"
)


@dataclass(frozen=True)
class Setup:
    """One probe: a case on a card, limited in one of three ways, with a tolerance.

    Attributes:
        slug: of the case.
        gib: what there is to train in.
        way: `card` of that size, all of it; `limit`: --memory-limit of a larger card; `margin`: the default one.
        tolerance: 0 asks for the exact end.
    """

    slug: str
    gib: int
    way: str
    tolerance: float

    @property
    def arguments(self) -> list[str]:
        """The command line's."""
        limits = {"card": ["--margin", "0"], "limit": ["--memory-limit", f"{self.gib}GiB"], "margin": []}
        return [*limits[self.way], "--tolerance", str(self.tolerance)]


@dataclass
class Row:
    """What came of it; `truth` is the largest size that the loop trains with every habit.

    It is the answer where that trains and one percent more does not, else it is bisected.
    """

    setup: Setup
    answer: int | None = None
    truth: int | None = None
    attempts: int = 0
    ooms: int = 0
    seconds: float = 0.0
    plain: tuple[int, int, float] | None = None  # attempts, OOMs and seconds without the estimate
    estimated: bool = False
    easier: list[str] = field(default_factory=list)  # habits that train 1 % more than the answer, where not all do
    trouble: str = ""
    commit: str = ""

    @property
    def too_high(self) -> bool:
        return self.answer is not None and self.truth is not None and self.answer > self.truth

    @property
    def too_low(self) -> bool:
        """Not where the search ended for the sake of its own end, far above what anybody trains with."""
        from batchtune.vocabulary import LARGEST

        known = self.answer is not None and self.truth is not None and self.answer < LARGEST
        return known and self.answer * (1 + CLOSE) + 1 <= self.truth


def misses(rows: Sequence[Row]) -> list[str]:
    """The goals that were missed, in words."""
    found = []
    for row in rows:
        where = f"{row.setup.slug}, {row.setup.gib} GiB, {row.setup.way}, tolerance {row.setup.tolerance:g}"
        if row.too_high:
            found.append(f"{where}: {row.answer:,} does not train, {row.truth:,} does")
        if row.too_low:
            found.append(f"{where}: {row.answer:,} is more than 1 % below {row.truth:,}")
    for exact, most in ((False, 5.0), (True, 8.0)):
        counted = [row for row in rows if row.estimated and (row.setup.tolerance == 0) == exact]
        if len(counted) >= FEWEST and statistics.fmean(row.attempts for row in counted) > most:
            found.append(f"more than {most:g} attempts in the mean{' of an exact search' if exact else ''}")
        if len(counted) >= FEWEST and not exact and statistics.fmean(row.ooms for row in counted) > 1.4:
            found.append("more than 1.4 OOMs in the mean")
    return found


def report(rows: Sequence[Row], command: str) -> str:
    """The table, with the figures that the goals are about."""
    import torch

    from batchtune import __version__

    told = [row for row in rows if row.truth is not None]
    models, high = len({row.setup.slug for row in told}), sum(row.too_high for row in told)
    low = sum(row.too_low for row in told)
    whole = sum(count == len(SIZES) for count in Counter(row.setup.slug for row in told).values())
    verdict = f"{len(told)} answers of {models} models, {whole} of them at all of {', '.join(map(str, SIZES))} GiB: "
    verdict += f"{high} that the loop cannot train, "
    verdict += f"{low} more than 1 % below the largest that it can."
    lines = [
        "# Probe against a plain training loop",
        "",
        f"{dt.datetime.now(dt.UTC).date()}, batchtune {__version__}, torch {torch.__version__}, fake card: `{command}`",
        "",
        verdict,
        "",
        "| with | probes | attempts | OOMs | seconds |",
        "|---|--:|--:|--:|--:|",
    ]
    for exact in (False, True):
        for estimated in (True, False):
            name = f"{'an' if estimated else 'no'} estimate, tolerance {'0' if exact else '1 %'}"
            chosen = [row for row in told if row.estimated == estimated and (row.setup.tolerance == 0) == exact]
            lines += _means(name, chosen)
    lines += [
        "",
        "Attempts are all of a probe, the final check among them; seconds are without imports.",
        "",
    ]
    lines += [_HEADER, "|---|--:|---|--:|--:|--:|--:|--:|--:|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    setup, note = row.setup, row.trouble
    if row.easier:
        note = f"{_EASIER}{', '.join(row.easier)}; {note}"
    verdict = _HIGH if row.too_high else _LOW if row.too_low else ""
    plain = "{} / {} / {}".format(*row.plain) if row.plain else ""
    return (
        f"| {setup.slug} | {setup.gib} | {setup.way} | {setup.tolerance:g} | {_number(row.answer)} | "
        f"{_number(row.truth)} | {row.attempts} | {row.ooms} | {row.seconds:g} | {'yes' if row.estimated else 'no'} | "
        f"{plain} | {row.commit} | {verdict}{note} |"
    )


def _means(name: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    means = (statistics.fmean(getattr(row, figure) for row in rows) for figure in ("attempts", "ooms", "seconds"))
    return ["| {} | {} | {:.1f} | {:.2f} | {:.1f} |".format(name, len(rows), *means)]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def read(path: Path) -> dict[Setup, Row]:
    """The rows that a state holds, one a line of JSON."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        setup = Setup(**data.pop("setup"))
        rows[setup] = Row(setup, **data)
    return rows


def read_table(text: str) -> dict[Setup, Row]:
    """The rows of a table that `report` wrote."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == _HEADER.count("|") - 1 and cells[1].isdigit():
            row = _row(*cells)
            rows[row.setup] = row
    return rows


def _row(slug: str, gib: str, way: str, tolerance: str, *cells: str) -> Row:
    answer, truth, attempts, ooms, seconds, estimated, plain, commit, note = cells
    row = Row(Setup(slug, int(gib), way, float(tolerance)), commit=commit, estimated=estimated == "yes")
    row.answer, row.truth = (int(each.replace(",", "")) if each else None for each in (answer, truth))
    row.attempts, row.ooms, row.seconds = int(attempts), int(ooms), float(seconds)
    if plain:
        without = plain.split(" / ")
        row.plain = int(without[0]), int(without[1]), float(without[2])
    row.trouble = note.removeprefix(_HIGH.strip()).removeprefix(_LOW.strip()).strip()
    if row.trouble.startswith(_EASIER):
        habits, _, row.trouble = row.trouble.removeprefix(_EASIER).partition(";")
        row.easier, row.trouble = habits.split(", "), row.trouble.strip()
    return row

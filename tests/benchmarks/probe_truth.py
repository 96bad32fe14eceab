"""`batchtune probe` against the largest batch that a plain PyTorch loop trains, on cards of 8 to 141 GiB.

    python tests/benchmarks/probe_truth.py [--resume] [--only WORD,WORD] [--quick] [--sizes 8,24]

writes tests/benchmarks/results/probe_truth.md, and ends with 1 where a goal is missed: no answer that the loop cannot
train, none more than 1 % below what it can. It needs torch's CUDA build on the fake card.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]
RESULTS = HERE / "results" / "probe_truth.md"
SIZES = (8, 24, 80, 141)
WAYS = ("card", "limit", "margin")
LARGER_CARD, CONTEXT, MARGIN = 192, "500MiB", 0.05
CLOSE = 0.01
FEWEST = 20  # probes of whose mean something can be asked
RESOLUTION = 0.002  # of the truth, where it is not the answer itself
COMPARED = 10  # of so many probes, one is also made without the estimate
QUICK = ("case_transformer_bf16", "case_densenet", "case_nn_transformerencoder")


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


@contextlib.contextmanager
def card(gib: int) -> Iterator[None]:
    """A fake card of so much memory for every process that starts or is forked meanwhile."""
    import fake_gpu

    made = fake_gpu.Card(f"{gib}GiB", name="NVIDIA RTX A5000", capability=(8, 0), context_bytes=CONTEXT)
    with fake_gpu.machine(made):
        yield


def setups(slugs: Sequence[str], sizes: Sequence[int]) -> list[Setup]:
    """All cases at all sizes, every case once before any comes again; ways and tolerances in turn."""
    found = []
    for turn in range(len(sizes)):
        for number, slug in enumerate(slugs):
            gib = sizes[(number + turn) % len(sizes)]
            place = number + SIZES.index(gib)
            found.append(Setup(slug, gib, WAYS[place % 3], 0.0 if place % 4 == 0 else 0.01))
    return found


def probe(setup: Setup, precision: str, *, estimate: bool = True) -> dict:
    """The result document of a probe in processes of its own, with what it printed as `told`."""
    import forked

    from batchtune.estimate.prior import EstimatePrior

    spec = f"{HERE / 'truth_tasks.py'}:{setup.slug}"
    command = ["probe", spec, "--precision", precision, "--no-throughput", "--json", "-v", *setup.arguments]
    blind = contextlib.nullcontext() if estimate else mock.patch.object(EstimatePrior, "look", return_value=None)
    with tempfile.TemporaryDirectory() as folder, blind:
        variables = {"XDG_CACHE_HOME": folder, "HOME": folder}
        printed, told = forked.run_command(command, Path(folder), variables, seconds=300)
    try:
        return json.loads(printed) | {"told": told}
    except json.JSONDecodeError:
        return {"error": {"message": told[-300:]}, "probe": None, "told": told}


def measure(setup: Setup, *, compare: bool) -> Row:
    """A probe, and the plain loop around its answer.

    Args:
        setup: what is probed.
        compare: also probe without the estimate, and look for habits with which more trains.
    """
    import truth_tasks
    from plain_loop import Truth

    row, case = Row(setup, commit=_commit()), truth_tasks.CASES[setup.slug]
    source = getattr(truth_tasks, setup.slug)
    with card(LARGER_CARD if setup.way == "limit" else setup.gib):
        started = time.perf_counter()
        result = probe(setup, case.precision)
        row.seconds = round(time.perf_counter() - started, 1)
        found = result["probe"] or {}
        row.estimated = "estimate: about" in result["told"]
        row.answer, row.attempts, row.ooms = _figures(found)
        if row.answer is None:
            row.trouble = (result.get("error") or {}).get("message", "")[:200].replace("\n", " ")
            return row
        if compare and row.estimated:
            started = time.perf_counter()
            _, attempts, ooms = _figures(probe(setup, case.precision, estimate=False)["probe"] or {})
            row.plain = attempts, ooms, round(time.perf_counter() - started, 1)
        truth = Truth(source, case.precision, None if setup.way == "card" else found["memory_limit_bytes"])
        above = int(row.answer * (1 + CLOSE)) + 1
        good = truth.trains(row.answer) and not truth.trains(above)
        row.truth = row.answer if good else truth.largest(row.answer, RESOLUTION)
        if good and compare:
            row.easier = truth.habits_that_train(above)
        row.trouble = truth.broken[0].splitlines()[-1][:200] if truth.broken else ""
    return row


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _figures(found: dict) -> tuple[int | None, int, int]:
    """The answer, attempts with the final check, and OOMs."""
    tried = found.get("attempts", [])
    answer = found.get("max_batch_size") if found.get("verified_in_fresh_process") else None
    return answer, len(tried), sum(each["outcome"] == "oom" for each in tried)


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
    verdict = f"{len(told)} answers of {models} models: {high} that the loop cannot train, "
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
    lines += [
        "| case | GiB | within | tolerance | answer | truth | attempts | OOMs | seconds | without estimate | commit | |"
    ]
    lines += ["|---|--:|---|--:|--:|--:|--:|--:|--:|---|---|---|"]
    for row in rows:
        setup, note = row.setup, row.trouble
        if row.easier:
            note = f"1 % more trains with: {', '.join(row.easier)}; {note}"
        verdict = "**too high** " if row.too_high else "**too low** " if row.too_low else ""
        plain = "{} / {} / {}".format(*row.plain) if row.plain else ""
        lines.append(
            f"| {setup.slug} | {setup.gib} | {setup.way} | {setup.tolerance:g} | {_number(row.answer)} | "
            f"{_number(row.truth)} | {row.attempts} | {row.ooms} | {row.seconds:g} | {plain} | "
            f"{row.commit} | {verdict}{note} |"
        )
    return "\n".join(lines) + "\n"


def _means(name: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    means = (statistics.fmean(getattr(row, figure) for row in rows) for figure in ("attempts", "ooms", "seconds"))
    return ["| {} | {} | {:.1f} | {:.2f} | {:.1f} |".format(name, len(rows), *means)]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _read(path: Path) -> dict[Setup, Row]:
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        setup = Setup(**data.pop("setup"))
        rows[setup] = Row(setup, **data)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 models at 8 GiB, no table")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier start has measured")
    parser.add_argument("--only", default="", help="cases whose name has one of these words in it, no table")
    parser.add_argument("--cases", type=int, help="only the first so many")
    parser.add_argument("--part", default="0/1", help="0/2 and 1/2 may run side by side with one state")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="GiB")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table of what is there")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "probe_truth.jsonl")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    import forked
    import truth_tasks

    forked.warm_up()
    slugs = [
        slug
        for slug in (QUICK if options.quick else list(truth_tasks.CASES)[: options.cases])
        if any(word in slug for word in options.only.split(","))
    ]
    wanted = setups(slugs, (8,) if options.quick else [int(size) for size in options.sizes.split(",")])
    keeps, writes = not options.quick, options.table or not (options.quick or options.only or parts > 1)
    rows = _read(options.state) if options.resume or options.table else {}
    if keeps and not (options.resume or options.table):
        options.state.unlink(missing_ok=True)
    if options.table:
        wanted = list(rows)
    wanted = wanted[part::parts]
    for number, setup in enumerate(wanted, 1):
        if setup not in rows:
            row = rows[setup] = measure(setup, compare=not options.quick and number % COMPARED == 0)
            print(f"{number}/{len(wanted)} {row}", flush=True)
            if keeps:
                with options.state.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    done = [rows[setup] for setup in wanted]
    if writes:
        RESULTS.write_text(report(done, "python tests/benchmarks/probe_truth.py"))
    missed = misses(done)
    missed += [] if any(row.truth for row in done) else ["nothing was measured"]
    print("\n".join(missed) or "every goal was met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())

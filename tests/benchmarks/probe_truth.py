"""`batchtune probe` against the largest batch that a plain PyTorch loop trains, on cards of 8 to 141 GiB.

    python tests/benchmarks/probe_truth.py [--resume] [--only WORD,WORD] [--quick] [--sizes 8,24] [--whole]

writes tests/benchmarks/results/probe_truth.md, and ends with 1 where a goal is missed: no answer that the loop cannot
train, none more than 1 % below what it can. It needs torch's CUDA build on the fake card. An estimate may take as long
as it needs here: how quick it is on a busy machine is another question.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]
from truth_rows import CLOSE, NOTES, SIZES, Row, Setup, misses, read, read_table, report  # noqa: E402 - found beside

RESULTS = HERE / "results" / "probe_truth.md"
WAYS = ("card", "limit", "margin")
PATIENCE = 900.0  # seconds, for an attempt and for an estimate
LARGER_CARD, CONTEXT, MARGIN = 192, "500MiB", 0.05
RESOLUTION = 0.002  # of the truth, where it is not the answer itself
COMPARED = 10  # of so many probes, one is also made without the estimate
QUICK = ("case_transformer_bf16", "case_densenet", "case_nn_transformerencoder")


@contextlib.contextmanager
def card(gib: int) -> Iterator[None]:
    """A fake card of so much memory for every process that starts or is forked meanwhile."""
    import fake_gpu

    made = fake_gpu.Card(f"{gib}GiB", name="NVIDIA RTX A5000", capability=(8, 0), context_bytes=CONTEXT)
    with fake_gpu.machine(made):
        yield


def setups(slugs: Sequence[str], sizes: Sequence[int]) -> list[Setup]:
    """All cases at all sizes, ways and tolerances in turn; in a random order, so that a part of it is a fair sample."""
    found = []
    for number, slug in enumerate(slugs):
        for gib in sizes:
            place = number + SIZES.index(gib)
            found.append(Setup(slug, gib, WAYS[place % 3], 0.0 if place % 4 == 0 else 0.01))
    random.Random(0).shuffle(found)
    return found


def soonest_whole(wanted: Sequence[Setup], rows: Mapping[Setup, Row]) -> list[Setup]:
    """All sizes of a case before the next one's, those cases first of which the rest takes least.

    Args:
        wanted: what shall be measured.
        rows: what has been; how long it took says how long the rest of a case takes.
    """
    spent: dict[str, list[float]] = {setup.slug: [] for setup in wanted}
    for setup, row in rows.items():
        spent.setdefault(setup.slug, []).append(row.seconds)
    every = [seconds for each in spent.values() for seconds in each]
    usual = statistics.fmean(every) if every else 0.0
    missing = Counter(setup.slug for setup in wanted if setup not in rows)
    rest = {slug: missing[slug] * (statistics.fmean(each) if each else usual) for slug, each in spent.items()}
    return sorted(wanted, key=lambda setup: (rest[setup.slug], setup.slug))


def probe(setup: Setup, precision: str, *, estimate: bool = True) -> dict:
    """The result document of a probe whose children are forks, with what it printed as `told`."""
    from typer.testing import CliRunner

    from batchtune.cli import app
    from batchtune.estimate import prior

    blind: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not estimate:
        blind = mock.patch.object(prior.EstimatePrior, "look", return_value=None)
    spec = f"{HERE / 'truth_tasks.py'}:{setup.slug}"
    command = ["probe", spec, "--precision", precision, "--no-throughput", "--json", "-v", *setup.arguments]
    command += ["--timeout", f"{PATIENCE:g}s"]
    unhurried = mock.patch.object(prior, "TRACE_SECONDS", PATIENCE)
    with tempfile.TemporaryDirectory() as folder, blind, unhurried, contextlib.chdir(folder):
        done = CliRunner().invoke(app, command, env={"XDG_CACHE_HOME": folder, "HOME": folder})
    try:
        return json.loads(done.stdout) | {"told": done.stderr}
    except json.JSONDecodeError:
        return {"error": {"message": done.stderr[-300:]}, "probe": None, "told": done.stderr}


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
        row.truth = truth.beside(row.answer, CLOSE, RESOLUTION)
        if row.truth == row.answer and compare:
            row.easier = truth.habits_that_train(int(row.answer * (1 + CLOSE)) + 1)
        row.trouble = truth.broken[0].splitlines()[-1][:200] if truth.broken else ""
        failing = found.get("first_failing_batch_size")
        if row.too_low and failing and not truth.trains(failing):
            row.trouble = f"the loop does not train {failing:,} either, though more; {row.trouble}"
    return row


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _figures(found: dict) -> tuple[int | None, int, int]:
    """The answer, attempts with the final check, and OOMs."""
    tried = found.get("attempts", [])
    answer = found.get("max_batch_size") if found.get("verified_in_fresh_process") else None
    return answer, len(tried), sum(each["outcome"] == "oom" for each in tried)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 models at 8 GiB, no table")
    parser.add_argument("--resume", action="store_true", help="keep what the table and an earlier start hold")
    parser.add_argument("--only", default="", help="cases whose name has one of these words in it, no table")
    parser.add_argument("--cases", type=int, help="only the first so many")
    parser.add_argument("--part", default="0/1", help="0/2 and 1/2 may run side by side with one state")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="GiB")
    parser.add_argument("--whole", action="store_true", help="all sizes of a case at once, the quickest case first")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table of what is there")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "probe_truth.jsonl")
    return parser.parse_args()


def main() -> int:
    options = _options()
    part, parts = map(int, options.part.split("/"))
    import truth_tasks
    from fake_gpu import forks

    forks.children_are_forks()
    slugs = QUICK if options.quick else list(truth_tasks.CASES)[: options.cases]
    sizes = (8,) if options.quick else [int(size) for size in options.sizes.split(",")]
    words = options.only.split(",")
    wanted = [setup for setup in setups(slugs, sizes) if any(word in setup.slug for word in words)]
    keeps, writes = not options.quick, options.table or not (options.quick or options.only or parts > 1)
    table = RESULTS.read_text() if RESULTS.exists() else ""
    rows = read_table(table) | read(options.state) if options.resume or options.table else {}
    if keeps and not (options.resume or options.table):
        options.state.unlink(missing_ok=True)
    if options.table:
        wanted = list(rows)
    elif options.whole:
        wanted = soonest_whole(wanted, rows)
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
        notes = "".join(table.partition(NOTES)[1:])
        RESULTS.write_text(report(done, "python tests/benchmarks/probe_truth.py") + notes)
    missed = misses(done)
    missed += [] if any(row.truth for row in done) else ["nothing was measured"]
    print("\n".join(missed) or "every goal was met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())

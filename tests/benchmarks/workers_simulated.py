"""Many workers on recorded learning curves: time on the wall until a good configuration is held.

    python tests/benchmarks/workers_simulated.py                    # all tasks and tuners, 1 to 256 workers, 5 seeds
    python tests/benchmarks/workers_simulated.py charlm --tuners batchtune --workers 1 8 --seeds 2
    python tests/benchmarks/workers_simulated.py --kept runs.jsonl  # goes on where an earlier start ended

batchtune's study, trials, sampler, pruner, caps, stop rule and confirmation are the real ones, as a pool of so many
workers calls them; only the children are replaced by the record, and the clock by one that training alone moves, event
by event (replay_workers.py). What is measured before the study is paid for: on one worker, while the others wait. The
other tuners run the baseline first, search the same space, and end a run at the same longest time. What a study asks of
a database is measured by `python tests/benchmarks/workers_storage.py`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import itertools
import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from replay_curves import Record
from replay_tasks import TASKS
from replay_workers import HORIZON, MOST_TRIALS, OURS, WORKERS_TUNERS, Moment
from tune_replay import GOOD, notes, quantile, shown, true_ratio

RESULT = Path(__file__).parent / "results" / "workers_simulated.md"
WORKERS = (1, 2, 4, 8, 16, 64, 256)
WANTED_SPEEDUP, ONE, SOME, MANY = 4.0, 1, 8, 64  # of so many workers against one; those of many are never slower


@dataclass(frozen=True, slots=True)
class Study:
    """One study; times in oracle runs on the wall, inf for never.

    Attributes:
        held: until an answer within GOOD times the oracle was given for good.
        runs_held: runs that had ended by then.
        runs: that it made in all.
        wall: until it ended.
        final: true time of its last answer over the oracle's.
    """

    held: float
    runs_held: float
    runs: int
    wall: float
    final: float


def judged(record: Record, moments: Sequence[Moment]) -> Study:
    """Compares the answers of a study with the oracle."""
    oracle, held, runs_held, ratio = record.oracle[0], math.inf, math.inf, math.inf
    for number, moment in enumerate(moments, start=1):
        ratio = true_ratio(record, moment.answer)
        if ratio > GOOD:
            held, runs_held = math.inf, math.inf
        elif math.isinf(held):
            held, runs_held = moment.seconds / oracle, number
    return Study(held, runs_held, len(moments), moments[-1].seconds / oracle, ratio)


Key = tuple[str, str, int, int]  # task, tuner, workers, seed


class Kept(dict[Key, Study]):
    """Studies by their key, in a file, one a line, so that a long benchmark can be stopped and taken up again."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        for each in map(json.loads, lines):
            self[tuple(each["of"])] = Study(**each["study"])

    def add(self, key: Key, study: Study) -> None:
        """Keeps one more."""
        self[key] = study
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": key, "study": asdict(study)}) + "\n")


def replayed(kept: Kept, records: dict[str, Record], tuners: Sequence[str], workers: Sequence[int], seeds: int) -> Kept:
    """All studies of these, as far as they are not kept from an earlier start."""
    found = Kept(None)
    for key in itertools.product(range(seeds), records, tuners, workers):
        seed, name, tuner, count = key
        of = name, tuner, count, seed
        if of not in kept:
            kept.add(of, judged(records[name], WORKERS_TUNERS[tuner](records[name], seed, count)))
            print(*of, f"{kept[of].held:.1f}", file=sys.stderr, flush=True)
        found[of] = kept[of]
    return found


def of(found: Kept, tuner: str, workers: int, task: str | None = None) -> list[Study]:
    """The studies of a tuner with so many workers, of one task or of all."""
    return [each for key, each in found.items() if key[1:3] == (tuner, workers) and task in {None, key[0]}]


def held(studies: Sequence[Study], share: float = 0.5) -> float:
    """Oracle runs on the wall until so large a share of these studies held a good answer."""
    return quantile([each.held for each in studies], share)


def table(found: Kept, tuner: str, workers: Sequence[int]) -> str:
    """A tuner over all tasks, by the number of its workers."""
    heads = ["workers", f"within {GOOD}×: median", "p90", "as fast as one worker", "studies that got there"]
    heads += ["runs until then", "runs in all", "the study's end", "last answer: median", "worst"]
    lines = [f"| {' | '.join(heads)} |", "|---:|" + "---:|" * 9]
    one = held(of(found, tuner, ONE)) if ONE in workers else math.nan
    for count in workers:
        studies = of(found, tuner, count)
        there = statistics.mean(float(math.isfinite(each.held)) for each in studies)
        final = [each.final for each in studies]
        cells = [
            str(count),
            shown(held(studies)),
            shown(held(studies, 0.9)),
            times(one, held(studies)),
            f"{there:.0%}",
            shown(quantile([each.runs_held for each in studies], 0.5), 0),
            f"{statistics.median(each.runs for each in studies):.0f}",
            shown(statistics.median(each.wall for each in studies)),
            shown(statistics.median(final), 2),
            shown(max(final), 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def times(one: float, other: float) -> str:
    """How many times as fast, where both have a figure."""
    return f"{one / other:.2f} ×" if math.isfinite(one) and math.isfinite(other) else "–"


def by_task(found: Kept, records: dict[str, Record], workers: Sequence[int]) -> str:
    """batchtune's medians, task by task."""
    lines = [f"| task | {' | '.join(map(str, workers))} |", "|---|" + "---:|" * len(workers)]
    for name in records:
        cells = [shown(held(of(found, OURS, count, name))) for count in workers]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(found: Kept, records: dict[str, Record]) -> list[str]:
    """What was asked for, and what came of it."""
    one, some, many = (of(found, OURS, count) for count in (ONE, SOME, MANY))
    if not (one and some):
        return []

    def verdict(text: str, *, met: bool) -> str:
        return f"- {text}: {'met' if met else 'MISSED'}"

    ratio, late = (held(one, share) / held(some, share) for share in (0.5, 0.9))
    lines = [
        verdict(
            f"{SOME} workers at least {WANTED_SPEEDUP:g} times as fast as one, in the median of all: {ratio:.2f} "
            f"({held(one):.1f} → {held(some):.1f} oracle runs); in the ninth decile: {late:.2f} "
            f"({held(one, 0.9):.1f} → {held(some, 0.9):.1f})",
            met=ratio >= WANTED_SPEEDUP,
        )
    ]
    if many:
        slower = [
            f"{name} ({held(before):.1f} → {held(after):.1f})"
            for name in records
            if held(after := of(found, OURS, MANY, name)) > held(before := of(found, OURS, SOME, name))
        ]
        told = f"{held(some):.1f} → {held(many):.1f}; tasks where it was: {', '.join(slower) or 'none'}"
        met = not slower and held(many) <= held(some)
        lines.append(verdict(f"{MANY} workers never slower than {SOME}, in the median: {told}", met=met))
    return lines


def report(found: Kept, records: dict[str, Record], tuners: Sequence[str], workers: Sequence[int], command: str) -> str:
    """The report in markdown."""
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "optuna", "numpy"))
    ray = f", ray {version('ray')}" if importlib.util.find_spec("ray") else ", no ray"
    seeds = len(found) // len(records) // len(tuners) // len(workers)
    about = (
        "Times are in runs of the oracle, the best point of the recorded grid, so that nothing can take less than 1. "
        f"Medians are over {len(records)} tasks with {seeds} seeds each. "
        f"The other tuners start no trial after {HORIZON} oracle runs on the wall, nor more than {MOST_TRIALS}."
    )
    parts = [
        "# Many workers on recorded learning curves",
        f"{dt.datetime.now(dt.UTC).date()}, Python {platform.python_version()}, {versions}{ray}. Command: `{command}`",
        __doc__.split("\n\n")[2].replace("\n", " "),
        about,
        *goals(found, records),
    ]
    for tuner in tuners:
        parts += [f"## {tuner}", table(found, tuner, workers)]
    if OURS in tuners:
        parts += ["## batchtune, task by task: median until held", by_task(found, records, workers)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Replays, prints the report and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help="of " + ", ".join(TASKS))
    parser.add_argument("--tuners", nargs="+", default=list(WORKERS_TUNERS), metavar="NAME", help="beginnings of names")
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS), metavar="N")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kept", type=Path, metavar="FILE", help="studies already made, and where to add more")
    parser.add_argument("-o", "--output", type=Path, help=f"default with all tasks and tuners: {RESULT.name}")
    given = parser.parse_args()
    tuners = [name for name in WORKERS_TUNERS if any(map(name.startswith, given.tuners))]
    if importlib.util.find_spec("ray") is None:
        tuners = [name for name in tuners if "Ray" not in name]
    records = {name: Record(name) for name in given.tasks}
    found = replayed(Kept(given.kept), records, tuners, given.workers, given.seeds)
    command = " ".join(["python tests/benchmarks/workers_simulated.py", *sys.argv[1:]])
    text = report(found, records, tuners, given.workers, command)
    print(text)
    complete = (given.tasks, tuple(given.workers)) == (list(TASKS), WORKERS) and len(tuners) >= len(WORKERS_TUNERS) - 1
    if output := given.output or (RESULT if complete else None):
        output.write_text(f"{text}\n{notes(output)}", encoding="utf-8")


if __name__ == "__main__":
    main()

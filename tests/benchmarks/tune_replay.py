"""The tuners on recorded learning curves: training seconds until a good configuration is held.

    python tests/benchmarks/tune_replay.py                       # all tasks, all tuners, 20 seeds
    python tests/benchmarks/tune_replay.py digits_sgd --tuners batchtune --seeds 5 --trials
    python tests/benchmarks/tune_replay.py --kept runs.jsonl     # goes on where an earlier start with this file ended

batchtune's study, sampler, pruner, caps, stop rule and confirmation are the real ones; only the child process is
replaced by the record (replay_curves.py) and the clock by one that training alone moves. The other tuners search the
same space, run the baseline first as batchtune does, and end a run at the same longest time. None of the tasks was used
to choose a constant of batchtune. Ray's tuner needs `pip install "ray[tune]"`; without it, it is left out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import math
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path

from replay_curves import Record
from replay_tasks import TASKS
from replay_tuners import DEFAULTS, HALVING, OURS, TUNERS, Configuration, Story, baseline_of

RESULT = Path(__file__).parent / "results" / "tune_replay.md"
GOOD, VERY_GOOD = 1.25, 1.10  # of the oracle's time to target
BY_HAND = "<!-- written by hand from here on -->"
BUDGET, HORIZON = (
    60,
    240,
)  # oracle runs: at the first success is judged, at the second who has no end is stopped


@dataclass(frozen=True, slots=True)
class Repetition:
    """One tuner on one task with one seed; seconds in oracle runs.

    Attributes:
        held: by factor, the cost after which a configuration within it was the answer for good; inf for never.
        at_budget: true time of the answer at BUDGET over the oracle's.
        final: true time of the last answer over the oracle's.
        cost: of everything the tuner trained.
        spent: cost by role and outcome.
    """

    held: dict[float, float]
    at_budget: float
    final: float
    cost: float
    spent: Counter[str]


def judged(record: Record, story: Story) -> Repetition:
    """Compares the answers of a story with the oracle."""
    oracle = record.oracle[0]
    total, spent, at_budget = 0.0, Counter[str](), math.inf
    held = {GOOD: math.inf, VERY_GOOD: math.inf}
    ratio = math.inf
    for run in story:
        total += run.seconds / oracle
        spent[run.what] += run.seconds / oracle
        ratio = true_ratio(record, run.answer)
        if total <= BUDGET:
            at_budget = ratio
        for factor, since in held.items():
            held[factor] = min(since, total) if ratio <= factor else math.inf
    return Repetition(held, at_budget, ratio, total, spent)


class Kept:
    """Repetitions in a file, one a line, so that a long benchmark can be stopped and taken up again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._known = {tuple(each["of"]): each["run"] for each in map(json.loads, lines)}

    def get(self, *of: str | int) -> Repetition | None:
        """The repetition of (task, tuner, seed), if it is there."""
        run = self._known.get(of)
        if run is None:
            return None
        held = {float(factor): cost for factor, cost in run["held"].items()}
        return Repetition(held, run["at_budget"], run["final"], run["cost"], Counter(run["spent"]))

    def add(self, run: Repetition, *of: str | int) -> None:
        """Keeps one more."""
        figures = {field.name: getattr(run, field.name) for field in fields(run)}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": of, "run": figures}) + "\n")


def true_ratio(record: Record, answer: Configuration | None) -> float:
    """The median time to target of a configuration over the oracle's."""
    return math.inf if answer is None else record.true_seconds(*answer) / record.oracle[0]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which at least so large a share lies; inf stays inf."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def shown(value: float, digits: int = 1) -> str:
    """A figure of a table."""
    return "never" if math.isinf(value) else f"{value:.{digits}f}"


def percent(value: float) -> str:
    return "no answer" if math.isinf(value) else f"{value - 1:+.0%}"


def row(name: str, runs: Sequence[Repetition]) -> str:
    """A tuner's line of a table."""
    cells = [name]
    for factor in (GOOD, VERY_GOOD):
        costs = [run.held[factor] for run in runs]
        cells += [shown(quantile(costs, 0.5)), shown(quantile(costs, 0.9))]
        cells.append(f"{statistics.mean(float(run.at_budget <= factor) for run in runs):.0%}")
    final = [run.final for run in runs]
    cells += [percent(quantile(final, 0.5)), percent(quantile(final, 0.9))]
    cells.append(shown(statistics.median(run.cost for run in runs), 0))
    return f"| {' | '.join(cells)} |"


def table(found: dict[str, list[Repetition]]) -> str:
    """All tuners over the same repetitions."""
    within = (f"within {factor:.2f}×: median | p90 | success at {BUDGET}" for factor in (GOOD, VERY_GOOD))
    head = f"| tuner | {' | '.join(within)} | final regret: median | p90 | all it spent |"
    return "\n".join([head, "|---|" + "---:|" * 9, *(row(name, runs) for name, runs in found.items() if runs)])


def account(runs: Sequence[Repetition]) -> str:
    """Where batchtune's seconds went, in oracle runs a study, mean over repetitions."""
    kinds = sorted({kind for run in runs for kind in run.spent})
    means = {kind: statistics.mean(run.spent[kind] for run in runs) for kind in kinds}
    return ", ".join(f"{kind} {mean:.1f}" for kind, mean in means.items())


def about(record: Record) -> str:
    """A task in a line."""
    seconds, batch_size, rate = record.oracle
    base = baseline_of(record)
    ratio = true_ratio(record, (base["batch_size"], base["learning_rate"]))
    grid = [true_ratio(record, (size, float(rate))) for size in record.batch_sizes for rate in record.rates]
    return (
        f"oracle: batch {batch_size}, learning rate {rate:.2g}, {seconds / record.step_seconds(batch_size):.0f} steps; "
        f"baseline: batch {base['batch_size']}, learning rate {base['learning_rate']:g}, {ratio:.1f} oracle runs; "
        f"longest run {record.longest_run_seconds / seconds:.0f} oracle runs; "
        f"{sum(each <= GOOD for each in grid)} of {len(grid)} grid points within {GOOD}×, "
        f"{sum(each <= VERY_GOOD for each in grid)} within {VERY_GOOD:.2f}×"
    )


def goals(every: dict[str, list[Repetition]]) -> str:
    """The issue's goals and whether they are met."""
    median = {name: quantile([run.held[GOOD] for run in runs], 0.5) for name, runs in every.items() if runs}
    ours = median[OURS]
    success = statistics.mean(float(run.at_budget <= GOOD) for run in every[OURS])
    lines = [("at most 8 oracle runs in the median", f"{shown(ours)}", ours <= 8)]
    lines.append(("success at least 95 %", f"{success:.0%}", success >= 0.95))
    if DEFAULTS in median:
        ratio = median[DEFAULTS] / ours
        lines.append(("at least 5 × cheaper than Optuna's defaults", f"{shown(ratio)} ×", ratio >= 5))
    halving = min((median[name] for name in HALVING if name in median), default=math.nan)
    if not math.isnan(halving):
        lines.append(
            ("at least 2 × cheaper than the best halving on time", f"{shown(halving / ours)} ×", halving / ours >= 2)
        )
    return "\n".join(f"- {what}: {figure}: {'met' if met else 'MISSED'}" for what, figure, met in lines)


def notes(result: Path) -> str:
    """What was written by hand below the figures of the last report; it stays."""
    text = result.read_text(encoding="utf-8") if result.exists() else ""
    return text[text.index(BY_HAND) :] if BY_HAND in text else f"{BY_HAND}\n"


def report(found: dict[str, dict[str, list[Repetition]]], records: dict[str, Record], command: str) -> str:
    """The report in markdown."""
    names = dict.fromkeys(name for tuners in found.values() for name in tuners)
    every = {name: [run for tuners in found.values() for run in tuners.get(name, [])] for name in names}
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "optuna", "numpy", "scikit-learn"))
    ray = f", ray {version('ray')}" if importlib.util.find_spec("ray") else ", no ray"
    seeds = max(len(runs) for runs in every.values()) // len(found)
    parts = [
        "# batchtune tune on recorded learning curves",
        f"{dt.datetime.now(dt.UTC).date()}, Python {platform.python_version()}, {versions}{ray}. Command: `{command}`",
        __doc__.split("\n\n")[2].replace("\n", " "),
        "Figures are in runs of the oracle, the best point of the recorded grid by its median over the recorded seeds.",
        "All training seconds count. A configuration is held from when it is the tuner's answer and stays so.",
        f"{seeds} tuner seeds a task.",
    ]
    if OURS in every:
        parts += ["## Goals, all tasks together", goals(every)]
    parts += ["## All tasks", table(every)]
    for name, tuners in found.items():
        parts += [f"## {name}", about(records[name]), table(tuners)]
        if OURS in tuners:
            parts.append(f"Where batchtune's oracle runs went, mean: {account(tuners[OURS])}.")
    return "\n\n".join(parts) + "\n"


def print_trials(record: Record, story: Story) -> None:
    """Every run of a story, for who wants to know why."""
    total = 0.0
    for run in story:
        total += run.seconds / record.oracle[0]
        cost = run.seconds / record.oracle[0]
        true = true_ratio(record, (run.batch_size, run.learning_rate))
        print(
            f"  {run.what:24} batch {run.batch_size:4d} rate {run.learning_rate:9.3g} cost {cost:6.2f} "
            f"total {total:7.2f} true {true:7.2f} answer {true_ratio(record, run.answer):6.2f}"
        )


def main() -> None:
    """Replays, prints the report and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help="of " + ", ".join(TASKS))
    parser.add_argument("--tuners", nargs="+", default=list(TUNERS), metavar="NAME", help="beginnings of names")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", action="store_true", help="print every run")
    parser.add_argument("-o", "--output", type=Path, help=f"default with all tasks and tuners: {RESULT.name}")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="repetitions already made, and where to add more")
    arguments = parser.parse_args()
    kept = Kept(arguments.kept)
    chosen = {name: tuner for name, tuner in TUNERS.items() if any(map(name.startswith, arguments.tuners))}
    if importlib.util.find_spec("ray") is None:
        chosen = {name: tuner for name, tuner in chosen.items() if "Ray" not in name}
    records, found = {name: Record(name) for name in arguments.tasks}, {}
    for name, record in records.items():
        found[name] = {}
        for tuner, story_of in chosen.items():
            found[name][tuner] = []
            for seed in range(arguments.seeds):
                run = kept.get(name, tuner, seed)
                if run is None:
                    story = story_of(record, seed, HORIZON * record.oracle[0])
                    kept.add(run := judged(record, story), name, tuner, seed)
                    if arguments.trials:
                        print(f"{name}, {tuner}, seed {seed}")
                        print_trials(record, story)
                found[name][tuner].append(run)
            print(row(f"{name}: {tuner}", found[name][tuner]), file=sys.stderr, flush=True)
    text = report(found, records, " ".join(["python tests/benchmarks/tune_replay.py", *sys.argv[1:]]))
    print(text)
    complete = arguments.tasks == list(TASKS) and len(chosen) >= len(TUNERS) - 1
    if output := arguments.output or (RESULT if complete else None):
        output.write_text(f"{text}\n{notes(output)}", encoding="utf-8")


if __name__ == "__main__":
    main()

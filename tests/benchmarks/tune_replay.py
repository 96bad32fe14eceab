"""The tuners on recorded learning curves: training seconds until a good configuration is held.

    python tests/benchmarks/tune_replay.py                       # all tasks, all tuners, 20 seeds
    python tests/benchmarks/tune_replay.py digits_sgd --tuners batchtune --seeds 5 --trials
    python tests/benchmarks/tune_replay.py --kept runs.jsonl     # goes on where an earlier start with this file ended
    python tests/benchmarks/tune_replay.py --load 0 1 2 --seeds 10         # beside so many other programs

batchtune's study, sampler, pruner, caps, stop rule and confirmation are the real ones; only the child process is
replaced by the record (replay_curves.py) and the clock by one that training alone moves. Noise scale and range test are
the recorded ones and are paid for. The other tuners search the same space, run the baseline first, as a study does of
which it is a part, and end a run at the same longest time; batchtune runs it after its search, so that figures with the
baseline's run taken off the others' bill are given as well. Which tasks chose a constant is said below the tables.
Ray's tuner needs `pip install "ray[tune]"`; without it, it is left out.

Under load, so many other programs work in bursts of 4 s with pauses of 2 s (in the mean), each of which makes a step
take 0.75 times longer while it does; answers are judged by what they take on a quiet machine.
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
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path

from replay_curves import Record
from replay_tasks import TASKS
from replay_tuners import DEFAULTS, HALVING, OURS, TUNERS, Configuration, Story, Tuner, baseline_of

RESULT = Path(__file__).parent / "results" / "tune_replay.md"
UNDER_LOAD = RESULT.with_name("tune_load.md")
GOAL_IDLE, GOAL_BUSY = (1.25, 0.95), (1.3, 0.9)  # times the quiet grid's best, and in what share of the studies
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


def times(ratio: float) -> str:
    """How many times cheaper, in words where the others have no figure."""
    return "half of the others' runs never get there" if math.isinf(ratio) else f"{ratio:.1f} ×"


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
    cells += [shown(statistics.median(run.cost for run in runs), 0), str(len(runs))]
    return f"| {' | '.join(cells)} |"


def table(found: dict[str, list[Repetition]]) -> str:
    """All tuners over the same repetitions."""
    within = (f"within {factor:.2f}×: median | p90 | success at {BUDGET}" for factor in (GOOD, VERY_GOOD))
    head = f"| tuner | {' | '.join(within)} | final regret: median | p90 | all it spent | seeds |"
    return "\n".join([head, "|---|" + "---:|" * 10, *(row(name, runs) for name, runs in found.items() if runs)])


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


def goals(found: dict[str, dict[str, list[Repetition]]], records: dict[str, Record]) -> str:
    """The issue's goals and whether they are met, against the others as they are and without their baseline's run."""
    names = dict.fromkeys(name for tuners in found.values() for name in tuners)
    costs = {name: held_costs(found, name, {}) for name in names}
    today = {task: true_ratio(record, tuple(baseline_of(record).values())) for task, record in records.items()}
    spared = {name: held_costs(found, name, today) for name in names if name != OURS}
    ours = quantile(costs[OURS], 0.5)
    runs = [run for tuners in found.values() for run in tuners.get(OURS, [])]
    success = statistics.mean(float(run.at_budget <= GOOD) for run in runs)
    lines = [("at most 8 oracle runs in the median", shown(ours), ours <= 8)]
    lines.append((f"success at least 95 % at {BUDGET} oracle runs", f"{success:.0%}", success >= 0.95))
    for given, where in ((costs, ""), (spared, ", their baseline's run taken off")):
        if DEFAULTS in given:
            ratio = quantile(given[DEFAULTS], 0.5) / ours
            lines.append((f"at least 5 × cheaper than Optuna's defaults{where}", times(ratio), ratio >= 5))
        halving = min((quantile(given[name], 0.5) for name in HALVING if name in given), default=math.nan)
        if not math.isnan(halving):
            ratio = halving / ours
            lines.append((f"at least 2 × cheaper than the best halving{where}", times(ratio), ratio >= 2))
    return "\n".join(f"- {what}: {figure}: {'met' if met else 'MISSED'}" for what, figure, met in lines)


def held_costs(found: dict[str, dict[str, list[Repetition]]], name: str, spared: dict[str, float]) -> list[float]:
    """What a tuner's repetitions of all tasks cost until a good configuration was held, less what a task is spared."""
    return [run.held[GOOD] - spared.get(task, 0.0) for task, tuners in found.items() for run in tuners.get(name, [])]


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
    parts = [
        "# batchtune tune on recorded learning curves",
        f"{dt.datetime.now(dt.UTC).date()}, Python {platform.python_version()}, {versions}{ray}. Command: `{command}`",
        __doc__.split("\n\n")[2].replace("\n", " "),
        "Figures are in runs of the oracle, the best point of the recorded grid by its median over the recorded seeds.",
        "All training seconds count. A configuration is held from when it is the tuner's answer and stays so.",
        f"never: not by the end of what the tuner spent; the others are stopped at {HORIZON} oracle runs.",
    ]
    if OURS in every:
        parts += ["## Goals, all tasks together", goals(found, records)]
        for name, tuners in found.items():
            if OURS in tuners:
                parts += [f"### {name} alone", goals({name: tuners}, {name: records[name]})]
    parts += ["## All tasks", table(every)]
    for name, tuners in found.items():
        parts += [f"## {name}", about(records[name]), table(tuners)]
        if OURS in tuners:
            parts.append(f"Where batchtune's oracle runs went, mean: {account(tuners[OURS])}.")
    return "\n\n".join(parts) + "\n"


def load_report(records: dict[str, Record], loads: Sequence[int], seeds: int, command: str) -> str:
    """How good the answers are that were found beside so many other programs; Optuna has the time that a study took."""
    head = "| other programs | tuner | task | within 1.25× | within 1.3× | slower than the baseline | median | worst |"
    lines, verdicts = [head, "|---:|---|---|---:|---:|---:|---:|---:|"], list[str]()
    for programs in loads:
        every: dict[str, list[float]] = {OURS: [], DEFAULTS: []}
        slower = Counter[str]()
        for task, record in records.items():
            today, found = true_ratio(record, tuple(baseline_of(record).values())), defaultdict[str, list[float]](list)
            for seed in range(seeds):
                story = TUNERS[OURS](record, seed, math.inf, programs)
                found[OURS].append(true_ratio(record, story[-1].answer))
                spent = sum(run.seconds for run in story)
                found[DEFAULTS].append(true_ratio(record, TUNERS[DEFAULTS](record, seed, spent, programs)[-1].answer))
            for name, ratios in found.items():
                every[name] += ratios
                slower[name] += sum(each > today for each in ratios)
                lines.append(load_row(programs, name, task, ratios, today))
                print(lines[-1], file=sys.stderr, flush=True)
        factor, wanted = GOAL_BUSY if programs else GOAL_IDLE
        share = statistics.mean(float(each <= factor) for each in every[OURS])
        met = "met" if share >= wanted and not slower[OURS] else "MISSED"
        goal = f"{wanted:.0%} within {factor}×, none slower than the baseline"
        theirs = statistics.mean(float(each <= factor) for each in every[DEFAULTS])
        verdicts.append(
            f"- beside {programs} other programs: {goal}: {share:.0%}, {slower[OURS]} slower: {met} "
            f"(Optuna's defaults: {theirs:.0%}, {slower[DEFAULTS]} slower)"
        )
    title = "# batchtune tune beside other programs, on recorded curves"
    about = __doc__.split("\n\n")[3].strip().replace("\n", " ")
    return "\n".join([title, "", f"Command: `{command}`", "", about, "", *verdicts, "", *lines])


def load_row(programs: int, name: str, task: str, ratios: Sequence[float], today: float) -> str:
    """A line of that table."""
    within = [f"{sum(each <= factor for each in ratios)} of {len(ratios)}" for factor in (GOOD, GOAL_BUSY[0])]
    slower = sum(each > today for each in ratios)
    figures = [*within, str(slower), shown(statistics.median(ratios), 2), shown(max(ratios), 2)]
    return f"| {' | '.join([str(programs), name, task, *figures])} |"


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


def repetitions(
    records: dict[str, Record], chosen: dict[str, Tuner], kept: Kept, arguments: argparse.Namespace
) -> dict[str, dict[str, list[Repetition]]]:
    """Every tuner on every task with every seed, as far as they are not kept from an earlier start."""
    found: dict[str, dict[str, list[Repetition]]] = {}
    for name, record in records.items():
        found[name] = {}
        for tuner, story_of in chosen.items():
            found[name][tuner] = []
            for seed in range(arguments.seeds):
                run = kept.get(name, tuner, seed)
                if run is None and arguments.only_kept:
                    continue
                if run is None:
                    story = story_of(record, seed, HORIZON * record.oracle[0])
                    kept.add(run := judged(record, story), name, tuner, seed)
                    if arguments.trials:
                        print(f"{name}, {tuner}, seed {seed}")
                        print_trials(record, story)
                found[name][tuner].append(run)
            if found[name][tuner]:
                print(row(f"{name}: {tuner}", found[name][tuner]), file=sys.stderr, flush=True)
            else:
                del found[name][tuner]
    return found


def main() -> None:
    """Replays, prints the report and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help="of " + ", ".join(TASKS))
    parser.add_argument("--tuners", nargs="+", default=list(TUNERS), metavar="NAME", help="beginnings of names")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--load", nargs="+", type=int, metavar="N", help="beside so many other programs, each in turn")
    parser.add_argument("--only-kept", action="store_true", help="report what --kept holds and replay nothing")
    parser.add_argument("--trials", action="store_true", help="print every run")
    parser.add_argument("-o", "--output", type=Path, help=f"default with all tasks and tuners: {RESULT.name}")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="repetitions already made, and where to add more")
    arguments = parser.parse_args()
    command = " ".join(["python tests/benchmarks/tune_replay.py", *sys.argv[1:]])
    if arguments.load:
        text = load_report({name: Record(name) for name in arguments.tasks}, arguments.load, arguments.seeds, command)
        print(text)
        if output := arguments.output or (UNDER_LOAD if arguments.tasks == list(TASKS) else None):
            output.write_text(f"{text}\n", encoding="utf-8")
        return
    kept = Kept(arguments.kept)
    chosen = {name: tuner for name, tuner in TUNERS.items() if any(map(name.startswith, arguments.tuners))}
    if importlib.util.find_spec("ray") is None:
        chosen = {name: tuner for name, tuner in chosen.items() if "Ray" not in name}
    records = {name: Record(name) for name in arguments.tasks}
    found = repetitions(records, chosen, kept, arguments)
    text = report(found, records, command)
    print(text)
    complete = arguments.tasks == list(TASKS) and len(chosen) >= len(TUNERS) - 1
    if output := arguments.output or (RESULT if complete else None):
        output.write_text(f"{text}\n{notes(output)}", encoding="utf-8")


if __name__ == "__main__":
    main()

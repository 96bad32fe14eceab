"""What one run of a study asks of PostgreSQL while so many others are under way, and how busy that keeps the server.

    python tests/benchmarks/workers_storage.py                 # starts a server of its own
    python tests/benchmarks/workers_storage.py --others 0 63 --runs 4

One worker makes its runs by the real study, trials, sampler and pruner, its training replayed from a record (charlm),
with a real connection. The study already has six runs that have ended and all the others under way, each with its
parameters, attributes, sign of life and half of its evaluations, so that what is read is what so many workers would
read. The record's times are stretched, so that the best run takes a minute, and the clock is the simulated one. The
server's processor seconds are those of all its processes. So many workers keep it busy, as a share of one processor,
for: workers × (seconds of a run's operations / seconds of a run + seconds of a heartbeat / their interval). The number
of evaluations in a run does not grow with its length: they are spaced out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from replay_curves import Load, Record
from replay_tuners import SEED_STRIDE, OneWorker, ReplayWorker, SimulatedClock, replayed_plan, simulated_time
from tune_replay import notes

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.postgresql import own_server

from batchtune.observer import Observer
from batchtune.tune.optuna_parts import storages as tune_storages
from batchtune.tune.optuna_parts.storages import HEARTBEAT_SECONDS
from batchtune.tune.plan.space import Plan
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import open_storage

RESULT = Path(__file__).parent / "results" / "workers_storage.md"
TASK, SEED, ENDED = "charlm", 0, 6
RUN_SECONDS = (60.0, 600.0)  # of a run, for which the server's load is given
GOAL_WORKERS, GOAL_BUSY = 256, 0.2
HEARTBEATS, SETTLING_SECONDS = 200, 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run asked of the server.

    Attributes:
        statements: of SQL.
        evaluations: of the model.
        median_ms, slow_ms: of a statement, as the client waits: half of them, and 99 of 100, are faster.
        client_seconds: that the client waited in all.
        server_seconds: that the server's processors worked.
        heartbeat_seconds: the same for one sign of life.
    """

    statements: float
    evaluations: float
    median_ms: float
    slow_ms: float
    client_seconds: float
    server_seconds: float
    heartbeat_seconds: float

    def busy(self, workers: int, run_seconds: float) -> float:
        """Share of one processor, while so many workers make runs of so many seconds."""
        return workers * (self.server_seconds / run_seconds + self.heartbeat_seconds / HEARTBEAT_SECONDS)


class Statements:
    """The statements of all connections of this process: how long the client waited for each."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self._engines = set[sqlalchemy.Engine]()
        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", self._began)
        sqlalchemy.event.listen(sqlalchemy.Engine, "after_cursor_execute", self._ended)

    def _began(self, connection: Any, *_: Any) -> None:
        self._engines.add(connection.engine)
        connection.info["began"] = time.perf_counter()

    def _ended(self, connection: Any, *_: Any) -> None:
        self.waited.append(time.perf_counter() - connection.info["began"])

    def close(self) -> None:
        """Closes all connections, and listens no longer."""
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", self._began)
        sqlalchemy.event.remove(sqlalchemy.Engine, "after_cursor_execute", self._ended)
        for engine in self._engines:
            engine.dispose()


class Evaluations(Observer):
    """Counts evaluations."""

    def __init__(self) -> None:
        self.seen = 0

    def trial_evaluated(self, trial: Any, point: Any) -> None:
        self.seen += 1


def processor_seconds(postmaster: int) -> float:
    """What a server's processes have worked, those that have ended included."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        is_first = int(stat.parent.name) == postmaster
        if is_first or int(fields[1]) == postmaster:
            total += sum(map(int, fields[11 : 15 if is_first else 13]))
    return total / TICKS


def fill(storage: BaseStorage, plan: Plan, trials: Sequence[FrozenTrial], others: int) -> None:
    """Puts the runs that have ended and those under way into a study."""
    study = optuna.create_study(study_name=plan.config.name, storage=storage)
    study.add_trials(trials[:ENDED])
    for number in range(others):
        like = trials[number % len(trials)]
        kept = {key: like.user_attrs[key] for key in ("role", "seed", "micro_batch_size", "precision")}
        steps = sorted(like.intermediate_values)[: len(like.intermediate_values) // 2]
        study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=like.params,
                distributions=like.distributions,
                user_attrs=kept,
                intermediate_values={step: like.intermediate_values[step] for step in steps},
            )
        )
    heartbeats: Any = storage
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        heartbeats.record_heartbeat(trial._trial_id)


class Replay:
    """The study that is measured, and what it came to alone, in memory."""

    def __init__(self) -> None:
        record, self.clock = Record(TASK), SimulatedClock()
        longer = RUN_SECONDS[0] / Record(TASK).oracle[0]
        record.alpha_seconds, record.beta_seconds = longer * record.alpha_seconds, longer * record.beta_seconds
        record.evaluation_seconds *= longer
        self.worker = ReplayWorker(record, self.clock, SEED_STRIDE * SEED, Load())
        with simulated_time(self.clock):
            self._plan = replayed_plan(record, SEED, self.worker)
            alone = self.study(self._plan, optuna.storages.InMemoryStorage())
            alone.run()
        self.trials = [each for each in alone.parts.study.trials if each.user_attrs["role"] == "search"]

    def study(self, plan: Plan, storage: BaseStorage, observer: Observer | None = None) -> TuneStudy:
        """The study, kept there."""
        pool: Any = OneWorker(self.worker)
        return TuneStudy(plan, pool, storage, observer or Observer(), self.clock.perf_counter)

    def plan(self, trials: int) -> Plan:
        """Its plan, with room for so many runs."""
        config = self._plan.config
        budget = config.budget.model_copy(update={"trials": trials})
        return replace(self._plan, config=config.model_copy(update={"budget": budget}))


def cost_of_a_run(replay: Replay, url: str, postmaster: int, others: int, runs: int, waited: list[float]) -> Cost:
    """What a run asks of the server beside so many others; the mean over some."""
    storage: Any = open_storage(url, Path())
    with simulated_time(replay.clock, tune_storages):
        plan = replay.plan(others + ENDED + runs + 1)
        fill(storage, plan, replay.trials, others)
        seen = Evaluations()
        study = replay.study(plan, storage, seen)
        study.parts.study.get_trials(deepcopy=False)
        replay.clock.sleep(SETTLING_SECONDS)  # until the others' runs are none that have just begun
        waited.clear()
        before = processor_seconds(postmaster)
        for _ in range(runs):
            study.parts.machines.take_over()
            study.belief.learn()
            assert study.trials.run_next(replay.worker, study.search.is_wanted)
        worked, each = processor_seconds(postmaster) - before, sorted(waited)
    return Cost(
        statements=len(each) / runs,
        evaluations=seen.seen / runs,
        median_ms=1000 * statistics.median(each),
        slow_ms=1000 * each[int(0.99 * len(each))],
        client_seconds=sum(each) / runs,
        server_seconds=worked / runs,
        heartbeat_seconds=cost_of_heartbeats(storage, study, postmaster),
    )


def cost_of_heartbeats(storage: Any, study: TuneStudy, postmaster: int) -> float:
    """What one sign of life costs the server."""
    before = processor_seconds(postmaster)
    trial = study.parts.study.get_trials(deepcopy=False)[-1]
    for _ in range(HEARTBEATS):
        storage.record_heartbeat(trial._trial_id)
    return (processor_seconds(postmaster) - before) / HEARTBEATS


def table(costs: dict[int, Cost]) -> str:
    """The costs, by the number of workers."""
    heads = ["workers", "statements a run", "evaluations", "median ms", "99 % below", "client waits, s a run"]
    heads += ["server works, s a run", "a heartbeat, ms", *(f"busy at runs of {each:.0f} s" for each in RUN_SECONDS)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for workers, cost in costs.items():
        cells = [f"{workers}", f"{cost.statements:.0f}", f"{cost.evaluations:.0f}", f"{cost.median_ms:.2f}"]
        cells += [f"{cost.slow_ms:.2f}", f"{cost.client_seconds:.2f}", f"{cost.server_seconds:.3f}"]
        cells += [f"{1000 * cost.heartbeat_seconds:.2f}", *(f"{cost.busy(workers, each):.1%}" for each in RUN_SECONDS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@contextmanager
def silence() -> Iterator[None]:
    """Optuna says of heartbeats that they are experimental."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Measures, prints the table and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", nargs="+", type=int, default=[0, 1, 7, 63, 255], metavar="N", help="under way")
    parser.add_argument("--runs", type=int, default=8, help="that are measured beside each number of others")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    given = parser.parse_args()
    costs, statements = dict[int, Cost](), Statements()
    with own_server() as server, closing(statements), silence():
        replay = Replay()
        for others in given.others:
            url = server.new_database(f"beside_{others}")
            costs[others + 1] = cost_of_a_run(replay, url, server.pid, others, given.runs, statements.waited)
            print(others + 1, costs[others + 1], file=sys.stderr, flush=True)
    versions = ", ".join(f"{package} {version(package)}" for package in ("optuna", "sqlalchemy", "psycopg"))
    command = " ".join(["python tests/benchmarks/workers_storage.py", *sys.argv[1:]])
    made = f"{dt.datetime.now(dt.UTC).date()}, Python {platform.python_version()}, {versions}, fsync off"
    parts = [
        "# What a study asks of PostgreSQL",
        f"{made}. Command: `{command}`",
        __doc__.split("\n\n")[2].replace("\n", " ").strip(),
        table(costs),
    ]
    if GOAL_WORKERS in costs:
        for seconds in RUN_SECONDS:
            busy = costs[GOAL_WORKERS].busy(GOAL_WORKERS, seconds)
            told = f"at most {GOAL_BUSY:.0%} busy with {GOAL_WORKERS} workers, runs of {seconds:.0f} s: {busy:.1%}"
            parts.append(f"- {told}: {'met' if busy <= GOAL_BUSY else 'MISSED'}")
    text = "\n\n".join(parts) + "\n"
    print(text)
    given.output.write_text(f"{text}\n{notes(given.output)}", encoding="utf-8")


if __name__ == "__main__":
    main()

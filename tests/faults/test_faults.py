"""A hostile week: whatever befalls `probe` and `tune`, starting again finishes, and nothing is lost, doubled or left.

Faults come in chains: a command is struck up to `BLOWS` times in one folder, each time at a random moment and started
again after it, and is then left alone and has to finish. `pytest -m long tests/faults` injects more than a hundred into
each command and writes tests/benchmarks/results/faults.md; a few chains run with the other tests.
"""

import datetime as dt
import platform
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults.kinds import KINDS, ONLY_TUNE, TooLate
from faults.scene import COMMANDS, PATIENCE_SECONDS, Kept, Scene, problems_after_a_blow, problems_at_the_end

from batchtune import __version__

BLOWS = 3  # in one folder before the command is left alone
FAULTS = 105  # into each command, in the long form
AT_ONCE = 6
TABLE = Path(__file__).parents[1] / "benchmarks" / "results" / "faults.md"


@dataclass
class Week:
    """What was injected so far, by command and kind, and what went wrong."""

    injected: Counter = field(default_factory=Counter)
    failed: Counter = field(default_factory=Counter)
    finished: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def count(self, command: str, kind: str, chain: int, found: list[str]) -> None:
        with self.lock:
            self.injected[command, kind] += 1
            self.failed[command, kind] += bool(found)
            self.problems += [f"{command}, chain {chain}, {kind}: {problem}" for problem in found]

    def table(self) -> str:
        rows = []
        for kind in [*KINDS, None]:
            cells = [kind or "all"]
            for command in COMMANDS:
                injected, failed = (
                    sum(n for (c, k), n in counted.items() if c == command and kind in {None, k})
                    for counted in (self.injected, self.failed)
                )
                cells += [str(injected), str(injected - failed)] if injected else ["–", "–"]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(rows)


def run_chain(week: Week, command: str, chain: int, new_cli: Any, kinds: list[str]) -> None:
    """Strikes one command in one folder with these kinds, one after another, and lets it finish in the end."""
    dice = Random(f"{command} {chain}")
    scene = Scene(new_cli(), dice.choice(COMMANDS[command]), dice)
    struck = ""
    for kind in kinds:
        before = Kept.of(scene)
        with KINDS[kind].around(scene) as environment:
            scene.running = scene.start(environment)
            scene.wait_for_the_moment()
            found: list[str] = []
            try:
                if scene.has_ended():
                    raise TooLate
                allowed = KINDS[kind].strike(scene)
            except TooLate:
                allowed = None
            except AssertionError as error:
                allowed, found = {0, 2, 3, 4, 130}, [str(error)]
            done = scene.running.finish(3 * PATIENCE_SECONDS)
        if allowed is not None:
            struck = kind
            found += problems_after_a_blow(scene, done.code, allowed, done.err)
        if done.code == 0:
            found += problems_at_the_end(scene, before, done)
        if allowed is not None or found:
            week.count(command, kind, chain, found)
        if done.code == 0:
            break
    before = Kept.of(scene)
    scene.running = scene.start({})
    done = scene.running.finish(3 * PATIENCE_SECONDS)
    found = problems_after_a_blow(scene, done.code, {0}, done.err)
    found += problems_at_the_end(scene, before, done) if done.code == 0 else []
    with week.lock:
        week.finished[command] += not found
        week.failed[command, struck] += bool(found)
        week.problems += [f"{command}, chain {chain}, after {kinds}: {problem}" for problem in found]
    shutil.rmtree(scene.cli.folder.parent)


def hand_out(command: str, number: int) -> list[list[str]]:
    """So many faults of all kinds that can be injected here, each as often as any other, in chains."""
    kinds = [name for name, kind in KINDS.items() if not kind.missing() and (command == "tune" or name not in ONLY_TUNE)]
    dice = Random(f"order of {command}")
    order: list[str] = []
    while len(order) < number:
        order += dice.sample(kinds, len(kinds))
    return [order[first : first + BLOWS] for first in range(0, number, BLOWS)]


def test_whatever_befalls_a_run_starting_it_again_finishes(new_cli):
    week = Week()
    with ThreadPoolExecutor(2) as pool:
        chains = [
            pool.submit(run_chain, week, command, number, new_cli, kinds)
            for command in COMMANDS
            for number, kinds in enumerate(hand_out(command, 2 * BLOWS))
        ]
        for chain in chains:
            chain.result()
    assert not week.problems, "\n".join(week.problems)
    assert sum(week.injected.values()) >= BLOWS


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_hostile_week(new_cli, monkeypatch):
    week, command_line = Week(), "pytest -m long tests/faults"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for command in COMMANDS:
            chain = 0
            while (left := FAULTS - sum(n for (c, _), n in week.injected.items() if c == command)) > 0:
                work = []
                for kinds in hand_out(command, left):
                    work.append(pool.submit(run_chain, week, command, chain, new_cli, kinds))
                    chain += 1
                for each in work:
                    each.result()
                    write(week, command_line)
    assert not week.problems, "\n".join(week.problems)


def write(week: Week, command_line: str) -> None:
    """The table of faults injected and survived; what cannot be injected here is said."""
    today, commands = dt.datetime.now(tz=dt.UTC).date(), [*COMMANDS]
    missing = [f"{name}: {kind.missing()}" for name, kind in KINDS.items() if kind.missing()]
    with week.lock:
        text = "\n".join(
            [
                "# Faults injected and survived",
                "",
                f"{today} · batchtune {__version__} · Python {platform.python_version()} · `{command_line}`",
                "",
                "Survived: the exit code is the documented one, no process is left, every JSON file is whole; and the",
                "same command started again finishes with no trial or attempt lost, changed or run twice and no file",
                f"left over ({', '.join(f'{week.finished[command]} such ends of {command}' for command in commands)}).",
                "",
                "| fault | " + " | ".join(f"{command}: injected | survived" for command in commands) + " |",
                "|---|" + "---:|---:|" * len(commands),
                week.table(),
                *([""] + [f"Not injected: {line}" for line in missing] if missing else []),
                *(["", "## Not survived", ""] + [f"- {line}" for line in week.problems] if week.problems else []),
            ]
        )
    TABLE.write_text(text + "\n")

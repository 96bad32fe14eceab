"""A hostile week: whatever befalls `probe` and `tune`, starting again finishes, and nothing is lost, doubled or left.

Faults come in chains: a command is struck up to three times in one folder, each time at a random moment and started
again after it, and is then left alone and has to finish. `pytest -m long tests/system/test_faults.py` injects more
than a hundred into each command and writes tests/benchmarks/results/faults.md; with `-k starting` it injects a dozen
in two minutes.
"""

import datetime as dt
import platform
import shutil
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults.kinds import KINDS, ONLY_TUNE, TooLate
from faults.scene import COMMANDS, Kept, Scene, problems_after_a_blow, problems_at_the_end

from batchtune import __version__

BLOWS = 3  # in one folder before the command is left alone
FAULTS = 105  # into each command, in the long form
SAMPLE = 6  # into each command, in the short form
AT_ONCE = 8
END_SECONDS = 3600.0  # for whatever a command still has to do; the machine may be busy
TABLE = Path(__file__).parents[1] / "benchmarks" / "results" / "faults.md"


@dataclass
class Blow:
    """A fault that was injected, and what was wrong afterwards: at once, or in the end of its chain."""

    command: str
    chain: int
    kind: str
    problems: list[str] = field(default_factory=list)


class Chain:
    """One folder in which a command is struck again and again, and then has to finish."""

    def __init__(self, command: str, number: int, kinds: list[str], cli: Any) -> None:
        self._command, self._number, self._kinds = command, number, kinds
        dice = Random(f"{command} {number}")
        self._scene = Scene(cli, dice.choice(COMMANDS[command]), dice)

    def run(self) -> list[Blow]:
        """Strikes until the command has come to its end in spite of it; returns the faults that came in time."""
        blows = [Blow(self._command, self._number, "none yet")]
        for kind in self._kinds:
            before = Kept.of(self._scene)
            with KINDS[kind].around(self._scene) as environment:
                allowed, problems = self._strike(kind, environment)
                done = self._scene.running.finish(END_SECONDS)
            if allowed is not None:
                blows.append(Blow(self._command, self._number, kind))
            blows[-1].problems += problems + self._problems(done, before, allowed or {0})
            if done.code == 0:
                break
        before, done = Kept.of(self._scene), self._scene.start({}).finish(END_SECONDS)
        blows[-1].problems += self._problems(done, before, {0})
        shutil.rmtree(self._scene.cli.folder.parent)
        return blows if blows[0].problems else blows[1:]

    def _strike(self, kind: str, environment: dict[str, str]) -> tuple[set[int] | None, list[str]]:
        """The exit codes with which the command may now end, None where it had ended; and what went wrong at once."""
        self._scene.running = self._scene.start(environment)
        self._scene.wait_for_the_moment()
        try:
            return (None if self._scene.has_ended() else KINDS[kind].strike(self._scene)), []
        except TooLate:
            return None, []
        except AssertionError as error:
            return {-2, -15, 0, 2, 130}, [str(error)]

    def _problems(self, done: Any, before: Kept, allowed: set[int]) -> list[str]:
        found = problems_after_a_blow(self._scene, done.code, allowed, done.err)
        return found + (problems_at_the_end(self._scene, before, done) if done.code == 0 else [])


def hand_out(command: str, number: int, seed: int = 0) -> list[list[str]]:
    """So many faults of all kinds that can be injected here, each as often as any other, in chains."""
    possible = [name for name, kind in KINDS.items() if not kind.missing()]
    kinds = [name for name in possible if command == "tune" or name not in ONLY_TUNE]
    dice, order = Random(f"{command} {seed}"), []
    while len(order) < number:
        order += dice.sample(kinds, len(kinds))
    return [order[first : min(first + BLOWS, number)] for first in range(0, number, BLOWS)]


def strike(new_cli: Any, wanted: dict[str, int], at_once: int, blows: list[Blow]) -> None:
    """Injects so many faults into each command, or a few more; `blows` grows with every chain that has ended."""
    chain = 0
    with ThreadPoolExecutor(at_once) as pool:
        while left := {command: number for command, number in missing(wanted, blows).items() if number > 0}:
            work = [(command, kinds) for command, number in left.items() for kinds in hand_out(command, number, chain)]
            Random(chain).shuffle(work)
            chains = [
                pool.submit(Chain(command, chain + number, kinds, new_cli()).run)
                for number, (command, kinds) in enumerate(work)
            ]
            chain += len(work)
            for ended in as_completed(chains):
                if error := ended.exception():
                    traceback.print_exception(error)
                    pool.shutdown(wait=False, cancel_futures=True)
                blows += ended.result()
                if at_once == AT_ONCE:
                    TABLE.write_text(report(blows))


def missing(wanted: dict[str, int], blows: list[Blow]) -> dict[str, int]:
    """How many faults each command has yet to suffer."""
    return {command: number - sum(blow.command == command for blow in blows) for command, number in wanted.items()}


def report(blows: list[Blow]) -> str:
    """The table of faults injected and survived; what cannot be injected here, and what was not survived, is said."""
    injected = Counter((blow.command, kind) for blow in blows for kind in (blow.kind, "**all**"))
    survived = Counter((blow.command, kind) for blow in blows if not blow.problems for kind in (blow.kind, "**all**"))
    rows = [
        [kind, *(str(counted[command, kind]) for command in COMMANDS for counted in (injected, survived))]
        for kind in [*KINDS, "**all**"]
    ]
    chains = len({(blow.command, blow.chain) for blow in blows})
    notes = [f"Not injected: {name}: {kind.missing()}" for name, kind in KINDS.items() if kind.missing()]
    notes += [f"{blow.command}, chain {blow.chain}, {blow.kind}: {each}" for blow in blows for each in blow.problems]
    facts = f"{dt.datetime.now(tz=dt.UTC).date()} · batchtune {__version__} · Python {platform.python_version()}"
    lines = [
        "# Faults injected and survived",
        "",
        f"{facts} · `pytest -m long tests/system/test_faults.py`",
        "",
        f"Injected at random moments, seeds fixed, up to {BLOWS} into one folder; then the same command ran to its end",
        f"({chains} times). Survived: the exit code is the documented one, no process is left, every JSON file is",
        "whole; started again the command finishes, no ended trial or attempt is lost, changed or run twice, and no",
        "other file is there than after an undisturbed run.",
        "",
        "| fault | " + " | ".join(f"{command}: injected | survived" for command in COMMANDS) + " |",
        "|---|" + "---:|---:|" * len(COMMANDS),
        *(f"| {' | '.join(row)} |" for row in rows),
        *([""] + [f"- {note}" for note in notes] if notes else []),
    ]
    return "\n".join(lines) + "\n"


def problems(blows: list[Blow]) -> str:
    return "\n".join(f"{blow.command} {blow.chain}, {blow.kind}: {each}" for blow in blows for each in blow.problems)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whatever_befalls_a_run_starting_it_again_finishes(new_cli):
    blows: list[Blow] = []
    strike(new_cli, dict.fromkeys(COMMANDS, SAMPLE), 2, blows)
    assert len(blows) >= SAMPLE * len(COMMANDS)
    assert not problems(blows), problems(blows)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_hostile_week(new_cli):
    blows: list[Blow] = []
    strike(new_cli, dict.fromkeys(COMMANDS, FAULTS), AT_ONCE, blows)
    assert not problems(blows), problems(blows)

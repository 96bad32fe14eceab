"""One command under attack: how it is started, when the blow falls, who belongs to it, and what it leaves on disk."""

import contextlib
import json
import queue
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import optuna
import psutil
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

PATIENCE_SECONDS = 120.0  # for a process to say something; the machine may be busy
_MARK = "BATCHTUNE_TESTS_SCENE"
_ENDS = {TrialState.COMPLETE, TrialState.PRUNED}

CONFIG = """\
task: linear.py
baseline: {batch_size: 8, learning_rate: 1e-2}
batch_size: {max: 8, multiple_of: 4}
learning_rate: {min: 1e-3, max: 1.0}
budget: {run: 100ms, total: 10m, trials: 3}
confirm: {seeds: 1, top: 1}
"""


@dataclass(frozen=True)
class Command:
    """What is attacked, where it keeps its files, which these are in the end, and how much it says on the way."""

    arguments: tuple[str, ...]
    run: str
    files: frozenset[str]
    lines: int


_PROBE_FILES = frozenset({"attempts.jsonl", "lock", "report.html", "result.json"})
_PROBE = ("probe", "linear.py", "--max", "4", "--json", "-v")
COMMANDS = {
    "probe": (
        Command((*_PROBE, "--no-throughput"), "probe-linear", _PROBE_FILES, 9),
        Command((*_PROBE, "--memory-limit", "400MiB"), "probe-linear", _PROBE_FILES, 14),  # an estimate runs beside it
    ),
    "tune": (
        Command(
            ("tune", "config.yaml", "--json", "-v"),
            "config",
            _PROBE_FILES | {"config.yaml", "identity.json", "study.log"},
            26,
        ),
    ),
}


@dataclass
class Scene:
    """A folder of its own in which a command is started again and again.

    Attributes:
        cli: the command line in that folder, of tests/conftest.py.
        dice: decides on everything that is left to chance.
        running: the command as it was started last.
    """

    cli: Any
    command: Command
    dice: Random
    running: Any = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.cli.write("config.yaml", CONFIG)
        self.temporary = self.cli.folder.parent / f"tmp-{self.mark}"
        self.temporary.mkdir()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.cli.run_folder(self.command.run)

    def start(self, environment: dict[str, str]) -> Any:
        """Starts the command; whoever belongs to it can be told by a mark in its environment."""
        marked = {_MARK: self.mark, "TMPDIR": str(self.temporary)} | environment
        return self.cli.start(*self.command.arguments, environment=marked)

    def wait_for_the_moment(self) -> None:
        """Lets the running command say a random number of lines, and goes on a moment later."""
        with contextlib.suppress(AssertionError, queue.Empty):  # it ended, or says nothing for long
            for _ in range(self.dice.randrange(self.command.lines)):
                self.running.wait_for("", PATIENCE_SECONDS)
        time.sleep(self.dice.uniform(0, 1))

    def has_ended(self) -> bool:
        return self.running.process.poll() is not None

    def has_its_result(self) -> bool:
        """Whether the command has saved a complete result, which is the last that it does."""
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads((self.folder / "result.json").read_text())["status"] == "complete")
        return False

    def everybody(self) -> list[psutil.Process]:
        """All living processes that the command started, itself included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self.mark:
                    found.append(process)
        return found

    def is_deserted(self, seconds: float = 60) -> bool:
        """Whether everybody ends by themselves; who does not is ended here."""
        deadline = time.monotonic() + seconds
        while left := self.everybody():
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
                return False
            time.sleep(0.3)
        return True


@dataclass(frozen=True)
class Kept:
    """What a run folder holds: ended trials by number, attempts, and the resolved configuration."""

    trials: dict[int, FrozenTrial]
    attempts: list[str]
    config: str | None

    @classmethod
    def of(cls, scene: Scene) -> "Kept":
        config = scene.folder / "config.yaml"
        return cls(
            _ended_trials(scene.folder / "study.log"),
            whole_lines(scene.folder / "attempts.jsonl"),
            config.read_text() if config.exists() else None,
        )


def whole_lines(file: Path) -> list[str]:
    """The lines of a file of JSON lines, up to the first that is none."""
    found = []
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
        try:
            text = line.decode()
            if not line.endswith(b"\n") or not isinstance(json.loads(text), dict):
                break
        except ValueError:
            break
        found.append(text)
    return found


def trials_in(storage: BaseStorage) -> list[FrozenTrial]:
    """Those of all studies; there is none where the study was not made yet."""
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    return [trial for study in studies for trial in study.trials]


def _ended_trials(journal: Path) -> dict[int, FrozenTrial]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "study.log")
        copy.write_text("".join(whole_lines(journal)))
        storage = JournalStorage(JournalFileBackend(str(copy)))
        trials = trials_in(storage)
    return {trial.number: trial for trial in trials if trial.state in _ENDS}


def problems_after_a_blow(scene: Scene, code: int, allowed: set[int], errors: str) -> list[str]:
    """What is wrong once a command that was struck has ended."""
    found = [] if code in allowed else [f"ended with {code}, not one of {sorted(allowed)}: {errors[-600:]}"]
    python_was_starting = "_get_module_details" in errors  # nothing of ours can have an opinion yet
    if ("Traceback" in errors or "this is a bug" in errors) and not python_was_starting:
        found.append(f"shows its insides: {errors[-1500:]}")
    if not scene.is_deserted():
        found.append("left a process behind")
    for file in scene.folder.glob("*.json"):
        try:
            json.loads(file.read_text())
        except ValueError as error:
            found.append(f"{file.name} is not whole: {error}")
    return found


def problems_at_the_end(scene: Scene, before: Kept, done: Any) -> list[str]:
    """What is wrong once the command has run to its end; `before` is what it found."""
    after, found = Kept.of(scene), []
    try:
        document = json.loads(done.out)
    except ValueError:
        return [f"printed no document: {done.out[:200]!r}"]
    if document["status"] != "complete" or document != json.loads((scene.folder / "result.json").read_text()):
        found.append(f"printed a {document['status']} document, or another than result.json")
    names = {path.name for path in scene.folder.iterdir()}
    optional = {"report.html"} if "report.html was not written" in done.err else set()  # as was said: no room
    if (names ^ scene.command.files) - optional:
        found.append(f"left in the run folder: {sorted(names ^ scene.command.files)}")
    left = [path for path in scene.temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    if left:
        found.append(f"left in the temporary folder: {[path.name for path in left]}")
    report = scene.folder / "report.html"
    if report.exists() and not report.read_text().rstrip().endswith("</html>"):
        found.append("report.html is cut off")
    for name in ("attempts.jsonl", "study.log"):
        file = scene.folder / name
        if file.exists() and "".join(whole_lines(file)).encode() != file.read_bytes():
            found.append(f"{name} has a line that is not whole")
    return found + (_lost_or_doubled(before, after, document) if "study.log" in scene.command.files else [])


def _lost_or_doubled(before: Kept, after: Kept, document: dict[str, Any]) -> list[str]:
    found = []
    for number, trial in before.trials.items():
        if number not in after.trials or after.trials[number] != trial:
            found.append(f"trial {number} was lost or changed: {trial} -> {after.trials.get(number)}")
    runs = [_identity(trial) for trial in after.trials.values()]
    found += [f"run twice: {run}" for run in {run for run in runs if runs.count(run) > 1}]
    shown = {trial["number"] for trial in document["trials"] if trial["state"] in {"complete", "pruned"}}
    if shown != set(after.trials):
        found.append(f"the document shows trials {sorted(shown)}, the journal holds {sorted(after.trials)}")
    if after.attempts[: len(before.attempts)] != before.attempts:
        found.append("attempts were lost or changed")
    if before.config is not None and after.config != before.config:
        found.append("config.yaml changed")
    return found


def _identity(trial: FrozenTrial) -> tuple[Any, ...]:
    """The same configuration with the same seed in the same role is the same run."""
    about = trial.user_attrs
    return about["role"], about["seed"], *sorted(trial.params.items())

"""What the tests of the command line share: a tiny task, the real command in a real process, and one finished run."""

import fcntl
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from finished import Finished, Tuned
from typer.testing import CliRunner

from batchtune.cli import app

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait spinning slow those of other processes tenfold

LINEAR = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build_model():
    return nn.Linear(8, 1)

def _points(count, seed):
    points = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points @ torch.arange(1.0, 9.0)[:, None])

def train_dataset():
    return _points(256, 1)

def val_dataset():
    return _points(64, 2)

def compute_loss(model, batch):
    points, values = batch
    return nn.functional.mse_loss(model(points), values)
"""

CONFIG = """\
task: linear.py
baseline: {batch_size: 16, learning_rate: 1e-2}
batch_size: {max: 16, multiple_of: 8}
learning_rate: {min: 1e-3, max: 1.0}
budget: {run: 300ms, total: 5m, trials: 4}
confirm: {seeds: 2, top: 1}
"""


def pytest_collection_modifyitems(config, items):
    """Tests that take minutes run only where they are asked for; files with the longest timeout begin.

    With `--dist loadfile --no-loadscope-reorder` no worker is then left with one of them at the end.
    """
    by_hand = [mark for mark in ("long", "real") if mark not in config.getoption("-m")]
    left_out = [item for item in items if any(mark in item.keywords for mark in by_hand)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    longest = defaultdict(float)
    for item in items:
        timeouts = [mark.args[0] for mark in item.iter_markers("timeout")]
        longest[item.path] = max(longest[item.path], *timeouts, 0)
    items.sort(key=lambda item: -longest[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: none of the many garbage collections of a search goes through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class Running:
    """A command at work; its standard error can be waited for, line by line."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.err = process, ""
        self._started, self._lines = time.perf_counter(), queue.Queue()
        self._out = ""
        readers = [(process.stderr, self._read_err), (process.stdout, self._read_out)]
        self._threads = [threading.Thread(target=reader) for stream, reader in readers if stream is not None]
        for thread in self._threads:
            thread.start()

    def _read_err(self) -> None:
        for line in self.process.stderr:
            self.err += line
            self._lines.put(line)
        self._lines.put(None)

    def _read_out(self) -> None:
        self._out = self.process.stdout.read()

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """The next line of standard error that has `text` in it."""
        while (line := self._lines.get(timeout=seconds)) is not None:
            if text in line:
                return line
        raise AssertionError(f"ended before {text!r}: {self.err}")

    def family(self) -> list[psutil.Process]:
        """The process and everything below it."""
        leader = psutil.Process(self.process.pid)
        return [leader, *leader.children(recursive=True)]

    def finish(self, seconds: float = 60) -> Finished:
        code = self.process.wait(timeout=seconds)
        for thread in self._threads:
            thread.join(timeout=10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return Finished(code, self._out, self.err, time.perf_counter() - self._started)


class Cli:
    """`python -m batchtune …` in a folder that has `linear.py` and `config.yaml`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "linear.py").write_text(LINEAR)
        (folder / "config.yaml").write_text(CONFIG)

    def __call__(self, *arguments: object, **options: object) -> Finished:
        return self.start(*arguments, **options).finish(120)

    def start(
        self,
        *arguments: object,
        python: tuple[str, ...] = ("-m", "batchtune"),
        popen: type[subprocess.Popen] = subprocess.Popen,
        **options: object,
    ) -> Running:
        """The command at work. Options are those of Popen; `environment` is laid over ours."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("BATCHTUNE_")}
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
            ours.pop(name, None)
        ours |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | options.pop("environment", {})
        process = popen(
            [sys.executable, *python, *map(str, arguments)],
            cwd=self.folder,
            env=ours,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )
        return Running(process)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def result(self, run: str = "config") -> dict:
        """The document in a run folder."""
        return json.loads((self.run_folder(run) / "result.json").read_text())

    def run_folder(self, run: str = "config") -> Path:
        return self.folder / ".batchtune" / run


def gone(processes: list[psutil.Process], seconds: float = 60) -> bool:
    """Whether all of these end by themselves; those that do not are ended here."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    for process in left:
        process.kill()
    return not left


@pytest.fixture
def all_gone():
    return gone


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    folder = tmp_path / "config"  # the run takes its name from here
    folder.mkdir()
    return Cli(folder)


@pytest.fixture(scope="session")
def new_cli(tmp_path_factory: pytest.TempPathFactory):
    """A function that makes a folder and its command line, for fixtures of wider scope."""

    def make() -> Cli:
        folder = tmp_path_factory.mktemp("work") / "config"
        folder.mkdir()
        return Cli(folder)

    return make


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two commands at a time: most of what they do is start."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="session")
def tuned(new_cli) -> Tuned:
    cli = new_cli()
    finished = cli("tune", "config.yaml", "baseline.learning_rate=0.01", "--json")
    assert finished.code == 0, finished.err
    return Tuned(cli, finished)


@pytest.fixture
def invoke(monkeypatch):
    """Runs a command that needs no child inside this process, whose signal handlers are put back afterwards."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
    for number, handler in kept.items():
        signal.signal(number, handler)


class Survived:
    """The table of hostile input that the long tests leave behind: each takes its own row anew."""

    file = ROOT / "tests" / "benchmarks" / "results" / "bad_input.md"

    def take(self, after: str, *cells: object) -> None:
        """Puts a row below the heading of a table, in the place of the one with the same first cell.

        Args:
            after: how the table's first line begins.
            *cells: of the row.
        """
        with self.file.open("r+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # several parts may run at once
            lines = [line for line in stream.read().splitlines() if not line.startswith(f"| {cells[0]} |")]
            heading = next(number for number, line in enumerate(lines) if line.startswith(after))
            end = next((n for n in range(heading, len(lines)) if not lines[n].startswith("|")), len(lines))
            lines.insert(end, f"| {' | '.join(map(str, cells))} |")
            stream.seek(0)
            stream.truncate()
            stream.write("\n".join(lines) + "\n")


@pytest.fixture
def survived() -> Survived:
    return Survived()

"""Commands whose children are quick: the command in the test's own process, its children forks of one server."""

import contextlib
import signal
import time
import warnings

import pytest
from fake_gpu import forks
from finished import Finished
from typer.testing import CliRunner

from batchtune.cli import app


@pytest.fixture(scope="session")
def as_forks():
    """A context in which children are forks of a server that has imported torch, instead of processes that do."""

    @contextlib.contextmanager
    def within():
        with pytest.MonkeyPatch.context() as patch:
            forks.children_are_forks(patch.setattr)
            yield

    return within


class QuickCli:
    """A command line like `cli`, whose commands run in this process."""

    def __init__(self, cli, as_forks) -> None:
        self.folder, self.write, self._as_forks = cli.folder, cli.write, as_forks

    def __call__(self, *arguments: object) -> Finished:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        started = time.perf_counter()
        here = contextlib.chdir(self.folder)
        with here, self._as_forks(), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setenv("TERM", "dumb")
            patch.setenv("OMP_NUM_THREADS", "1")
            done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return Finished(done.exit_code, done.stdout, done.stderr, time.perf_counter() - started)


@pytest.fixture
def quick_cli(cli, as_forks):
    return QuickCli(cli, as_forks)


@pytest.fixture(scope="module")
def new_quick_cli(new_cli, as_forks):
    """A function that makes a folder and its command line, for fixtures of wider scope."""
    return lambda: QuickCli(new_cli(), as_forks)

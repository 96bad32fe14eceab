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


@pytest.fixture(scope="module")
def forked_children():
    """Children that batchtune starts are forks of a server that has imported torch, instead of processes that do."""
    with pytest.MonkeyPatch.context() as patch:
        forks.children_are_forks(patch.setattr)
        yield


class QuickCli:
    """A command line like `cli`, whose commands run in this process."""

    def __init__(self, cli) -> None:
        self.folder, self.write = cli.folder, cli.write

    def __call__(self, *arguments: object) -> Finished:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        started = time.perf_counter()
        with contextlib.chdir(self.folder), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setenv("TERM", "dumb")
            patch.setenv("OMP_NUM_THREADS", "1")
            done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return Finished(done.exit_code, done.stdout, done.stderr, time.perf_counter() - started)


@pytest.fixture
def quick_cli(cli, forked_children):
    return QuickCli(cli)


@pytest.fixture(scope="module")
def new_quick_cli(new_cli, forked_children):
    """A function that makes a folder and its command line, for fixtures of wider scope."""
    return lambda: QuickCli(new_cli())

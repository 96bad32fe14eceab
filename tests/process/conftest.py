"""Commands whose children are quick: the command in the test's own process, its children forks of one server."""

import contextlib
import os
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


@pytest.fixture(scope="module")
def command_here(forked_children, tmp_path_factory):
    """A function that runs a command in a new folder with these files, in this process."""

    def run(files: dict[str, str], *arguments: object) -> Finished:
        folder = tmp_path_factory.mktemp("work")
        for name, text in files.items():
            (folder / name).write_text(text)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        started, environment = time.perf_counter(), os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
        with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            for name, value in environment.items():
                patch.setenv(name, value)
            done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return Finished(done.exit_code, done.stdout, done.stderr, time.perf_counter() - started)

    return run

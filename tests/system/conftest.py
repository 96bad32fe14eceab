"""Fixtures that several folders of tests share."""

import pytest
from fake_gpu import forks
from finished import Tuned
from fixtures.heartbeats import listen  # noqa: F401
from fixtures.quick import as_forks, new_quick_cli, quick_cli  # noqa: F401


@pytest.fixture(scope="session")
def tuned(new_cli) -> Tuned:
    """As in tests/process, where it is started for real."""
    cli = new_cli()
    finished = cli.start("tune", "config.yaml", "baseline.learning_rate=0.01", "--json", popen=forks.Popen).finish(120)
    assert finished.code == 0, finished.err
    return Tuned(cli, finished)

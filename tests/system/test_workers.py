"""`tune --workers` with real children, and what it refuses."""

import contextlib
import time

import psutil
import pytest

from batchtune.processes.pool import processors


def line_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.alone
@pytest.mark.skipif(processors() < 2, reason="two workers need two processors")
def test_two_workers_share_one_study_and_leave_nobody_behind(cli):
    command = cli.start("tune", "config.yaml", "device=cpu", "budget.trials=12", "--workers", "2", "--json", "-v")
    command.wait_for("searching", 120)
    family, deadline = command.family(), time.monotonic() + 60
    while sum("batchtune.child.image" in line_of(each) for each in family) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        family = command.family()
    done = command.finish(120)
    assert done.code == 0, done.err
    assert "2 workers, each on a device of its own" in done.err
    roles = [trial["role"] for trial in done.document["trials"] if trial["state"] in {"complete", "pruned"}]
    assert roles.count("baseline") == 1
    assert 1 <= roles.count("search") <= 12
    assert not any(each.is_running() for each in family)


def test_more_workers_than_processors_are_refused_before_anything_is_trained(cli):
    done = cli("tune", "config.yaml", "device=cpu", "--workers", "999")
    assert (done.code, done.out) == (2, "")
    assert "workers 999: more than the" in done.err

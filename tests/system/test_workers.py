"""`tune --workers` with real children, and what it refuses."""

import pytest
from fixtures.waiting import wait_until

from batchtune.processes.pool import processors

# Each process that trains says so and stays at its first step until the test has seen who does.
HELD = """
import os, time
from pathlib import Path
at_once = compute_loss

def compute_loss(model, batch):
    if model.training and Path("hold").exists():
        Path(f"training-{os.getpid()}").touch()
        while Path("hold").exists():
            time.sleep(0.05)
    return at_once(model, batch)
"""


@pytest.mark.skipif(processors() < 2, reason="two workers need two processors")
def test_two_workers_train_at_the_same_time_in_one_study_and_leave_nobody_behind(cli, quick_cli, all_gone):
    cli.write("linear.py", (cli.folder / "linear.py").read_text() + HELD)
    study = ("tune", "config.yaml", "device=cpu", "--workers", "2", "confirm=off")
    begun = quick_cli(*study, "budget.trials=3", "-q")  # of a search the first runs are one after the other
    assert begun.code == 0, begun.err
    hold = cli.write("hold", "")
    command = cli.start(*study, "budget.trials=6", "--json", "-v")
    try:
        training = wait_until(lambda: len(found := list(cli.folder.glob("training-*"))) == 2 and found)
        family = command.family()
    finally:
        hold.unlink()
    done = command.finish(120)
    assert done.code == 0, done.err
    assert "2 workers, each on a device of its own" in done.err
    assert {int(path.name.removeprefix("training-")) for path in training} < {each.pid for each in family}
    roles = [trial["role"] for trial in done.document["trials"] if trial["state"] in {"complete", "pruned"}]
    assert roles.count("baseline") == 1
    assert 3 + 2 <= roles.count("search") <= 6
    assert all_gone(family)


def test_more_workers_than_processors_are_refused_before_anything_is_trained(quick_cli):
    done = quick_cli("tune", "config.yaml", "device=cpu", "--workers", "999")
    assert (done.code, done.out) == (2, "")
    assert "workers 999: more than the" in done.err

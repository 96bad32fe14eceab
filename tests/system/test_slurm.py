"""The recipes for Slurm, as `sbatch` runs them: a real cluster of two nodes, each with a network of its own."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from fixtures.postgresql import own_server
from fixtures.slurm import installed, own_cluster
from fixtures.waiting import wait_until

from batchtune.result import load_result

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs Slurm (slurmctld, slurmd, munge), iproute2 and root"),
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "cluster" / "slurm"
SLOW = """
import time
at_once = compute_loss

def compute_loss(model, batch):
    time.sleep(0.005)
    return at_once(model, batch)
"""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}


@pytest.fixture(scope="module")
def cluster():
    with own_cluster() as started:
        yield started


class Job:
    def __init__(self, cluster, folder, *command, **variables) -> None:
        self._cluster, self._folder = cluster, folder
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        exported = {"PATH": programs, "PYTHONPATH": str(ROOT)} | variables
        names = ",".join(f"{name}={value}" for name, value in exported.items())
        self.number = cluster.told("sbatch", "--parsable", f"--chdir={folder}", f"--export=ALL,{names}", *command)

    @property
    def state(self) -> str:
        told = self._cluster.told("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.split("=", 1) for word in told.split() if "=" in word)["JobState"]

    @property
    def log(self) -> str:
        path = self._folder / f"batchtune-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, seconds: float = 200) -> str:
        return wait_until(lambda: (state := self.state) in ENDED and state, seconds)


def test_ranks_that_lost_a_node_are_started_again_and_go_on_with_the_study(cluster, cli):
    with (cli.folder / "linear.py").open("a") as task:
        task.write(SLOW)
    changed = ("device=cpu", "budget.trials=6", "confirm=off", "-o", "result.json")
    job = Job(cluster, cli.folder, RECIPE / "ranks.sbatch", "config.yaml", *changed, RANKS_PER_NODE="1")
    wait_until(lambda: re.search(r"^ +2 .* search ", job.log, re.MULTILINE) or job.state in ENDED)
    cluster.lose_node("node2")
    wait_until(lambda: job.state == "PENDING")  # which Slurm leaves so for two minutes
    cluster.start_node("node2")
    cluster.told("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    assert job.wait() == "COMPLETED", job.log
    runs = [int(number) for number in re.findall(r"^ +(\d+) .* (?:baseline|search) ", job.log, re.MULTILINE)]
    assert (runs[:3], job.log.count("\nsearching\n")) == ([0, 1, 2], 2)
    assert runs == sorted(set(runs))  # none is done again
    found = load_result(cli.folder / "result.json")
    assert {(each.world_size, each.nodes) for each in found.trials if each.state == "complete"} == {(2, 2)}


def test_tasks_on_two_nodes_share_a_study_in_postgresql(cluster, cli):
    changed = ("device=cpu", "budget.trials=4", "confirm=off")
    with own_server() as server:
        server.new_database("slurm")
        where = {"BATCHTUNE_STORAGE": server.by_socket("slurm")}
        job = Job(cluster, cli.folder, "--nodes=2", RECIPE / "tune.sbatch", "config.yaml", *changed, **where)
        assert job.wait() == "COMPLETED", job.log
    assert "secret" not in job.log
    runs = cli.folder / "runs" / job.number
    first, second = (json.loads((runs / task / ".batchtune/config/result.json").read_text()) for task in ("0", "1"))
    assert first["trials"] == second["trials"]
    assert first["recommendation"] == second["recommendation"]

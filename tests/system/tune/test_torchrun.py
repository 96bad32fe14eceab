"""`tune` inside of the user's own torchrun, on one machine or two: one study, told once, and machines that go away."""

import os
import random
import re
import signal
import time
from collections import Counter

import psutil
import pytest
from finished import Tuned
from fixtures import strikes
from fixtures.torchrun import PATIENT, Machines
from fixtures.waiting import wait_until

from batchtune.config.load import load_config
from batchtune.errors import UsageError
from batchtune.observer import Observer
from batchtune.tune.plan.configure import configure

STUDY = ("tune", "config.yaml", "device=cpu", "confirm=off", "--json", "-v")
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TWO_MACHINES = LAUNCHED | {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}

# Rank 1 meets the fates that its folder holds, one after the other, once the search has begun.
STRUCK = """
import os, signal, time
from pathlib import Path
HERE = Path(__file__).parent
plain_loss = compute_loss

def compute_loss(model, batch):
    fates = sorted(HERE.glob("fate-*"))
    if os.environ.get("RANK") == "1" and torch.is_grad_enabled() and fates:
        fate = fates[0].read_text()
        fates[0].unlink()
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "lacks memory":
            torch.ones(1 << 40)
        time.sleep(600)
    return plain_loss(model, batch)
"""


def two_machines(new_cli):
    """Their folders; what trains is on the first one's path, as on a disk that they share."""
    clis = [new_cli() for _ in range(2)]
    for cli in clis:
        cli.write("patient.py", PATIENT)
        cli.write("linear.py", (cli.folder / "linear.py").read_text() + STRUCK)
    return clis


def ours(told: str) -> list[str]:
    """The lines that are not of torchrun's agents, of whom one may find the other gone and with it the store."""
    trace = r"^\[W.* TCPStore\.cpp.* failed on SocketImpl.*\n(?:Exception raised.*\n|frame #.*\n|<omitting.*\n)*\n?"
    told = re.sub(trace, "", told, flags=re.MULTILINE)
    return [line for line in told.splitlines() if "torch/distributed/elastic" not in line]


@pytest.fixture
def two(new_cli):
    return two_machines(new_cli)


@pytest.fixture(scope="module")
def begun(new_cli):
    """A study that two machines have run to its end."""
    clis = two_machines(new_cli)
    first, second = Machines(clis, *STUDY, "budget.trials=1").finish()
    assert (first.code, second.code) == (0, 0), first.err
    assert (second.out, ours(second.err)) == ("", [])
    assert not (clis[1].folder / ".batchtune").exists()
    return Tuned(clis[0], first)


@pytest.fixture
def go_on(begun, two):
    """Goes on with that study where rank 1 meets some fates; what is left of its processes afterwards is a failure."""
    begun.copy_to(two[0])
    started = []

    def go_on(*fates, trials):
        for number, fate in enumerate(fates):
            two[0].write(f"fate-{number}", fate)
        started.append(Machines(two, *STUDY, f"budget.trials={trials}", program=("patient.py",)))
        return started[-1]

    yield go_on
    for machines in started:
        left = machines.family()
        for process in left:
            process.kill()
        assert not left


@pytest.fixture
def held(go_on, two):
    """Such a study, and its processes, in which rank 1 hangs."""
    machines = go_on("hangs", trials=4)
    machines.agents[0].wait_for("searching", 200)
    wait_until(lambda: not list(two[0].folder.glob("fate-*")))
    return machines, machines.family()


def assert_goes_on(go_on, two):
    """The same command goes on with what there is."""
    before = two[0].result()["trials"]
    first, second = go_on(trials=4).finish()
    assert (first.code, second.code) == (0, 0), first.err
    assert [each["number"] for each in first.document["trials"]][: len(before)] == [each["number"] for each in before]
    assert first.document["status"] == "complete"
    assert "probing" not in first.err


def gone(processes):
    return not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.timeout(600)
def test_a_study_on_two_machines_is_of_all_their_ranks(begun):
    assert "each run trains on 2 ranks with ddp (gloo)" in begun.finished.err
    assert {each["world_size"] for each in begun.document["trials"]} == {2}
    answer = begun.document["recommendation"]
    assert (answer["world_size"], answer["nodes"], answer["strategy"]) == (2, 2, "ddp")
    lightning = begun.cli("report", "config", "--format", "lightning").out
    assert "devices: 1\n" in lightning
    assert "num_nodes: 2\n" in lightning
    assert {"NNODES=2", "NPROC_PER_NODE=1"} <= set(begun.cli("report", "config", "--format", "env").out.splitlines())


def test_what_cannot_be_done_is_told_once_and_ends_all(two):
    first, second = Machines(two, *STUDY, "workers=2").finish()
    told = "batchtune: workers 2: torchrun has started 2 ranks on 2 machines, so that it can only be 1\n"
    assert [line for line in first.err.splitlines(keepends=True) if line.startswith("batchtune:")] == [told]
    assert "batchtune:" not in second.err
    assert (first.code, first.out, second.out) == (1, "", "")  # torchrun's code for any other than 0
    assert "exitcode  : 2" in first.err
    assert "exitcode  : 2" in second.err


def test_a_dry_run_opens_the_task_on_all_ranks(two):
    first, second = Machines(two, *STUDY, "--dry-run", each=2).finish()
    assert (first.code, second.code) == (0, 0), first.err
    assert "on 4 ranks (ddp) on cpu of 2 machines" in first.err
    assert (first.document["world_size"], first.document["strategy"]) == (4, "ddp")
    assert (second.out, ours(second.err)) == ("", [])
    limits, free = first.document["rank_memory_limits_bytes"], first.document["environment"]["device_memory_free_bytes"]
    assert limits == pytest.approx([0.8 * free / 2] * 4, rel=0.2)  # two share a host's memory, not all four


@pytest.mark.timeout(600)
def test_what_befalls_a_rank_of_the_other_machine_is_its_runs_outcome_or_has_it_done_again(go_on):
    first, second = go_on("killed", "lacks memory", "hangs", trials=5).finish()
    assert (first.code, second.code) == (0, 0), first.err
    assert "rank 1: the process died by SIGKILL" in first.err
    assert "no sign of life for 10 s" in first.err
    failed = [each.get("outcome") for each in first.document["trials"] if each["state"] == "fail"]
    assert sorted(failed, key=str) == [None, None, "oom"]  # two were done again


@pytest.mark.timeout(600)
def test_a_coordinator_that_is_killed_has_its_run_done_again(held):
    machines, processes = held
    (coordinator,) = [each for each in processes if "batchtune.processes.coordinator" in " ".join(each.cmdline())]
    coordinator.kill()
    first, second = machines.finish()
    assert (first.code, second.code) == (0, 0), first.err
    assert [each.get("outcome") for each in first.document["trials"] if each["state"] == "fail"] == [None]
    wait_until(lambda: gone(processes))


@pytest.mark.timeout(600)
def test_a_machine_that_goes_away_ends_the_study_and_the_same_command_goes_on(held, go_on, two):
    machines, processes = held
    machines.lose(1)
    first, _ = machines.finish()
    assert "batchtune: rank 1: its process or its machine is gone; start torchrun again" in first.err
    assert "exitcode  : 5" in first.err
    wait_until(lambda: gone(processes))
    assert_goes_on(go_on, two)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_the_machine_of_the_first_rank_ends_those_that_follow(held, go_on, two, how):
    machines, processes = held
    (machines.agents[0].process if how == signal.SIGINT else machines.rank(0)).send_signal(how)
    first, second = machines.finish()
    wait_until(lambda: gone(processes))
    if how == signal.SIGINT:
        assert first.document["status"] == "interrupted"
        assert "batchtune:" not in second.err
    assert_goes_on(go_on, two)


def struck(clis, mark, dice, wanted):
    """One study on two machines under blows, interrupted, and gone on with; the blows and what its trials came to."""
    first = clis[0]
    for cli in clis:
        cli.write("patient.py", PATIENT)
        cli.write("linear.py", (cli.folder / "linear.py").read_text() + strikes.STRUCK)
    how = (*STUDY, "budget.total=3h")
    machines = Machines(clis, *how, "budget.trials=1000", program=("patient.py",))
    agent = machines.agents[0]
    agent.wait_for("searching", 300)
    dealt = strikes.strike_until_it_ends(agent, first.folder / "strike", mark, dice, wanted)
    strikes.interrupt(agent)
    told = machines.finish(300)
    done, _ = Machines(clis, *how, f"budget.trials={strikes.searched(first) + 2}", program=("patient.py",)).finish(400)
    assert done.code == 0, (told[0].err[-2000:], done.err[-2000:])
    return dealt, strikes.outcomes_of(first, done.document)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_random_strikes_on_two_machines_lose_and_double_nothing(new_cli, tmp_path, monkeypatch, capsys):
    """As in test_ranks.py. Where a strike ends the study, the same command goes on, and another study is struck."""
    monkeypatch.setenv("OF_THIS_TEST", str(tmp_path))
    dice, wanted, begun = random.Random(0), int(os.environ.get("STRIKES", "20")), time.monotonic()
    dealt, outcomes, studies = Counter(), Counter(), 0
    while dealt.total() < wanted:
        blows, found = struck([new_cli(), new_cli()], str(tmp_path), dice, wanted - dealt.total())
        wait_until(lambda: not strikes.of_these_tests(str(tmp_path)), 60)
        dealt, outcomes, studies = dealt + blows, outcomes + found, studies + 1
        with capsys.disabled():
            print(f"\n{studies} studies, {time.monotonic() - begun:.0f} s", dict(dealt), dict(outcomes), flush=True)
    assert outcomes["user_error"] == 0


class TestConfigurationInTorchrun:
    """As a process is started that torchrun has given these variables."""

    @pytest.fixture(autouse=True)
    def _four_ranks_on_two_machines(self, monkeypatch):
        for name, value in TWO_MACHINES.items():
            monkeypatch.setenv(name, value)

    def test_what_is_left_open_is_as_torchrun_has_started_it(self, cli):
        ranks = load_config(cli.folder, ["ranks.strategy=fsdp"]).ranks
        assert (ranks.per_trial, ranks.nodes, ranks.strategy) == (4, 2, "fsdp")
        ranks.require_launcher()

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("ranks.per_trial=2", "ranks.per_trial 2: torchrun has started 4 ranks on 2 machines, .* only be 4"),
            ("ranks.per_trial=auto", "ranks.per_trial auto: "),
            ("ranks.nodes=1", "ranks.nodes 1: .* only be 2"),
            ("workers=2", "workers 2: .* only be 1"),
            ("executor=ray", "executor ray: .* only be local"),
        ],
    )
    def test_anything_else_is_refused(self, cli, override, told):
        with pytest.raises(UsageError, match=told):
            configure(cli.folder, {"overrides": [override]}, Observer())

    def test_a_batch_that_its_ranks_cannot_split_is_refused(self, cli):
        with pytest.raises(UsageError, match=r"baseline\.batch_size 18 cannot be split among 4 ranks"):
            load_config(cli.folder, ["baseline.batch_size=18"])


def test_several_machines_without_torchrun_are_refused_with_the_line_that_starts_it(cli):
    done = cli("tune", "config.yaml", "ranks.nodes=2", "ranks.per_trial=16")
    assert (done.code, done.out) == (2, "")
    assert "ranks.nodes 2: start it by torchrun on each of them (Slurm: srun torchrun …): " in done.err
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 " in done.err
    assert not (cli.folder / ".batchtune").exists()

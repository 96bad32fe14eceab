"""`tune --executor ray`: what is asked of the cluster, and a study that is interrupted or loses a node on the way."""

import contextlib
import importlib.util
import os
import random
import signal
import threading
import time
import unittest.mock
from collections import Counter

import optuna
import psutil
import pytest
from finished import Tuned
from fixtures import strikes
from fixtures.waiting import wait_until
from optuna.storages.journal import JournalFileBackend

from batchtune.config.ranks import RayCluster
from batchtune.config.schema import Config
from batchtune.errors import UsageError
from batchtune.observer import Observer
from batchtune.protocol.commands import OpenTask

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra 'ray')")

# Each process that trains says so and stays at its first step until the test has seen who does.
HELD = """
import os, time
from pathlib import Path
HERE = Path(__file__).parent
at_once = compute_loss

def compute_loss(model, batch):
    if model.training and (HERE / "hold").exists():
        (HERE / f"training-{os.getpid()}").touch()
        while (HERE / "hold").exists():
            time.sleep(0.05)
    return at_once(model, batch)
"""
GPUS = {"GPU": 2.0, "CPU": 8.0}


def asked(device="auto", cluster=GPUS, **keys):
    from batchtune.processes.ray_pool import resources_of

    return resources_of(RayCluster(**keys), device, cluster)


@needs_ray
def test_a_cluster_that_starts_here_is_not_given_the_storage_with_its_password(monkeypatch):
    from batchtune.processes import ray_pool as pool

    seen = []
    monkeypatch.setenv("BATCHTUNE_STORAGE", "postgresql://you:secret@host/studies")
    monkeypatch.setattr(pool, "Actor", unittest.mock.MagicMock())
    for name, stand_in in {
        "is_initialized": lambda: False,
        "init": lambda **_: seen.append(dict(os.environ)),
        "cluster_resources": lambda: GPUS,
        "shutdown": lambda: seen.append("left"),
    }.items():
        monkeypatch.setattr(pool.ray, name, stand_in)
    with pool.RayPool(OpenTask(task="model.py", device="cpu"), 1, Observer(), RayCluster()):
        assert "BATCHTUNE_STORAGE" not in seen[0]
        assert "PATH" in seen[0]
        assert os.environ["BATCHTUNE_STORAGE"].startswith("postgresql")
    assert seen[1:] == ["left"]  # it was ours


@needs_ray
class TestWhatIsAskedFor:
    def test_a_gpu_each_where_the_cluster_has_some(self):
        assert asked() == {"num_cpus": 1, "num_gpus": 1.0, "resources": {}}

    def test_processors_where_it_has_none(self):
        assert asked(cluster={"CPU": 8.0}, num_cpus=4) == {"num_cpus": 4, "num_gpus": 0.0, "resources": {}}

    def test_a_part_of_a_gpu_and_a_kind_of_node_when_told(self):
        node = {"accelerator_type:A100": 0.001}
        assert asked(num_gpus=0.5, resources=node) == {"num_cpus": 1, "num_gpus": 0.5, "resources": node}

    def test_no_gpu_for_the_cpu(self):
        assert asked("cpu")["num_gpus"] == 0.0

    def test_which_gpu_is_for_ray_to_say(self):
        with pytest.raises(UsageError, match="device cuda:1: Ray chooses which; write cuda"):
            asked("cuda:1")

    def test_there_is_room_for_as_many_as_every_node_can_take(self):
        from batchtune.processes.ray_actor import room_for

        nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 4.0}, {"CPU": 64.0}]
        assert room_for(asked(), nodes) == 3
        assert room_for(asked(num_gpus=0.1, num_cpus=2), nodes) == 4
        assert room_for(asked("cpu"), nodes) == 73


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
class TestAnActorThatRayHasStartedAgain:
    """It stands where the one with the child stood, and has none."""

    def test_says_that_the_node_is_lost(self, monkeypatch):
        from batchtune.processes import ray_actor as actors
        from batchtune.processes.worker import NodeLost

        asked = actors.ChildlessError("Ray has started it again elsewhere")
        with pytest.raises(actors.ChildlessError):
            actors.Host().do("send", {"command": "train"})
        monkeypatch.setattr(actors.ray, "remote", unittest.mock.MagicMock())
        actor = actors.Actor({}, threading.Event(), Observer())
        monkeypatch.setattr(actors.ray, "wait", lambda asked, **_: (asked, []))
        monkeypatch.setattr(actors.ray, "get", unittest.mock.Mock(side_effect=asked))
        with pytest.raises(NodeLost, match="its Ray node was lost: Ray has started it again elsewhere"):
            actor.ask("do", "send", {"command": "train"})


class TestWithoutRay:
    def test_the_missing_extra_is_named_before_anything_is_written(self, cli, invoke, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
        monkeypatch.chdir(cli.folder)
        done = invoke("tune", "config.yaml", "--executor", "ray")
        assert (done.exit_code, done.stdout) == (2, "")
        assert (
            done.stderr.strip()
            == 'batchtune: executor ray: Ray is not installed; run: pip install "batchtune-cli[ray]"'
        )
        assert not cli.run_folder().exists()

    def test_its_settings_are_refused_for_runs_on_this_machine(self):
        with pytest.raises(ValueError, match="is of no use with executor local; add 'executor: ray'"):
            Config(task="model.py", ray=RayCluster(address="auto"))


@pytest.fixture(scope="module")
def cluster():
    """A head without processors, and two nodes with one each."""
    with nodes_of(1) as started:
        yield started


@contextlib.contextmanager
def nodes_of(processors):
    """A head without processors, and two nodes with so many each."""
    from ray.cluster_utils import Cluster

    patient = {"health_check_timeout_ms": 60_000, "health_check_failure_threshold": 20}  # of a busy machine's nodes
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": patient}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster, [cluster.add_node(num_cpus=processors) for _ in range(2)]
    finally:
        cluster.shutdown()


def trials_of(cli):
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(cli.run_folder() / "study.log")))
    return optuna.load_study(study_name="config", storage=storage).get_trials(deepcopy=False)


def study(cluster, *changed, workers="auto"):
    """The command of a study, with its options."""
    ray = ("--executor", "ray", "--ray-address", cluster.address, "--workers", workers)
    return ("tune", "config.yaml", "device=cpu", "budget.total=20m", *changed, *ray, "--json", "-v")


@pytest.fixture(scope="module")
def begun(cluster, new_cli):
    """A study that has run its baseline and its first runs, which are one after the other, on the cluster."""
    cli = new_cli()
    cli.write("linear.py", (cli.folder / "linear.py").read_text() + HELD)
    finished = cli.start(*study(cluster[0], "budget.trials=3", "confirm=off")).finish(400)
    assert finished.code == 0, finished.err
    assert "2 workers on the Ray cluster" in finished.err
    return Tuned(cli, finished)


@contextlib.contextmanager
def held(begun, cli, cluster, *changed, trains=2):
    """The same study, gone on with elsewhere: it is searching, and so many processes train at their first step."""
    cli.write("linear.py", (begun.cli.folder / "linear.py").read_text())
    begun.copy_to(cli)
    cli.write("hold", "")
    command = cli.start(*study(cluster, *changed))

    def both_train():
        assert command.process.poll() is None, command.err
        return len(list(cli.folder.glob("training-*"))) == trains

    try:
        wait_until(both_train, 300)
        yield command
    finally:
        command.process.kill()
        print(command.err)  # shown where it failed


def children_of(cluster):
    """Processes that train on a cluster's nodes."""
    raylets = [
        psutil.Process(each.process.pid) for node in cluster.list_all_nodes() for each in node.all_processes["raylet"]
    ]
    family = [child for raylet in raylets for child in raylet.children(recursive=True)]

    def command_of(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            return ""

    return [child for child in family if "batchtune.child" in command_of(child)]


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.timeout(900)
def test_ctrl_c_leaves_nobody_on_the_cluster_and_prints_what_is_known(begun, cli, cluster):
    cluster, _ = cluster
    with held(begun, cli, cluster, "budget.trials=6") as command:
        assert len(children_of(cluster)) >= 2
        command.process.send_signal(signal.SIGINT)
        done = command.finish(120)
    assert done.code == 130, done.err
    assert done.document["status"] == "interrupted"
    assert done.document["trials"][: len(begun.document["trials"])] == begun.document["trials"]
    assert "Traceback" not in done.err
    wait_until(lambda: not children_of(cluster))


def ranks_of_groups():
    """Ranks that actors have started, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "batchtune/ray/" in process.environ().get("BATCHTUNE_GROUP", ""):
                found.append(process)
    return found


ACROSS = "no node of the Ray cluster has room for 2 ranks: those of a run are on several"


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.timeout(900)
def test_ranks_that_no_node_has_room_for_are_on_several_with_a_warning(cli, cluster):
    changed = ("budget.trials=2", "confirm=off", "ranks.per_trial=2")
    done = cli.start(*study(cluster[0], *changed, workers="1")).finish(400)
    assert done.code == 0, done.err
    assert ACROSS in done.err
    assert {each["world_size"] for each in done.document["trials"]} == {2}
    wait_until(lambda: not ranks_of_groups())


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.timeout(900)
def test_a_study_goes_on_when_a_node_is_lost_and_every_run_is_there_once(begun, cli, cluster):
    cluster, nodes = cluster
    with held(begun, cli, cluster, "budget.trials=6", "confirm.seeds=1") as command:
        cluster.remove_node(nodes[0], allow_graceful=False)
        command.wait_for("is requeued: its Ray node was lost", 200)
        (cli.folder / "hold").unlink()
        done = command.finish(400)
    assert done.code == 0, done.err
    trials = trials_of(cli)
    retried = {trial.user_attrs["retry_of"]: trial for trial in trials if "retry_of" in trial.user_attrs}
    lost = {trial.number: trial for trial in trials if "Ray node was lost" in trial.user_attrs.get("message", "")}
    assert lost
    assert lost.keys() == retried.keys()
    for number, again in retried.items():
        assert again.params == lost[number].params
        assert again.user_attrs["seed"] == lost[number].user_attrs["seed"]
    found = [trial for trial in done.document["trials"] if trial["number"] not in lost]
    assert {trial["state"] for trial in found} <= {"complete", "pruned"}
    runs = [(trial["role"], trial["batch_size"], trial["learning_rate"], trial["seed"]) for trial in found]
    assert 1 + 3 + 2 + 2 <= len(runs) == len(set(runs)) <= 1 + 6 + 2  # the baseline, a search, and both confirmed
    assert done.document["recommendation"]["learning_rate"] > 0


@needs_ray
class TestRanksOnACluster:
    """Where they are, and what each is told."""

    def test_they_are_told_what_torchrun_would_tell_them(self):
        from batchtune.processes.ray_groups import Seat, variables_of

        here, there = (Seat("here", "10.0.0.1", 7000, (gpu,)) for gpu in "31"), Seat("there", "10.0.0.2", 8000, ("0",))
        first, second = here
        told = variables_of([first, there, second])
        assert [each["RANK"] for each in told] == ["0", "2", "1"]  # those of one node are neighbours
        assert [each["LOCAL_RANK"] for each in told] == ["0", "0", "1"]
        assert [each["LOCAL_WORLD_SIZE"] for each in told] == ["2", "1", "2"]
        assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == ["3,1", "0", "3,1"]
        assert {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) for each in told} == {
            ("3", "10.0.0.1", "7000")
        }

    def test_a_group_is_on_one_node_where_one_has_room_for_it(self):
        from batchtune.processes.ray_groups import groups_for, placement_of

        nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 3.0}]
        assert (placement_of(asked(), 2, nodes), groups_for(asked(), 2, nodes)) == ("STRICT_PACK", 3)
        assert (placement_of(asked(), 4, nodes), groups_for(asked(), 4, nodes)) == ("STRICT_PACK", 1)
        assert (placement_of(asked(), 6, nodes), groups_for(asked(), 6, nodes)) == ("PACK", 1)
        assert groups_for(asked(), 8, nodes) == 0


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.timeout(900)
def test_groups_train_side_by_side_and_the_run_of_a_lost_node_is_done_again_on_another(new_cli, cli):
    first = new_cli()
    first.write("linear.py", (first.folder / "linear.py").read_text() + HELD)
    ranks = ("ranks.per_trial=2", "confirm=off")
    with nodes_of(2) as (cluster, nodes):
        finished = first.start(*study(cluster, *ranks, "budget.trials=3")).finish(400)
        assert finished.code == 0, finished.err
        assert "2 workers on the Ray cluster" in finished.err
        assert ACROSS not in finished.err
        with held(Tuned(first, finished), cli, cluster, *ranks, "budget.trials=6", trains=4) as command:
            assert len(ranks_of_groups()) >= 4
            cluster.remove_node(nodes[0], allow_graceful=False)
            command.wait_for("is requeued: its Ray node was lost", 200)
            (cli.folder / "hold").unlink()
            done = command.finish(400)
        wait_until(lambda: not ranks_of_groups())
    assert done.code == 0, done.err
    trials = trials_of(cli)
    lost = [trial.number for trial in trials if "Ray node was lost" in trial.user_attrs.get("message", "")]
    assert lost
    assert lost == [trial.user_attrs["retry_of"] for trial in trials if "retry_of" in trial.user_attrs]
    found = [trial for trial in done.document["trials"] if trial["number"] not in lost]
    assert {trial["state"] for trial in found} <= {"complete", "pruned"}
    assert {trial["world_size"] for trial in found} == {2}


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_random_strikes_at_groups_on_a_cluster_lose_and_double_nothing(new_cli, tmp_path, monkeypatch, capsys):
    """As in test_ranks.py, with two groups at once; nodes have the mark of this test from this process."""
    mark, dice, wanted = str(tmp_path), random.Random(0), int(os.environ.get("STRIKES", "20"))
    monkeypatch.setenv("OF_THIS_TEST", mark)
    dealt, outcomes, begun = Counter(), Counter(), time.monotonic()
    with nodes_of(2) as (cluster, _):
        how = ("ranks.per_trial=2", "confirm=off", "budget.total=3h")
        while dealt.total() < wanted:
            cli = new_cli()
            cli.write("linear.py", (cli.folder / "linear.py").read_text() + strikes.STRUCK)
            command = cli.start(*study(cluster, *how, "budget.trials=1000"), python=("-c", strikes.PATIENT))
            command.wait_for("searching", 300)
            order = cli.folder / "strike"
            dealt += strikes.strike_until_it_ends(command, order, mark, dice, wanted - dealt.total())
            strikes.interrupt(command)
            assert command.finish(600).code in {0, 130}, command.err[-2000:]
            done = cli.start(*study(cluster, *how, f"budget.trials={strikes.searched(cli) + 2}")).finish(600)
            assert done.code == 0, done.err[-2000:]
            outcomes += strikes.outcomes_of(cli, done.document)
            wait_until(lambda: not strikes.of_these_tests(mark), 60)
            with capsys.disabled():
                print(f"\n{time.monotonic() - begun:.0f} s", dict(dealt), dict(outcomes), flush=True)
    assert outcomes["user_error"] == 0

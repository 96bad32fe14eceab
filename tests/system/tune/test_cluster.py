"""`tune --executor ray`: what is asked of the cluster, and a study that is interrupted or loses a node on the way."""

import contextlib
import importlib.util
import os
import signal
import threading
import time
import unittest.mock

import optuna
import psutil
import pytest
from optuna.storages.journal import JournalFileBackend

from batchtune.config.schema import Config, RayCluster
from batchtune.errors import UsageError

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra 'ray')")

SLOW = """
import signal
import time
at_once = compute_loss

def compute_loss(model, batch):
    time.sleep(0.01)
    return at_once(model, batch)
"""
GPUS = {"GPU": 2.0, "CPU": 8.0}


def asked(device="auto", cluster=GPUS, **keys):
    from batchtune.processes.ray.pool import resources_of

    return resources_of(RayCluster(**keys), device, cluster)


@needs_ray
def test_a_cluster_that_starts_here_is_not_given_the_storage_with_its_password(monkeypatch):
    from batchtune.processes.ray import pool as cluster

    seen = []
    monkeypatch.setenv("BATCHTUNE_STORAGE", "postgresql://you:secret@host/studies")
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: seen.append(dict(os.environ)))
    assert cluster._connect(None)
    assert "BATCHTUNE_STORAGE" not in seen[0]
    assert "PATH" in seen[0]
    assert os.environ["BATCHTUNE_STORAGE"].startswith("postgresql")


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
        from batchtune.processes.ray.pool import room_for

        nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 4.0}, {"CPU": 64.0}]
        assert room_for(asked(), nodes) == 3
        assert room_for(asked(num_gpus=0.1, num_cpus=2), nodes) == 4
        assert room_for(asked("cpu"), nodes) == 73


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
class TestAnActorThatRayHasStartedAgain:
    """It stands where the one with the child stood, and has none."""

    def test_says_that_the_node_is_lost(self, monkeypatch):
        from batchtune.processes.ray import actor as actors
        from batchtune.processes.worker import NodeLost

        asked = actors.ChildlessError("Ray has started it again elsewhere")
        with pytest.raises(actors.ChildlessError):
            actors.Host().do("send", {"command": "train"})
        actor = actors.Actor.__new__(actors.Actor)
        actor._handle, actor._stopping = unittest.mock.MagicMock(), threading.Event()
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
    from ray.cluster_utils import Cluster

    patient = {"health_check_timeout_ms": 60_000, "health_check_failure_threshold": 20}  # of a busy machine's nodes
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": patient})
    try:
        yield cluster, [cluster.add_node(num_cpus=1) for _ in range(2)]
    finally:
        cluster.shutdown()


def trials_of(cli):
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(cli.run_folder() / "study.log")))
    return optuna.load_study(study_name="config", storage=storage).get_trials(deepcopy=False)


def wait_until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def studying(cli, cluster):
    """A study whose runs take a second, once two workers search."""
    cli.write("linear.py", (cli.folder / "linear.py").read_text() + SLOW)
    changed = ["device=cpu", "budget.run=1s", "budget.total=20m", "confirm.seeds=1"]
    ray = ["--executor", "ray", "--ray-address", cluster.address, "--workers", "auto"]
    command = cli.start("tune", "config.yaml", *changed, *ray, "--json", "-v")
    try:
        command.wait_for("2 workers on the Ray cluster", 200)
        command.wait_for("searching", 300)
        wait_until(lambda: sum(trial.state.name == "RUNNING" for trial in trials_of(cli)) == 2, 200)
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
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_ctrl_c_leaves_nobody_on_the_cluster_and_prints_what_is_known(cli, cluster):
    cluster, _ = cluster
    with studying(cli, cluster) as command:
        wait_until(lambda: len(children_of(cluster)) == 2, 60)  # a run may wait for its child to start
        command.process.send_signal(signal.SIGINT)
        done = command.finish(120)
    assert done.code == 130, done.err
    assert done.document["status"] == "interrupted"
    assert "Traceback" not in done.err
    wait_until(lambda: not children_of(cluster), 60)


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.alone
@pytest.mark.timeout(900)  # seconds where the machine is idle, minutes where it is not
def test_a_study_goes_on_when_a_node_is_lost_and_every_run_is_there_once(cli, cluster):
    cluster, nodes = cluster
    with studying(cli, cluster) as command:
        cluster.remove_node(nodes[0], allow_graceful=False)
        done = command.finish(400)
    assert done.code == 0, done.err
    assert "is requeued: its Ray node was lost" in done.err
    trials = trials_of(cli)
    retried = {trial.user_attrs["retry_of"]: trial for trial in trials if "retry_of" in trial.user_attrs}
    lost = {trial.number: trial for trial in trials if "Ray node was lost" in trial.user_attrs.get("message", "")}
    assert lost.keys() == retried.keys()
    for number, again in retried.items():
        assert again.params == lost[number].params
        assert again.user_attrs["seed"] == lost[number].user_attrs["seed"]
    found = [trial for trial in done.document["trials"] if trial["number"] not in lost]
    assert {trial["state"] for trial in found} <= {"complete", "pruned"}
    runs = [(trial["role"], trial["batch_size"], trial["learning_rate"], trial["seed"]) for trial in found]
    assert len(runs) == len(set(runs)) == 1 + 4 + 2  # the baseline, budget.trials, and both confirmed
    assert done.document["recommendation"]["learning_rate"] > 0

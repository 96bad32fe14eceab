"""A worker whose children answer by a script: which one is kept, which is replaced, and what is waited for."""

import threading

import pytest
from fakes import ScriptedLauncher, opened, refusal

from batchtune.errors import DeviceError, RunInterrupted, UserCodeError
from batchtune.processes import worker as worker_module
from batchtune.processes.worker import NodeLost, Worker, WorkerDied
from batchtune.protocol.commands import Describe, OpenTask, Train, TryBatchSize
from batchtune.protocol.data import SamplesSeen
from batchtune.protocol.messages import RunSpec

HERE = {"done": opened(device="cuda:0", memory_limit_bytes=7).model_dump()}
BUSY = refusal(DeviceError("--device cuda: cannot be used now"))
TRAINED, NOTHING = {"done": {"outcome": "finished"}}, {"done": None}
NODE = NodeLost("its node is gone")
DONE = {"done": {"environment": {"device": "a card"}, "sensors": {}}}
RUN = RunSpec(
    micro_batch_size=1, accumulation_steps=1, learning_rate=1.0, precision="fp32", seed=0, metric="val_loss",
    goal="minimize", target=None, limit_seconds=1.0, evaluate_every=None, evaluation_batch_size=1,
)  # fmt: skip


def worker_of(*answers, **options):
    launcher = ScriptedLauncher(*answers)
    return Worker(OpenTask(task="model.py", metric="val_loss"), launcher, **options), launcher


def test_later_children_open_the_task_with_the_limit_of_the_first():
    worker, launcher = worker_of(HERE, HERE)
    for _ in range(2):
        worker.start()
        worker.renew()
    (first,), (second,) = (child.asked for child in launcher.started)
    assert (first["memory_limit"], first["metric"]) == (None, "val_loss")
    assert (second["memory_limit"], second["metric"]) == (7, None)


@pytest.mark.parametrize("deals_out", [False, True])
def test_later_children_train_the_worst_samples_of_the_first_unless_each_rank_has_its_own(deals_out):
    samples = SamplesSeen(places=(1, 2), seen=9, total=None, is_all=True, differing={})
    worker, launcher = worker_of({"done": opened(samples=samples, deals_out=deals_out).model_dump()}, HERE)
    for _ in range(2):
        worker.start()
        worker.renew()
    asked = launcher.started[1].asked[0]
    assert (asked["samples"] is None, asked["deals_out"]) == (deals_out, deals_out)


class TestRuns:
    """Each is a fresh child's: the first command that is asked of it."""

    def train(self, worker):
        return worker.call(Train(spec=RUN), timeout=1.0)

    def test_another_fork_of_the_same_image_where_there_is_one(self):
        here = {"done": opened(forks=True).model_dump()}
        renewed = [NOTHING, NOTHING]
        worker, launcher = worker_of(here, *renewed, TRAINED, *renewed, TRAINED)
        for _ in range(2):
            self.train(worker)
        (child,) = launcher.started
        assert [each["command"] for each in child.asked] == ["OpenTask", *["Renew", "OpenTask", "Train"] * 2]
        assert [each["again"] for each in child.asked if each["command"] == "OpenTask"] == [False, True, True]

    def test_else_a_process_of_its_own(self):
        worker, launcher = worker_of(HERE, NOTHING, TRAINED, NOTHING, TRAINED)
        for _ in range(2):
            self.train(worker)
        asked = [[each["command"] for each in child.asked] for child in launcher.started]
        assert asked == [["OpenTask"], *[["OpenTask", "Train"]] * 2]

    def test_an_image_that_dies_is_replaced(self):
        here = {"done": opened(forks=True).model_dump()}
        worker, launcher = worker_of(here, None, NOTHING, TRAINED)
        self.train(worker)
        assert [child.is_closed for child in launcher.started] == [True, False]


class TestADeviceThatIsBusyForAMoment:
    """It was there when the first child opened; a later one finds it filled by somebody else."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch):
        monkeypatch.setattr(worker_module, "RETRY_SECONDS", 0.01)

    def test_is_waited_for_once_it_has_worked(self):
        worker, launcher = worker_of(HERE, BUSY, BUSY, BUSY, HERE)
        worker.start()
        worker.renew()
        assert worker.start().device == "cuda:0"
        assert len(launcher.started) == 5

    def test_but_not_for_ever(self, monkeypatch):
        monkeypatch.setattr(worker_module, "BUSY_SECONDS", 0.05)
        worker, launcher = worker_of(HERE, *[BUSY] * 100)
        worker.start()
        worker.renew()
        with pytest.raises(DeviceError):
            worker.start()
        assert len(launcher.started) > 2

    def test_and_not_at_the_first_start(self):
        worker, launcher = worker_of(BUSY, HERE)
        with pytest.raises(DeviceError):
            worker.start()
        assert len(launcher.started) == 1

    def test_is_waited_for_no_longer_than_until_the_others_stop(self):
        stopping = threading.Event()
        worker, _ = worker_of(HERE, lambda: stopping.set() or BUSY, stopping=stopping)
        worker.start()
        worker.renew()
        with pytest.raises(RunInterrupted):
            worker.start()


class TestBeingKilledWhileTheTaskIsImported:
    """By something else: nothing that the task is known to have done."""

    def test_is_tried_again(self):
        notes = []
        worker, launcher = worker_of(KILLED, HERE, note=notes.append)
        assert worker.start().device == "cuda:0"
        assert [child.is_closed for child in launcher.started] == [True, False]
        (note,) = notes
        assert "is tried again" in note
        assert "SIGKILL" in note

    def test_twice_is_the_machines_fault(self):
        worker, launcher = worker_of(KILLED, KILLED)
        with pytest.raises(
            DeviceError, match=r"ended twice by something else: .*SIGKILL; make room in the host's memory"
        ):
            worker.start()
        assert all(child.is_closed for child in launcher.started)

    def test_what_it_does_to_itself_is_the_tasks(self):
        worker, launcher = worker_of(CRASHED)
        with pytest.raises(UserCodeError, match="SIGSEGV"):
            worker.start()
        assert len(launcher.started) == 1


class TestBeingStopped:
    def test_a_child_that_is_ended_has_not_crashed(self):
        stopping = threading.Event()
        worker, launcher = worker_of(HERE, stopping.set, stopping=stopping)
        with pytest.raises(RunInterrupted):
            worker.call(Describe(device="cpu"), timeout=1.0)
        assert launcher.started[0].is_closed

    def test_nothing_is_asked_any_more(self):
        stopping = threading.Event()
        worker, launcher = worker_of(HERE, stopping=stopping)
        worker.start()
        stopping.set()
        with pytest.raises(RunInterrupted):
            worker.call(Describe(device="cpu"), timeout=1.0)
        assert len(launcher.started[0].asked) == 1

    def test_else_it_has(self):
        worker, _ = worker_of(HERE, None)
        with pytest.raises(WorkerDied, match="it ended"):
            worker.call(Describe(device="cpu"), timeout=1.0)


class TestANodeThatIsLost:
    def test_what_is_no_run_is_retried_on_another(self):
        notes = []
        worker, launcher = worker_of(HERE, NODE, NODE, HERE, DONE, note=notes.append)
        assert worker.call(Describe(device="cpu"), timeout=1.0).environment.device == "a card"
        assert notes == ["Describe is retried: its node is gone"] * 2
        assert [child.is_closed for child in launcher.started] == [True, True, False]

    def test_but_not_for_ever(self):
        worker, launcher = worker_of(*[NODE] * 9)
        with pytest.raises(NodeLost):
            worker.call(Describe(device="cpu"), timeout=1.0)
        assert len(launcher.started) == 3

    def test_a_run_is_the_studys_to_give_back(self):
        worker, launcher = worker_of(HERE, NOTHING, NODE)
        with pytest.raises(NodeLost):
            worker.call(Train(spec=RUN), timeout=1.0)
        assert [child.is_closed for child in launcher.started] == [True, True]

    def test_while_a_message_is_sent_its_child_is_ended(self):
        class Deaf(ScriptedLauncher):
            def start(self):
                child = super().start()
                child.send = lambda _message: (_ for _ in ()).throw(NODE)
                return child

        deaf = Deaf()
        with pytest.raises(NodeLost):
            Worker(None, deaf).call(Describe(device="cpu"), timeout=1.0)
        assert all(child.is_closed for child in deaf.started)


GROUP = {"done": opened(world_size=2, strategy="ddp", backend="gloo").model_dump()}
KILLED = {"outcome": "crash", "error": "rank 1: the process died by SIGKILL", "rank": 1, "from_outside": True}
CRASHED = {"outcome": "crash", "error": "rank 1: the process died by SIGSEGV", "rank": 1, "from_outside": False}


class TestAGroupThatIsStruck:
    """Nothing of that is the fault of what it was at."""

    @pytest.mark.parametrize(("fate", "outcome"), [(KILLED, "crash"), (TimeoutError(), "timeout"), (None, "crash")])
    def test_a_run_is_the_studys_to_give_back(self, fate, outcome):
        worker, launcher = worker_of(GROUP, NOTHING, fate)
        with pytest.raises(NodeLost) as lost:
            worker.call(Train(spec=RUN), timeout=1.0)
        assert lost.value.outcome == outcome
        assert [child.is_closed for child in launcher.started] == [True, True]

    def test_so_it_is_where_the_next_group_is_struck_while_it_begins(self):
        worker, _ = worker_of(GROUP, KILLED)
        with pytest.raises(NodeLost):
            worker.call(Train(spec=RUN), timeout=1.0)

    def test_so_it_is_for_another_worker_whose_first_group_is_struck_while_it_begins(self):
        worker, _ = worker_of(KILLED)
        worker.settings = worker.settings.but(rank_memory_limits_bytes=(None, None))  # by the first one, which worked
        with pytest.raises(NodeLost):
            worker.call(Train(spec=RUN), timeout=1.0)

    def test_what_is_no_run_is_retried(self):
        notes = []
        worker, _ = worker_of(GROUP, KILLED, NOTHING, DONE, note=notes.append)
        assert worker.call(Describe(device="cpu"), timeout=1.0).environment.device == "a card"
        assert notes == ["Describe is retried: rank 1: the process died by SIGKILL"]

    @pytest.mark.parametrize("fate", [CRASHED, {"outcome": "oom", "error": "rank 1: no memory", "rank": 1}])
    def test_what_a_rank_does_to_itself_is_the_outcome_of_its_run(self, fate):
        worker, _ = worker_of(GROUP, NOTHING, fate)
        with pytest.raises(WorkerDied):
            worker.call(Train(spec=RUN), timeout=1.0)

    def test_a_kill_in_an_attempt_of_a_probe_is_its_outcome_for_memory_may_be_why(self):
        worker, _ = worker_of(GROUP, KILLED)
        with pytest.raises(WorkerDied) as died:
            worker.call(TryBatchSize(batch_size=1, steps=1, precision="fp32"), timeout=1.0)
        assert died.value.rank == 1

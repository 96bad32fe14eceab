"""Every run begins as the first did, whatever the runs before it have left behind in modules, libraries and torch."""

import contextlib
import json
from itertools import pairwise

import pytest

from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import OpenTask, Train, TryBatchSize
from batchtune.protocol.messages import RunSpec

TASK = """
import functools, json, os, random, warnings, zlib
import torch
from torch import nn

warnings.simplefilter("ignore")
inputs = torch.randn(64, 1 << 14)
inputs = (inputs - inputs.mean()) / inputs.std()
IMPORTED_BY = os.getpid()

criterion = nn.Linear(1, 1)
statistics = nn.BatchNorm1d(1)
ema, steps, seen, generator = {}, [0], set(), torch.Generator()
text = open(__file__)

@functools.cache
def slow_table():
    return [0]

def build_model():
    return nn.Linear(1 << 14, 1)

def train_dataset():
    return torch.utils.data.TensorDataset(inputs)

def val_dataset():
    return train_dataset()

def build_optimizer(model, lr):
    return torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=lr)

def compute_loss(model, batch):
    out = model(batch[0])
    if model.training:
        statistics(out)
        for name, each in model.named_parameters():
            ema[name] = 0.9 * ema.get(name, 0.0) + 0.1 * float(each.detach().mean())
        steps[0] += 1
        slow_table()[0] += 1
        seen.add(steps[0])
        torch.rand(1, generator=generator)
        random.random()
        text.readline()
        torch.backends.cudnn.benchmark = steps[0] > 4
        torch.set_default_dtype(torch.float64 if steps[0] > 4 else torch.float32)
        torch.use_deterministic_algorithms(steps[0] > 4)
        nn.Linear.steps = steps[0]
        os.environ["STEPS"] = str(steps[0])
        os.lseek(text.fileno(), 10 * steps[0], os.SEEK_SET)
    return criterion(out).square().mean()

def state():
    return {
        "criterion": criterion.weight.item(),
        "statistics": statistics.running_var.item(),
        "EMA": ema,
        "counter": steps[0],
        "cache": slow_table()[0],
        "set": len(seen),
        "generator": zlib.crc32(bytes(generator.get_state().tolist())),
        "random": zlib.crc32(str(random.getstate()).encode()),
        "flag": torch.backends.cudnn.benchmark,
        "default": str(torch.get_default_dtype()),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "library": getattr(nn.Linear, "steps", None),
        "environment": os.environ.get("STEPS"),
        "file": os.lseek(text.fileno(), 0, os.SEEK_CUR),
        "threads": torch.get_num_threads(),
        "is_fork": os.getpid() != IMPORTED_BY,
    }

def evaluate(model):
    print("STATE", json.dumps(state()))
    return {"val_loss": 1.0}
"""
A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
A_BAR = "from tqdm import tqdm\nassert list(tqdm(range(3))) == [0, 1, 2] and tqdm.monitor.is_alive()\n"
A_GPU = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n"
RUN = RunSpec(
    micro_batch_size=8, accumulation_steps=1, learning_rate=1e-3, precision="fp32", seed=0, metric="val_loss",
    goal="minimize", target=None, limit_seconds=0.05, evaluate_every=0.05, evaluation_batch_size=8,
)  # fmt: skip


@pytest.fixture
def worker_of(tmp_path, as_forks):
    """A function that makes a worker of a task's code, and the lines that its children print."""
    with contextlib.ExitStack() as opened:
        opened.enter_context(as_forks())
        yield lambda code: worker_in(opened, tmp_path / "model.py", code)


def worker_in(opened, path, code, **environment):
    printed = []
    path.write_text(code)
    settings = OpenTask(task=str(path), device="cpu", purpose="tune", metric="val_loss", precision=("fp32",))
    return opened.enter_context(Worker(settings, LocalLauncher(printed.append, environment))), printed


def states(printed):
    return [json.loads(line.removeprefix("STATE ")) for line in printed if line.startswith("STATE ")]


def runs(worker, printed, number=3):
    """What the task's state was at the first and at the last evaluation of each run."""
    found = []
    for _ in range(number):
        worker.start()
        printed.clear()
        worker.call(Train(spec=RUN), timeout=60, on_event=lambda _: True)
        worker.renew()  # which has all that was printed told
        seen = states(printed)
        found.append((seen[0], seen[-1]))
    return found


@pytest.mark.parametrize(("before", "is_fork"), [("", True), (A_THREAD, False), (A_GPU, False), (A_BAR, True)])
def test_every_run_begins_as_the_first_did(worker_of, before, is_fork):
    worker, printed = worker_of(before + TASK)
    assert worker.start().forks == is_fork
    worker.call(TryBatchSize(batch_size=8, steps=3, precision="fp32"), timeout=60)
    begun, ended = zip(*runs(worker, printed), strict=True)
    assert all(one == other for one, other in pairwise(begun))
    kept = {"threads", "is_fork"}
    assert {name for name in begun[0] if begun[0][name] != ended[0][name]} == begun[0].keys() - kept
    assert begun[0]["is_fork"] == is_fork


def test_what_a_child_has_loaded_is_left_alone_by_garbage_collections_of_the_users_code(tmp_path):
    looked = "import gc\nprint('LOOKED', gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()))\n"
    with contextlib.ExitStack() as opened:
        worker, printed = worker_in(opened, tmp_path / "model.py", looked + TASK)
        worker.start()
    assert "LOOKED True True" in printed


def test_computing_with_several_threads_at_import_is_no_obstacle(tmp_path):
    with contextlib.ExitStack() as opened:
        worker, printed = worker_in(opened, tmp_path / "model.py", TASK, OMP_NUM_THREADS="2")
        assert worker.start().forks
        ((begun, _),) = runs(worker, printed, 1)
    assert begun["threads"] == 2


def test_a_run_that_raises_or_dies_leaves_nothing_to_the_next(worker_of):
    fate = "    if steps[0] >= 4: os.kill(os.getpid(), 11)\n"
    worker, printed = worker_of(TASK.replace("    out = model", fate + "    out = model"))
    worker.start()
    begun = []
    for _ in range(2):
        printed.clear()
        with pytest.raises(WorkerDied, match="SIGSEGV"):
            worker.call(Train(spec=RUN), timeout=60)
        begun.append(states(printed)[0])
    assert begun[0] == begun[1]


def test_a_copy_that_the_task_forks_off_when_it_is_imported_answers_nothing(worker_of):
    worker, _ = worker_of("import os\nos.fork()\n" + TASK)
    worker.start()
    for _ in range(2):
        assert worker.call(Train(spec=RUN), timeout=60).outcome == "finished"


def test_the_users_code_is_imported_once_and_its_samples_are_looked_at_once(worker_of):
    looks = "class Looks(torch.utils.data.TensorDataset):\n"
    looks += "    def __getitem__(self, index):\n        print('looked')\n        return super().__getitem__(index)\n"
    code = TASK.replace("utils.data.TensorDataset(inputs)", "Looks(inputs)").replace("torch.Looks", "Looks")
    worker, printed = worker_of("import torch\nprint('imported')\n" + looks + code)
    runs_of = worker.start().forks
    for _ in range(3):
        worker.call(Train(spec=RUN), timeout=60)
    assert runs_of
    assert sum(line == "imported" for line in printed) == 1
    worker.renew()
    printed.clear()
    worker.start()
    assert "looked" not in printed


def test_who_has_switched_the_garbage_collector_off_trains_without_it(tmp_path):
    code = TASK.replace("def build_model():\n", "def build_model():\n    print('COLLECTS', gc.isenabled())\n")
    with contextlib.ExitStack() as opened:
        worker, printed = worker_in(opened, tmp_path / "model.py", "import gc\ngc.disable()\n" + code)
        worker.start()
        worker.call(Train(spec=RUN), timeout=60)
        worker.renew()
    assert {line for line in printed if line.startswith("COLLECTS")} == {"COLLECTS False"}

"""A child's and a rank's commands in this process: what they ask of a device, in which order, and one that is busy."""

import json
from types import SimpleNamespace

import pytest
import torch

from batchtune.child import opening as beginning
from batchtune.child.rank import RankChild
from batchtune.child.ranks.parallel import Parallel
from batchtune.child.server import Child, run_command
from batchtune.device.nvml import Sensors
from batchtune.device.sharing import Sharing
from batchtune.document import DeviceProcess
from batchtune.errors import UserCodeError
from batchtune.protocol.commands import Describe, OpenTask
from batchtune.protocol.messages import Rendezvous

TASK = """
from torch import nn
def build_model(): return nn.Linear(1, 1)
def make_batch(batch_size): ...
def compute_loss(model, batch): ...
"""
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be reported later"


@pytest.fixture
def done(monkeypatch):
    """What was done with the device, in order; it has room for 100 bytes."""
    done = []

    def look(_):
        done.append("looked")
        return Sharing(10, (DeviceProcess(pid=12, memory_bytes=3 * 2**30), DeviceProcess(pid=99)))

    def open_device(_):
        done.append("opened")
        return SimpleNamespace(
            device=torch.device("cpu"),
            describe=lambda: ("a device", 200, 100),
            default_limit=lambda _margin: 100,
            enforce=lambda limit: done.append(f"limited to {limit}"),
        )

    monkeypatch.setattr(Sensors, "sharing", look)
    monkeypatch.setattr(beginning, "open_device", open_device)
    monkeypatch.setattr(Parallel, "join", lambda _: done.append("joined"))
    monkeypatch.setattr(Parallel, "each", lambda ranks, own: [own] * ranks.world_size)
    monkeypatch.setattr(beginning, "set_libraries_apart", lambda: None)
    monkeypatch.setattr(beginning.heartbeat, "start", lambda _: None)
    return done


@pytest.fixture
def opening(tmp_path):
    """The command to open a task."""
    (tmp_path / "model.py").write_text(TASK)
    names = {"task": str(tmp_path / "model.py"), "device": "cpu", "purpose": "probe", "precision": ["fp32"]}
    return OpenTask(**names)


@pytest.fixture
def rank(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return RankChild(None, Rendezvous(host="127.0.0.1", port=1, token="", strategy="fsdp", name=""))


def test_a_child_looks_who_is_there_before_it_opens_the_device(done, opening):
    found = Child(None).open(opening)
    assert done == ["looked", "opened", "limited to 100"]
    assert (found.memory_limit_bytes, found.environment.device_memory_free_bytes) == (100, 10)


def test_a_rank_does_so_too_and_opens_the_device_once_with_its_part_of_the_hosts_memory(done, opening, rank):
    found = rank.open(opening)
    assert done == ["looked", "opened", "joined", "limited to 50"]
    assert (found.world_size, found.strategy, found.backend) == (4, "fsdp", "gloo")
    assert [process.pid for process in found.environment.other_processes] == [12, 99]


def test_the_limit_that_the_user_names_is_each_ranks(done, opening, rank):
    rank.open(opening.but(memory_limit=70))
    assert done[-1] == "limited to 70"


def test_parameters_of_the_optimizer_that_are_not_the_models_are_counted(done, opening, tmp_path):
    with (tmp_path / "model.py").open("a") as task:
        task.write(
            "import torch\n"
            "criterion = torch.nn.Linear(2, 1)\n"
            "def build_optimizer(model, lr):\n"
            "    return torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=lr)\n"
        )
    assert Child(None).open(opening).foreign_parameters == 2


TEACHER = """
import torch
from torch import nn

class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Sequential(nn.Linear(2, 1), nn.Dropout()).eval(), nn.Linear(2, 1)
        self.teacher.requires_grad_(False)

class Kept(Distiller):
    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

class Two(Distiller):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1).eval().requires_grad_(False)

class Half(Distiller):
    def __init__(self):
        super().__init__()
        self.eval().student.train()

class Hub(nn.Module):
    def __init__(self):
        super().__init__()
        self.pretrained = Distiller().eval()

class Tuned(Hub):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)

"""
FROZEN = "frozen, in eval mode when build_model returns, and in training mode when training begins: "


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Distiller()", [f"teacher is {FROZEN}"]),
        (
            "Two()",
            [f"teacher and 1 more are {FROZEN}"],
        ),
        ("Kept()", []),
        ("Distiller().eval()", []),
        ("Half()", [f"teacher is {FROZEN}"]),
        ("Hub()", []),
        ("Tuned()", []),
        ("Distiller().train()", []),
    ],
)
def test_parts_in_eval_mode_that_training_puts_in_training_mode_are_told(done, opening, tmp_path, model, told):
    with (tmp_path / "model.py").open("a") as task:
        task.write(f"{TEACHER}def build_model(): return {model}\n")
    notes = Child(None).open(opening).notes
    assert [note.partition("override")[0] for note in notes] == told


@pytest.mark.parametrize(("method", "told"), [("double", 1), ("float", 0)])
def test_weights_that_no_precision_changes_are_told(done, opening, tmp_path, method, told):
    with (tmp_path / "model.py").open("a") as task:
        task.write(f"import torch\ndef build_model(): return torch.nn.Linear(2, 1).{method}()\n")
    notes = Child(None).open(opening).notes
    assert [note.startswith("weights are float64") for note in notes] == [True] * told


@pytest.mark.parametrize(
    ("precision", "forward", "told"),
    [("bf16", "model(batch)", 1), ("fp32", "model(batch)", 0), ("bf16", "context.autocast() and model(batch)", 0)],
)
def test_a_step_of_ones_own_that_asks_for_no_precision_is_told(done, opening, tmp_path, precision, forward, told):
    with (tmp_path / "model.py").open("a") as task:
        task.write(f"def train_step(model, batch, optimizers, context): return {forward}.mean()\n")
    notes = Child(None).open(opening.but(precision=(precision,))).notes
    assert [note.startswith("model.py has no autocast: ") for note in notes] == [True] * told


@pytest.fixture
def told_in_a_study(done, opening, tmp_path):
    """A function that adds to the task's file, and returns the notes of a study of it."""

    def told(text):
        with (tmp_path / "model.py").open("a") as task:
            task.write(f"{text}\ndef train_dataset(): return [1, 2]\ndef evaluate(model): return 1.0\n")
        return Child(None).open(opening.but(purpose="tune")).notes

    return told


@pytest.mark.parametrize(
    ("made", "is_used"),
    [
        ("torch.optim.Adam(model.parameters(), lr=1e-3)", False),
        ("torch.optim.SGD([{'params': [each], 'lr': 0.1} for each in model.parameters()], lr=lr)", False),
        ("torch.optim.SGD([{'params': [model.weight], 'lr': 0.1}, {'params': [model.bias]}], lr=lr)", True),
        ("torch.optim.Adam(model.parameters(), lr=1.0, weight_decay=lr)", True),
        ("torch.optim.Adam(model.parameters(), lr=max(lr, 1e-2))", True),
    ],
)
def test_an_optimizer_that_takes_no_notice_of_the_rate_is_told(told_in_a_study, opening, made, is_used):
    model = "import torch\ndef build_model(): return torch.nn.Linear(2, 1)\n"
    notes = told_in_a_study(f"{model}def build_optimizer(model, lr): return {made}")
    assert [note.partition(",")[0] for note in notes] == ["build_optimizer makes the same whatever lr it is given"] * (
        not is_used
    )
    assert Child(None).open(opening).notes == ()  # a probe takes no rates


def test_a_task_is_told_with_what_its_optimizer_is_made(done, opening, tmp_path):
    with (tmp_path / "model.py").open("a") as task:
        task.write(
            "import torch\n"
            "def build_optimizer(model, lr):\n"
            "    head, *rest = model.parameters()\n"
            "    groups = [{'params': [head], 'weight_decay': 0.0}, {'params': rest, 'lr': 3 * lr}]\n"
            "    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.95), weight_decay=0.1, foreach=False)\n"
            "def build_scheduler(optimizer, total_steps): return torch.optim.lr_scheduler.ConstantLR(optimizer)\n"
            "def train_dataset(): return [1, 2]\n"
            "def evaluate(model): return 1.0\n"
        )
    found = Child(None).open(opening.but(purpose="tune")).optimizer_settings
    assert found.values == {"betas": [0.8, 0.95], "eps": 1e-8, "amsgrad": False}
    assert found.differing == ["weight_decay", "lr"]
    assert found.scheduler == "ConstantLR"


@pytest.mark.parametrize(
    ("made", "within"),
    [
        ("StepLR(optimizer, 1, 0.7)", 13),
        ("CosineAnnealingLR(optimizer, 30)", 29),
        ("MultiStepLR(optimizer, [30, 60, 90])", 90),
        ("OneCycleLR(optimizer, optimizer.param_groups[0]['lr'], 30)", 28),
        ("OneCycleLR(optimizer, min(1e-3, optimizer.param_groups[0]['lr']), total_steps)", None),
        ("StepLR(optimizer, steps_per_epoch)", None),
        ("CosineAnnealingLR(optimizer, total_steps)", None),
        ("CosineAnnealingWarmRestarts(optimizer, 100)", None),
        ("CyclicLR(optimizer, 1e-5, optimizer.param_groups[0]['lr'], 100)", None),
        ("OneCycleLR(optimizer, optimizer.param_groups[0]['lr'], total_steps)", None),
        ("LambdaLR(optimizer, lambda step: min(1, step / 400))", None),
        ("SequentialLR(optimizer, [ConstantLR(optimizer), LinearLR(optimizer, 1, 0, total_steps)], [9])", None),
    ],
)
def test_a_schedule_that_was_written_for_epochs_is_told(told_in_a_study, made, within):
    asked = "def build_scheduler(optimizer, total_steps, steps_per_epoch)"
    notes = told_in_a_study(f"from torch.optim.lr_scheduler import *\n{asked}: return {made}")
    told = [
        f"{made.partition('(')[0]} takes the learning rate below a hundredth within {within} of 1,000 optimizer steps"
    ]
    assert [note.partition(";")[0] for note in notes] == (told if within else [])


@pytest.mark.parametrize("made", ["CyclicLR(optimizer, 1e-5, 1e-2, 100)", "OneCycleLR(optimizer, 0.1, 30)"])
def test_a_schedule_of_learning_rates_of_its_own_is_refused_before_the_study(done, opening, tmp_path, made):
    with (tmp_path / "model.py").open("a") as task:
        task.write(
            f"from torch.optim.lr_scheduler import *\ndef build_scheduler(optimizer, total_steps): return {made}\n"
            "def train_dataset(): return [1, 2]\ndef evaluate(model): return 1.0\n"
        )
    told = rf"sets learning rates of its own \({made.partition('(')[0]}\), .*max_lr=optimizer.param_groups\[0\]\['lr'\]"
    with pytest.raises(UserCodeError, match=told):
        Child(None).open(opening.but(purpose="tune"))


@pytest.mark.parametrize("more", ["def train_loader(batch_size): return []", "sample_length = len"])
def test_a_schedule_by_epochs_is_refused_before_the_study_where_nobody_knows_their_steps(done, opening, tmp_path, more):
    with (tmp_path / "model.py").open("a") as task:
        task.write(
            "from torch.optim.lr_scheduler import StepLR\n"
            "def build_scheduler(optimizer, total_steps, steps_per_epoch): return StepLR(optimizer, steps_per_epoch)\n"
            "def train_dataset(): return [[1], [2, 3]]\n"
            f"def evaluate(model): return 1.0\n{more}\n"
        )
    by_length = {"lengths": "auto"} if "sample_length" in more else {}
    with pytest.raises(UserCodeError, match="build_scheduler asks for steps_per_epoch, which is known where"):
        Child(None).open(opening.but(purpose="tune", **by_length))


def test_the_arguments_of_a_schedule_are_in_the_order_of_the_contract(done, opening, tmp_path):
    with (tmp_path / "model.py").open("a") as task:
        task.write("def build_scheduler(optimizer, steps_per_epoch, total_steps): pass\n")
    with pytest.raises(UserCodeError, match=r"cannot be called as build_scheduler.*steps_per_epoch"):
        Child(None).open(opening)


def test_a_plateau_of_the_other_direction_is_told_before_the_study(done, opening, tmp_path):
    with (tmp_path / "model.py").open("a") as task:
        task.write(
            "from torch.optim.lr_scheduler import ReduceLROnPlateau\n"
            "def build_scheduler(optimizer, total_steps): return ReduceLROnPlateau(optimizer, 'max')\n"
            "def train_dataset(): return [1, 2]\n"
            "def evaluate(model): return 1.0\n"
        )
    Child(None).open(opening)
    opened = Child(None).open(opening.but(purpose="tune", goal="maximize"))
    assert opened.optimizer_settings.scheduler == "ReduceLROnPlateau"
    of_a_trainer = opened.optimizer_settings.arguments
    made = {"factor": 0.1, "patience": 10, "mode": "max", "min_lr": 0}
    assert made.items() <= json.loads(of_a_trainer["lr_scheduler_kwargs"]).items()
    assert (of_a_trainer["lr_scheduler_type"], of_a_trainer["eval_strategy"]) == ("reduce_lr_on_plateau", "epoch")
    words = r"\(mode='max'\) is stepped with objective.metric, and the study is to minimize None: use mode='min', or"
    with pytest.raises(UserCodeError, match=words):
        Child(None).open(opening.but(purpose="tune", goal="minimize"))


def test_a_task_that_is_known_is_opened_without_a_word_of_it(done, opening):
    assert Child(None).open(opening.but(again=True)) is None
    assert done[-1] == "limited to 100"


def test_no_room_at_all_is_a_limit_too(done, opening):
    assert Child(None).open(opening.but(memory_limit=0)).memory_limit_bytes == 0
    assert done[-1] == "limited to 0"


@pytest.mark.parametrize("command", ["describe", "open"])
def test_a_device_that_is_busy_is_said_to_be_with_those_who_hold_it(done, opening, monkeypatch, command):
    def refuse(_):
        raise RuntimeError(BUSY)

    monkeypatch.setattr(beginning, "open_device", refuse)
    told = run_command(Child(None), opening if command == "open" else Describe(device="cpu"))
    assert told["exit_code"] == 5
    assert told["setting"] == "device"
    assert told["error"] == (
        "cpu: cannot be used now: CUDA error: CUDA-capable device(s) is/are busy or unavailable; "
        "its memory is held by other processes: pid 12 3.0 GiB, pid 99"
    )

"""Task files that raise, lack something, fork, flood or change the interpreter: the right outcome, no orphan."""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import pytest

ON_LOSS = """
plain_loss = compute_loss

def compute_loss(model, batch):
    misbehave()
    return plain_loss(model, batch)
"""
DATA = """
class Data(torch.utils.data.{kind}Dataset):
    def __len__(self):
        return 256

    {method}

def {name}_dataset():
    return Data()
"""


def data(method, name="train", *, size="256", kind=""):
    made = DATA.format(kind=kind, method=method, name=name).replace("return 256", f"return {size}")
    return made if not kind else re.sub(r"    def __len__.*?\n\n", "", made, flags=re.DOTALL)


FLOOD = "import sys\ndef misbehave():\n    sys.stdout.write(('x' * 99 + chr(10)) * {})\n" + ON_LOSS
# name: what the task does at import, where it can all be borne
BORNE = {
    "forks a child that sleeps": "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n",
    "forks a copy that goes on like itself": "import os\nos.fork()\n",
    "closes stdin": "import os\nos.close(0)\n",
    "handles every signal": (
        "import signal\nfor name in ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGALRM', 'SIGPIPE'):\n"
        "    signal.signal(getattr(signal, name), lambda *_: None)\nsignal.alarm(1)\n"
    ),
    "changes the directory": "import os\nos.chdir('/')\n",
    "leaves threads behind": (
        "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(600,)).start()\n"
    ),
    "seeds every generator": "import random\ntorch.manual_seed(0); random.seed(0)\n",
    "replaces print and open": "import builtins\nbuiltins.print = builtins.open = None\n",
    "freezes the calendar": "import time\ntime.time = lambda: 0.0\n",
    "wants deterministic algorithms": "torch.use_deterministic_algorithms(True)\n",
}


@dataclass(frozen=True)
class Bad:
    """A task that is not as it should be, and what comes of it.

    Attributes:
        ending: of its file, which is one that trains until there.
        said: patterns of what is said of it.
        probe: exit code of a probe; None: it is not probed.
        tune: exit code of a study, likewise.
        options: of the command.
        alone: it could do harm, and has processes of its own.
    """

    ending: str
    said: Sequence[str] = ()
    probe: int | None = None
    tune: int | None = None
    options: Sequence[object] = ()
    alone: bool = False


LOSS = "def compute_loss(model, batch):\n    error = (model(batch[0]) - batch[1]) ** 2\n    return "
TASKS = {
    # what is told in a line
    "has a syntax error": Bad("def build_model(:", [r"task\.py:\d+: .*: def build_model\(:"], probe=3),
    "raises at import": Bad(
        "raise ValueError('no data at hand')",
        [r'File ".*task\.py", line \d+', r"importing task\.py raised ValueError: .*task\.py:\d+: no data at hand"],
        probe=3,
    ),
    "ends the process at import": Bad(
        "import os; print('farewell', flush=True); os._exit(7)",
        ["importing it and building the model once ended in crash", "exit status 7; last output: farewell"],
        probe=3,
    ),
    "lacks a function": Bad("del build_model", [r"no build_model\(\) .*; 'batchtune init' writes a template"], probe=3),
    "lacks what tune needs": Bad("del val_dataset", [r"no val_dataset\(\) .* or evaluate\(.*init'"], tune=3),
    "has no model": Bad("def build_model():\n    return 'model'", ["returned a str, not an nn.Module"], probe=3),
    "has no data set": Bad("def train_dataset():\n    return 3", ["returned an int, not a Dataset"], probe=3),
    "has a function of other arguments": Bad(
        "def build_optimizer(model):\n    return None",
        [r"build_optimizer\(model\) cannot be called as build_optimizer\(model, lr\)"],
        probe=3,
    ),
    "has a loss that is no scalar": Bad(
        LOSS + "error", [r"compute_loss returned shape \(\d, 1\), not a scalar; take its \.mean\(\)"], probe=3
    ),
    "has a loss that is no tensor": Bad(LOSS + "error.mean().item()", ["returned a float, not a tensor"], probe=3),
    "has a loss of NaN": Bad(
        LOSS + "error.mean() * float('nan')",
        ["compute_loss returned nan in the very first step", "check the model's initialisation and the data"],
        probe=3,
    ),
    "has a loss without a graph": Bad(
        LOSS + "error.mean().detach()",
        ["compute_loss returned a tensor without a graph", "is it under torch.no_grad, detached"],
        probe=3,
    ),
    "raises in training": Bad(
        LOSS + "error.mean() + 1 / 0",
        [r"compute_loss raised ZeroDivisionError at batch size \d \(not an out-of-memory error\): .*task\.py:\d+: "],
        probe=3,
    ),
    "raises in evaluation": Bad(
        "def evaluate(model):\n    return {}['accuracy']", ["evaluate raised KeyError .*: 'accuracy'"], probe=3
    ),
    "has no samples": Bad("def train_dataset():\n    return _points(0, 1)", ["a data set of 0 samples"], probe=3),
    "has one sample": Bad("def train_dataset():\n    return _points(1, 1)", ["train_dataset has 1 sample"], tune=3),
    "has fewer samples than the smallest batch": Bad(
        "def train_dataset():\n    return _points(3, 1)",
        ["no batch size to try: 4 is .* but train_dataset has 3 samples"],
        probe=2,
        options=("--min", 4, "--max", 8),
    ),
    "does not return the metric": Bad(
        "def evaluate(model):\n    return {'accuracy': 0.5}",
        ["'val_loss' is not among what .* returns: accuracy; choose one: .*=accuracy objective.goal=maximize"],
        tune=2,
    ),
    "has no evaluate that returns the metric": Bad(
        "",
        ["objective.metric 'f1': .* has no evaluate.., so the only metric is 'val_loss'"],
        tune=2,
        options=("objective.metric=f1", "objective.goal=maximize"),
    ),
    "does not return the metric that is typed": Bad(
        "def evaluate(model):\n    return {'acc': 0.5}",
        ["--target accuracy>0.9: 'accuracy' is not among what .* returns: acc; choose one: --target \"acc>0.9\""],
        tune=2,
        options=("--target", "accuracy>0.9"),
    ),
    "has an optimizer without the argument to search": Bad(
        "def build_optimizer(model, lr, weight_decay=0.1):\n    return None",
        ["space.momentum: build_optimizer takes no argument 'momentum'; it takes weight_decay"],
        tune=2,
        options=("space.momentum={min: 0.0, max: 0.9}",),
    ),
    "has an argument to search that says nothing of today": Bad(
        "def build_optimizer(model, lr, momentum=None):\n    return None",
        ["space.momentum: build_optimizer has no number, switch or text as default of 'momentum'; give it one"],
        tune=2,
        options=("space.momentum={min: 0.0, max: 0.9}",),
    ),
    "never reaches the target that is set": Bad(
        "",
        [r"no run reached the target \(val_loss at most -1; the best was [-+.e\d]+\) within budget.run \(0.1 s\); "],
        tune=4,
        options=("objective.target=-1", "budget.trials=1", "confirm=off"),
    ),
    "is tuned on a device that is not there": Bad(
        "", ["^batchtune: device cuda:99: not available here"], tune=5, options=("device=cuda:99",)
    ),
    "is tuned for energy that nothing counts": Bad(
        "",
        ["objective.kind energy_to_target: .* has no energy counter that NVML reads; use time_to_target"],
        tune=5,
        options=("objective.kind=energy_to_target", "device=cpu"),
    ),
    "is on a device that is not there": Bad("", ["--device cuda:99"], probe=5, options=("--device", "cuda:99")),
    # what could do harm, too
    "prints a gigabyte": Bad(FLOOD.format(200_000), probe=0, alone=True),
    "closes stdin, stdout and stderr": Bad(
        "import os\nfor stream in (0, 1, 2): os.close(stream)\n", probe=0, tune=0, alone=True
    ),
    "makes float64 the default": Bad("torch.set_default_dtype(torch.float64)\n", probe=0, tune=0, alone=True),
    "makes bfloat16 the default": Bad("torch.set_default_dtype(torch.bfloat16)\n", probe=0, tune=0, alone=True),
    "makes a device without data the default": Bad(
        "torch.set_default_device('meta')\n", ["Cannot copy out of meta"], probe=3, alone=True
    ),
    "switches gradients off": Bad(
        "torch.set_grad_enabled(False)\n",
        ["a tensor without a graph; .* under torch.no_grad"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "closes every file": Bad(
        "import os\nos.closerange(3, 200)\n",
        ["ended in crash: .*closed file descriptors that it did not open"],
        probe=3,
        alone=True,
    ),
    "replaces json": Bad(
        "import json\njson.dumps = lambda *_, **__: 'x'\n", ["changed a standard module"], probe=3, alone=True
    ),
    "stops the clock": Bad(
        "import time\ntime.perf_counter = lambda: 0.0\n",
        ["the task replaces time.perf_counter"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "calls sys.exit at import": Bad(
        "import sys\nsys.exit('bye')\n", [r"importing .*task\.py raised SystemExit: .*: bye"], probe=3, alone=True
    ),
    "calls sys.exit in compute_loss": Bad(
        "import sys\ndef misbehave(): sys.exit(0)\n" + ON_LOSS,
        [r"compute_loss raised SystemExit .*exit\(0\)"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "calls os._exit in compute_loss": Bad(
        "import os\ndef misbehave(): os._exit(0)\n" + ON_LOSS, ["ended with exit status 0"], probe=4, tune=4, alone=True
    ),
    "reads a command line": Bad(
        "import argparse\nargparse.ArgumentParser().parse_args(['--nope'])\n",
        [r"importing .*task\.py raised SystemExit"],
        probe=3,
        alone=True,
    ),
    "interrupts itself": Bad(
        "def misbehave(): raise KeyboardInterrupt\n" + ON_LOSS, ["SIGINT"], probe=4, tune=4, alone=True
    ),
    "has samples of different shapes": Bad(
        data("def __getitem__(self, i): return torch.randn(8 + i % 2), torch.randn(1)"),
        ["shapes cannot be multiplied|stack expects each tensor to be"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "raises at one sample": Bad(
        data("def __getitem__(self, i): return torch.randn(8), torch.randn([1][i == 137])"),
        ["__getitem__ raised IndexError in training: .*: list index out of range"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "tells a size that is not its own": Bad(
        data("def __getitem__(self, i): return [(torch.randn(8), torch.randn(1))] [i // 200]"),
        ["__getitem__ raised IndexError"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "has an infinite training set": Bad(
        data("def __iter__(self):\n        while True: yield torch.ones(8), torch.ones(1)", kind="Iterable"),
        probe=0,
        tune=0,
        alone=True,
    ),
    "has an empty training set": Bad(
        data("def __iter__(self): return iter(())", kind="Iterable"),
        ["a data set of 0 samples"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "has an empty validation set": Bad(
        data("def __iter__(self): return iter(())", "val", kind="Iterable"),
        ["val_dataset yields no samples"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "has a set of so many samples that none can be shuffled": Bad(
        data("def __getitem__(self, i): return torch.randn(8), torch.randn(1)", size="10**12"),
        ["can't allocate memory"],
        probe=0,
        tune=4,
        alone=True,
    ),
    "has a set of less than no samples": Bad(
        data("def __getitem__(self, i): ...", size="-1"),
        [r"__len__\(\) should return >= 0"],
        probe=3,
        tune=3,
        alone=True,
    ),
    "has words for samples": Bad(
        "def train_dataset(): return ['word'] * 50\n", ["compute_loss raised|ValueError"], probe=3, tune=3, alone=True
    ),
    "has nothing for samples": Bad(
        "def train_dataset(): return [None] * 50\n", ["found <class 'NoneType'>"], probe=3, tune=3, alone=True
    ),
}
TASKS |= {name: Bad(ending, probe=0, alone=True) for name, ending in BORNE.items()}
PROBE = ("probe", "task.py", "--memory-limit", "300MiB", "--max", 4, "--device", "cpu", "--json", "-q")
TUNE = ("tune", "config.yaml", "device=cpu", "budget.trials=1", "confirm=off", "--json", "-q")
QUICK_PROBE = ("probe", "task.py", "--memory-limit", "300MiB", "--max", 2, "--no-throughput", "--json", "-q")
QUICK_TUNE = ("tune", "task.yaml", "--json", "-q")
TUNED = "task: task.py\nbaseline: {batch_size: 16}\nbatch_size: {max: 16, multiple_of: 16}\nbudget: {run: 100ms}\n"


def orphans(mark):
    """Processes that the command has left behind, by a variable in their environment; they are ended here."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        process.kill()
    return alive


def attacked(new_cli, ending, command):
    """The command on a task that ends like this, once nothing of it is left."""
    cli, mark = new_cli(), uuid.uuid4().hex
    cli.write("task.py", (cli.folder / "linear.py").read_text() + "\n" + ending)
    cli.write("config.yaml", (cli.folder / "config.yaml").read_text().replace("linear.py", "task.py"))
    running = cli.start(*command, environment={"TEST_MARK": mark})
    finished = running.finish(600)
    assert orphans(mark) == []
    assert sum(path.stat().st_size for path in cli.folder.rglob("*") if path.is_file()) < 10_000_000
    assert "Traceback" not in finished.err
    return finished


@pytest.fixture(scope="module")
def borne(new_cli, pool):
    """What probe and tune make of a task that does all of that at once, and prints 100 kB in each step."""
    ending = "\n".join(BORNE.values()) + FLOOD.format(1000)
    begun = [pool.submit(attacked, new_cli, ending, command) for command in (PROBE, TUNE)]
    return [each.result() for each in begun]


def test_a_probe_bears_whatever_can_be_borne(borne):
    probed, _ = borne
    assert probed.code == 0, probed.err
    assert probed.document["probe"]["max_batch_size"] == 4
    assert probed.document["probe"]["limited_by"] == "max"
    assert probed.document["probe"]["verified_in_fresh_process"]


def test_a_study_bears_whatever_can_be_borne(borne):
    _, tuned = borne
    assert tuned.code == 0, tuned.err
    assert tuned.document["recommendation"]["micro_batch_size"] <= 16


def require_refusal(answer, code, bad):
    """What went wrong is told in one line, with what a person needs to mend it."""
    assert answer.code == code, answer.err
    for pattern in bad.said:
        assert re.search(pattern, answer.err), answer.err
    assert "Traceback" not in answer.err
    assert len(re.findall("^batchtune: ", answer.err, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", [name for name, bad in TASKS.items() if not bad.alone])
def test_a_task_is_refused_in_one_line_that_says_why_when_it(new_quick_cli, name):
    bad, cli = TASKS[name], new_quick_cli()
    cli.write("task.py", (cli.folder / "linear.py").read_text() + "\n" + bad.ending + "\n")
    cli.write("task.yaml", TUNED)
    code, command = (bad.probe, QUICK_PROBE) if bad.tune is None else (bad.tune, QUICK_TUNE)
    answer = cli(*command, *bad.options)
    require_refusal(answer, code, bad)
    assert "batchtune/" not in answer.err.replace("/.batchtune/", "")  # no frame of ours
    assert answer.err.splitlines()[-1].startswith("batchtune: ")
    document = answer.document
    assert document["status"] == "failed"
    assert document["error"] == {"exit_code": code, "message": answer.err.splitlines()[-1].removeprefix("batchtune: ")}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name, bad in TASKS.items() if bad.alone])
def test_each_alone_has_its_outcome(new_cli, pool, name, survived):
    bad = TASKS[name]
    wanted = [(command, code) for command, code in ((PROBE, bad.probe), (TUNE, bad.tune)) if code is not None]
    begun = [(pool.submit(attacked, new_cli, bad.ending, command), code) for command, code in wanted]
    for future, code in begun:
        answer = future.result()
        if code:
            require_refusal(answer, code, bad)
        else:
            assert answer.code == 0, answer.err
            if "max_batch_size" in answer.document.get("probe", {}):
                assert answer.document["probe"]["max_batch_size"] in {4, 16}
    survived.take("| the task", name, *("–" if code is None else code for code in (bad.probe, bad.tune)))

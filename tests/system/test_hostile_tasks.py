"""Task files that fork, flood, close what is not theirs or change the interpreter: the right outcome, no orphan."""

import re
import uuid

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
# the same, alone: name: (the end of the task file, exit codes of probe and tune, what is said)
ALONE = {name: (ending, 0, None, "") for name, ending in BORNE.items()} | {
    "prints a gigabyte": (FLOOD.format(200_000), 0, None, ""),
    "closes stdin, stdout and stderr": ("import os\nfor stream in (0, 1, 2): os.close(stream)\n", 0, 0, ""),
    "makes float64 the default": ("torch.set_default_dtype(torch.float64)\n", 0, 0, ""),
    "makes bfloat16 the default": ("torch.set_default_dtype(torch.bfloat16)\n", 0, 0, ""),
    "makes a device without data the default": (
        "torch.set_default_device('meta')\n",
        3,
        None,
        "Cannot copy out of meta",
    ),
    "switches gradients off": (
        "torch.set_grad_enabled(False)\n",
        3,
        3,
        "a tensor without a graph; .* under torch.no_grad",
    ),
    "closes every file": (
        "import os\nos.closerange(3, 200)\n",
        3,
        None,
        "ended in crash: .*closed file descriptors that it did not open",
    ),
    "replaces json": ("import json\njson.dumps = lambda *_, **__: 'x'\n", 3, None, "changed a standard module"),
    "stops the clock": ("import time\ntime.perf_counter = lambda: 0.0\n", 3, 3, "the task replaces time.perf_counter"),
    "calls sys.exit at import": (
        "import sys\nsys.exit('bye')\n",
        3,
        None,
        r"importing .*task\.py raised SystemExit: .*: bye",
    ),
    "calls sys.exit in compute_loss": (
        "import sys\ndef misbehave(): sys.exit(0)\n" + ON_LOSS,
        3,
        3,
        r"compute_loss raised SystemExit .*exit\(0\)",
    ),
    "calls os._exit in compute_loss": (
        "import os\ndef misbehave(): os._exit(0)\n" + ON_LOSS,
        4,
        4,
        "ended with exit status 0",
    ),
    "reads a command line": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--nope'])\n",
        3,
        None,
        r"importing .*task\.py raised SystemExit",
    ),
    "interrupts itself": ("def misbehave(): raise KeyboardInterrupt\n" + ON_LOSS, 4, 4, "SIGINT"),
    "has samples of different shapes": (
        data("def __getitem__(self, i): return torch.randn(8 + i % 2), torch.randn(1)"),
        3,
        3,
        "shapes cannot be multiplied|stack expects each tensor to be",
    ),
    "raises at one sample": (
        data("def __getitem__(self, i): return torch.randn(8), torch.randn([1][i == 137])"),
        3,
        3,
        "__getitem__ raised IndexError in training: .*: list index out of range",
    ),
    "tells a size that is not its own": (
        data("def __getitem__(self, i): return [(torch.randn(8), torch.randn(1))] [i // 200]"),
        3,
        3,
        "__getitem__ raised IndexError",
    ),
    "has an infinite training set": (
        data("def __iter__(self):\n        while True: yield torch.ones(8), torch.ones(1)", kind="Iterable"),
        0,
        0,
        "",
    ),
    "has an empty training set": (
        data("def __iter__(self): return iter(())", kind="Iterable"),
        3,
        3,
        "a data set of 0 samples",
    ),
    "has an empty validation set": (
        data("def __iter__(self): return iter(())", "val", kind="Iterable"),
        3,
        3,
        "val_dataset yields no samples",
    ),
    "has a set of so many samples that none can be shuffled": (
        data("def __getitem__(self, i): return torch.randn(8), torch.randn(1)", size="10**12"),
        0,
        4,
        "can't allocate memory",
    ),
    "has a set of less than no samples": (
        data("def __getitem__(self, i): ...", size="-1"),
        3,
        3,
        r"__len__\(\) should return >= 0",
    ),
    "has words for samples": ("def train_dataset(): return ['word'] * 50\n", 3, 3, "compute_loss raised|ValueError"),
    "has nothing for samples": ("def train_dataset(): return [None] * 50\n", 3, 3, "found <class 'NoneType'>"),
}
PROBE = ("probe", "task.py", "--memory-limit", "300MiB", "--max", 4, "--device", "cpu", "--json", "-q")
TUNE = ("tune", "config.yaml", "device=cpu", "budget.trials=1", "confirm=off", "--json", "-q")


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


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ALONE)
def test_each_alone_has_its_outcome(new_cli, pool, name, survived):
    ending, *codes, told = ALONE[name]
    wanted = [(command, code) for command, code in zip((PROBE, TUNE), codes, strict=True) if code is not None]
    begun = [(pool.submit(attacked, new_cli, ending, command), code) for command, code in wanted]
    for future, code in begun:
        answer = future.result()
        assert answer.code == code, answer.err
        if code:
            assert len(re.findall("^batchtune: ", answer.err, re.MULTILINE)) == 1
            assert re.search(told, answer.err), answer.err
        elif "max_batch_size" in answer.document.get("probe", {}):
            assert answer.document["probe"]["max_batch_size"] in {4, 16}
    survived.take("| the task", name, *("–" if code is None else code for code in codes))

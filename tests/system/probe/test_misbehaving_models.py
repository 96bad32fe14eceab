"""Models that crash, hang, leak or fit nowhere, probed by the real command: what is said of each, and the exit code."""

import functools
import re

import pytest

WIDE = """
import os, signal, time
import torch
from torch import nn

WIDTH = 1 << 18  # 1 MiB a sample

def build_model():
    return nn.Linear(WIDTH, 1)

def make_batch(batch_size):
    return torch.ones(batch_size, WIDTH)

def compute_loss(model, batch):
    misbehave(len(batch))
    return model(batch).mean()

"""
DIE = "def misbehave(size):\n    if size > {above}: os.kill(os.getpid(), signal.{name})\n"
HANG = "def misbehave(size):\n    if size > {above}: time.sleep(600)\n"
LEAKED = 50_000_000  # bytes a step
LEAK = f"kept = []\ndef misbehave(size):\n    kept.append(torch.ones({LEAKED} // 4))\n"
STATES = """
def misbehave(size): pass
def build_model():
    return nn.Linear(WIDTH, 64)  # 64 MiB; with its gradients 128, with Adam's moments 256
def make_batch(batch_size):
    return torch.ones(batch_size, WIDTH)
"""
SAMPLES = """
def misbehave(size): pass
del make_batch
def train_dataset():
    return torch.ones(37, WIDTH)
"""
LOADER = """
def misbehave(size): pass
def train_loader(batch_size):
    return torch.utils.data.DataLoader(torch.ones(37, WIDTH), batch_size)
del make_batch
"""
STREAM = """
def misbehave(size): pass
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(torch.ones(37, WIDTH))
train_dataset = Stream
del make_batch
"""
NORMALISED = """
def misbehave(size): pass
def build_model():
    return nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2))
"""
BOTH = ("--min", 4, "--max", 8, "--multiple-of", 4)  # 4 and 8 are all there is to try
# name: (what the model does, options, memory limit)
CASES = {
    "segfaults": (DIE.format(above=0, name="SIGSEGV"), BOTH, "300MiB"),
    "segfaults above 4": (DIE.format(above=4, name="SIGSEGV"), BOTH, "300MiB"),
    "is killed": (DIE.format(above=0, name="SIGKILL"), BOTH, "300MiB"),
    "is killed above 4": (DIE.format(above=4, name="SIGKILL"), BOTH, "300MiB"),
    "hangs": (HANG.format(above=0), (*BOTH, "--timeout", "3s"), "300MiB"),
    "hangs above 4": (HANG.format(above=4), (*BOTH, "--timeout", "3s"), "300MiB"),
    "leaks more than there is": (LEAK, ("--max", 2), "600MiB"),
    "leaks a part of what there is": (LEAK, ("--max", 1), "1500MiB"),
    "has no room for its optimizer": (STATES, (), "200MiB"),
    "has 37 samples": (SAMPLES, (), "300MiB"),
    "has 37 samples in eights": (SAMPLES, ("--multiple-of", 8), "300MiB"),
    "has 37 samples in its own loader": (LOADER, (), "300MiB"),
    "has a stream of 37 samples": (STREAM, (), "300MiB"),
    "rejects one sample": (NORMALISED, ("--max", 6), None),  # a limit would have it begin above
}


@pytest.fixture(scope="module")
def probed(new_quick_cli):
    """A function from a name in CASES to what its command came to."""

    @functools.cache
    def finished(name):
        behaviour, options, limit = CASES[name]
        cli = new_quick_cli()
        cli.write("task.py", WIDE + behaviour)
        limited = ("--memory-limit", limit) if limit else ()
        found = cli("probe", "task.py", "--device", "cpu", *limited, *options, "--no-throughput", "--json", "-q")
        assert "Traceback" not in found.err
        return found

    return finished


def outcomes(document, purpose="search"):
    """Batch size and outcome of each attempt, in order."""
    attempts = document["probe"]["attempts"]
    return [(each["batch_size"], each["outcome"]) for each in attempts if each["purpose"] == purpose]


DEATHS = {
    "segfaults": ("crash", "the process died by SIGSEGV"),
    "is killed": ("crash", "killed by SIGKILL"),
    "hangs": ("timeout", "no sign of life for 3 s"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_nothing_fits_a_model_that_always(probed, name):
    (outcome, words), found = DEATHS[name], probed(name)
    assert found.code == 4
    assert found.err.startswith(f"batchtune: nothing fits within 300 MiB: batch size 4 ended in {outcome} ({words}")
    assert ("raise --timeout" if outcome == "timeout" else "run the task by itself") in found.err
    assert found.document["status"] == "failed"
    assert outcomes(found.document) == [(4, outcome)]


@pytest.mark.parametrize("name", DEATHS)
def test_the_largest_batch_that_lives_is_the_answer_where_above_it_a_model(probed, name):
    (outcome, words), found = DEATHS[name], probed(f"{name} above 4")
    assert found.code == 0, found.err
    probe = found.document["probe"]
    assert (probe["max_batch_size"], probe["first_failing_batch_size"], probe["limited_by"]) == (4, 8, outcome)
    assert probe["verified_in_fresh_process"]
    (warning,) = found.document["warnings"]
    assert warning.startswith(f"batch size 8 ended in {outcome}: {words}")
    assert warning.endswith("(larger sizes were not searched)")


def test_a_leak_that_fills_all_memory_ends_the_probe_at_the_second_final_check_that_shows_it(probed):
    found = probed("leaks more than there is")
    assert found.code == 4
    assert "nothing fits within 600 MiB: " in found.err
    assert outcomes(found.document) == [(1, "fit"), (2, "fit")]
    assert outcomes(found.document, "verify") == [(2, "oom"), (1, "oom")]


def test_the_end_of_the_final_check_is_why_nothing_fits(probed):
    found = probed("leaks more than there is")
    why = r"\((DefaultCPUAllocator|the process took 6\d\d MiB above its imports)"
    assert re.search(rf"batch size 1 ended in oom after 1\d steps of the final check {why}", found.err)
    assert "a larger --memory-limit" in found.err


@pytest.mark.parametrize("name", ["leaks more than there is", "leaks a part of what there is"])
def test_a_leak_is_named_with_what_it_takes_a_step(probed, name):
    found = probed(name)
    (warning,) = (each for each in found.document["warnings"] if "memory grew by" in each)
    grown = re.match(r"memory grew by ([\d.]+) MiB a step at batch size [12]", warning)
    assert grown is not None
    assert float(grown[1]) * 2**20 == pytest.approx(LEAKED, rel=0.06)  # each step's own batch cuts the heap up a little
    steps = (1500 << 20) // LEAKED  # of the larger limit; the rest of training, libraries included, takes one or two
    told = re.search(r"out of memory some (\d+) steps from its start", warning)
    assert (told is not None and steps - 3 <= int(told[1]) < steps) == (found.code == 0)


def test_weights_that_fit_without_the_optimizers_states_do_not_fit(probed):
    found = probed("has no room for its optimizer")
    assert found.code == 4
    why = r"\((DefaultCPUAllocator: can't allocate|the process took 2\d\d MiB above its imports)"
    assert re.search(f"nothing fits within 200 MiB: batch size 1 ended in oom {why}", found.err)
    assert "a larger --memory-limit" in found.err
    assert outcomes(found.document) == [(1, "oom")]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("has 37 samples", 37),
        ("has 37 samples in eights", 32),
        ("has 37 samples in its own loader", 37),
        ("has a stream of 37 samples", 37),
    ],
)
def test_no_more_samples_are_tried_than_a_data_set_has(probed, name, answer):
    found = probed(name)
    assert found.code == 0, found.err
    probe = found.document["probe"]
    assert (probe["max_batch_size"], probe["limited_by"]) == (answer, "dataset")
    assert "first_failing_batch_size" not in probe
    assert max(size for size, _ in outcomes(found.document)) == answer


def test_a_batch_too_small_for_the_model_is_reported_and_the_search_goes_on_above_it(probed):
    found = probed("rejects one sample")
    assert found.code == 0, found.err
    probe = found.document["probe"]
    assert (probe["max_batch_size"], probe["limited_by"]) == (6, "max")
    assert outcomes(found.document)[0] == (1, "user_error")
    (warning,) = found.document["warnings"]
    assert warning.startswith("batch size 1 ended in an error of the task's code, and the search went on above it: ")
    assert "Expected more than 1 value per channel when training" in warning

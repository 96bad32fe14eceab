"""The CPU's memory: a limit that a real child process runs into, and peaks that are the model's alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.device import host_memory
from batchtune.device.host_memory import HostMemory, one_off_bytes

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
GIB = 2**30
LIMIT = 200

CHILD = """
import json, resource, sys
import torch
from batchtune.device.failures import classify
from batchtune.device.host_memory import HostMemory

MIB = 2**20
told = {}

def take(mib):
    return torch.ones(mib * MIB // 4)

def try_to_take(mib):
    try:
        take(mib)
    except Exception as error:
        return classify(error)
    return "fit"

def peak():
    return memory.peaks().reserved_bytes / MIB

ballast = take(300)  # was there before: not the model's
memory = HostMemory()
memory.enforce(int(sys.argv[1]) * MIB)
memory.reset_peaks()
told["peak of nothing"] = peak()
told["below the limit"] = try_to_take(150)
told["peak of 150 MiB"] = peak()
memory.release()
memory.reset_peaks()
told["peak after a reset"] = peak()
told["twice below the limit"] = [try_to_take(150), try_to_take(150)]
told["above the limit"] = try_to_take(260)
held = take(120)
told["above what is left of it"] = try_to_take(120)
del held
told["after ten failures"] = [try_to_take(260) for _ in range(10)][-1:] + [try_to_take(150)]
with memory.attempt(8):
    memory.reset_peaks()
    small = [torch.ones(1 << 14) for _ in range(1600)]
    last = small[-1]  # below it the heap is full of holes, which an allocator keeps unless told
    told["peak of 100 MiB in small pieces"] = peak()
    small.clear()
with memory.attempt(8):
    memory.reset_peaks()
    told["peak after giving back"] = peak()
    never_written = torch.empty(100 * MIB // 4)
    told["peak of 100 MiB that nobody wrote to"] = peak()
    del never_written
with memory.attempt(8):
    memory.reset_peaks()
    before = peak()
    objects = [bytes(400) for _ in range(3000)]
    told["peak of a mebibyte in Python's own objects"] = peak() - before
    del objects
with memory.attempt(8):
    told["what an attempt may take after another left 30 MiB"] = [try_to_take(190), try_to_take(210)]
    left_for_good = take(30)
with memory.attempt(8):
    told["what an attempt may take after another left 30 MiB"] += [try_to_take(190), try_to_take(210)]
with memory.timing():
    told["while steps are timed"] = try_to_take(400)
    loaded_by_timing = take(30)
told["after steps were timed"] = [try_to_take(190), try_to_take(230)]
with memory.attempt(8):
    told["after steps were timed"] += [try_to_take(190), try_to_take(230)]
def faults_of_using_four_mib_again():
    take(4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        take(4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with memory.attempt(8):
    told["faults in an attempt"] = faults_of_using_four_mib_again()
with memory.timing():
    told["faults while steps are timed"] = faults_of_using_four_mib_again()
memory.lift()
told["above the limit that was"] = try_to_take(260)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    """What a child with a limit of 200 MiB told of itself, on top of 300 MiB that it had before."""
    environment = {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", CHILD, str(LIMIT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_was_there_before_counts_neither_against_the_limit_nor_as_the_models(told):
    assert told["below the limit"] == "fit"
    assert told["peak of nothing"] < 20


def test_an_allocation_beyond_the_limit_fails_as_a_devices_would(told):
    assert told["above the limit"] == "oom"
    assert told["above what is left of it"] == "oom"


def test_memory_that_was_given_back_may_be_taken_again(told):
    assert told["twice below the limit"] == ["fit", "fit"]


def test_failures_leave_the_limit_where_it_was(told):
    assert told["after ten failures"] == ["oom", "fit"]


def test_a_peak_is_what_was_taken_until_it_is_reset(told):
    assert told["peak of 150 MiB"] == pytest.approx(150, abs=20)
    assert told["peak after a reset"] < 20


def test_memory_in_small_pieces_is_given_back_too(told):
    assert told["peak of 100 MiB in small pieces"] == pytest.approx(100, abs=20)
    assert told["peak after giving back"] < 20


def test_pythons_own_objects_are_not_counted_against_the_limit(told):
    assert told["peak of a mebibyte in Python's own objects"] < 0.3


def test_what_is_reserved_counts_although_nobody_wrote_to_it(told):
    assert told["peak of 100 MiB that nobody wrote to"] == pytest.approx(100, abs=20)


def test_what_an_attempt_leaves_behind_is_not_counted_against_the_next(told):
    assert told["what an attempt may take after another left 30 MiB"] == ["fit", "oom"] * 2


def test_no_limit_is_in_the_way_of_timing_and_what_that_leaves_behind_does_not_count(told):
    assert told["while steps are timed"] == "fit"
    assert told["after steps were timed"] == ["fit", "oom"] * 2


def test_what_is_timed_uses_memory_again_as_the_users_training_does(told):
    pages = 50 * 4 * MIB // 4096
    assert told["faults in an attempt"] > 0.9 * pages
    assert told["faults while steps are timed"] < 0.1 * pages


def test_a_limit_that_was_lifted_is_gone(told):
    assert told["above the limit that was"] == "fit"


def test_the_host_is_named_with_its_memory_and_what_is_free():
    name, total, free = HostMemory().describe()
    assert "cores)" in name
    assert 0 < free < total


@pytest.fixture
def container(monkeypatch, tmp_path):
    """A host of 64 GiB, 20 of them free, and a cgroup folder with these files."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {20 << 20} kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"memory.{name}").write_text(f"{text}\n")

    return write


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({"max": 4 * GIB, "current": 1 * GIB}, 4 * GIB, 3 * GIB),
        ({"max": 4 * GIB, "current": 0}, 4 * GIB, 4 * GIB),
        ({}, 64 * GIB, 20 * GIB),
        ({"max": "max", "current": 1 * GIB}, 64 * GIB, 20 * GIB),
        ({"max": 30 * GIB, "current": 2 * GIB}, 30 * GIB, 20 * GIB),
        (
            {"max": 4 * GIB, "current": 4 * GIB, "stat": f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}"},
            4 * GIB,
            2 * GIB,
        ),
        ({"max": 4 * GIB, "current": 5 * GIB}, 4 * GIB, 0),
    ],
    ids=[
        "a container's is its own",
        "an empty one",
        "no container",
        "one without a limit",
        "a busy host with a container",
        "files that nobody uses are no use of memory",
        "a full one",
    ],
)
def test_the_limit_leaves_a_fifth_of_what_is_free_to_others(container, files, total, free):
    container(**files)
    memory = HostMemory()
    assert memory.describe()[1:] == (total, free)
    assert memory.default_limit(margin=0.05) == int(0.8 * free)
    assert memory.default_limit(margin=0.5) == int(0.5 * free)


def test_a_host_that_does_not_tell_what_is_free_has_no_limit_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "nothing")
    assert HostMemory().default_limit(margin=0.05) is None


@pytest.mark.parametrize(
    ("first_size", "kept_mib", "one_off_mib"),
    [
        (1, [9], 9),  # a batch of one has no large kernels of its own
        (500, [7], 0),  # it may all be for this shape
        (500, [200], 192),  # libraries that were loaded
        (500, [7, 12], 2),  # the second size shows what each size takes
        (500, [7, 12, 12, 20], 0),
        (1, [0, 5, 10], 0),
    ],
)
def test_of_what_the_first_attempt_left_only_what_any_size_would_leave_counts_later(first_size, kept_mib, one_off_mib):
    assert one_off_bytes(first_size, [mib << 20 for mib in kept_mib]) == one_off_mib << 20

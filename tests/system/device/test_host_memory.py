"""The CPU's memory: a limit that a real child process runs into, and peaks that are the model's alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.device import host_memory
from batchtune.device.host_memory import HostMemory

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
GIB = 2**30
LIMIT = 200

CHILD = """
import json, sys, time
import torch
from batchtune.device.failures import classify
from batchtune.device.host_memory import HostMemory

MIB = 2**20
told = {}

def take(mib):
    return torch.ones(mib * MIB // 4)

def try_to_take(mib):
    memory.reset_peaks()
    try:
        take(mib)
    except Exception as error:
        return classify(error)
    finally:
        memory.release()
    return "oom" if memory.peaks().is_beyond else "fit"

def peak():
    return memory.peaks().reserved_bytes / MIB

def fill(mib):
    held = []
    try:
        while len(held) < mib:
            held.append(torch.ones(MIB // 4))
            time.sleep(0.002)  # a busy machine looks late
    except Exception as error:
        return classify(error), len(held)
    return "fit", len(held)

ballast = take(300)  # was there before: not the model's
memory = HostMemory()
memory.enforce(int(sys.argv[1]) * MIB)
memory.reset_peaks()
told["peak of nothing"] = peak()
told["below the limit"] = try_to_take(150)
told["peak of 150 MiB"] = peak()
memory.reset_peaks()
told["peak after a reset"] = peak()
told["twice below the limit"] = [try_to_take(150), try_to_take(150)]
told["above the limit"] = try_to_take(260)
told["far above the limit"] = try_to_take(20_000)
held = take(120)
told["above what is left of it"] = try_to_take(120)
del held
told["after failures"] = [try_to_take(260) for _ in range(3)][-1:] + [try_to_take(150)]
with memory.attempt(8):
    told["filling"] = fill(2000)
with memory.attempt(8):
    memory.reset_peaks()
    told["peak after giving back"] = peak()
    never_written = torch.empty(100 * MIB // 4)
    told["peak of 100 MiB that nobody wrote to"] = peak()
    del never_written
with memory.timing():
    told["while steps are timed"] = fill(400)[0]
told["after steps were timed"] = try_to_take(260)
memory.lift()
told["above the limit that was"] = [fill(400)[0], try_to_take(260)]
print(json.dumps(told))
"""


def run(source, *arguments):
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}  # waiting as in tests/conftest.py
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"} | threads
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told():
    """What a child with a limit of 200 MiB told of itself, on top of 300 MiB that it had before."""
    return run(CHILD, LIMIT)


def test_what_was_there_before_counts_neither_against_the_limit_nor_as_the_models(told):
    assert told["below the limit"] == "fit"
    assert told["peak of nothing"] < 20


def test_more_than_the_limit_is_out_of_memory_though_the_system_would_give_it(told):
    assert told["above the limit"] == "oom"
    assert told["above what is left of it"] == "oom"


def test_far_more_than_the_limit_is_never_given(told):
    assert told["far above the limit"] == "oom"


def test_who_goes_on_taking_memory_is_stopped_soon_after_the_limit(told):
    outcome, mib = told["filling"]
    assert outcome == "oom"
    assert LIMIT - 20 < mib < 2 * LIMIT


def test_memory_that_was_given_back_may_be_taken_again(told):
    assert told["twice below the limit"] == ["fit", "fit"]


def test_failures_leave_the_limit_where_it_was(told):
    assert told["after failures"] == ["oom", "fit"]


def test_a_peak_is_what_was_taken_until_it_is_reset(told):
    assert told["peak of 150 MiB"] == pytest.approx(150, abs=20)
    assert told["peak after a reset"] < 20


def test_memory_is_given_back_after_an_attempt(told):
    assert told["peak after giving back"] < 20


def test_what_nobody_wrote_to_is_not_taken(told):
    assert told["peak of 100 MiB that nobody wrote to"] < 20


def test_no_limit_is_in_the_way_of_timing(told):
    assert told["while steps are timed"] == "fit"
    assert told["after steps were timed"] == "oom"


def test_a_limit_that_was_lifted_is_gone(told):
    assert told["above the limit that was"] == ["fit", "fit"]


SHAKEN = """
import ctypes, json, os, sys
from batchtune.device.host_memory import shake_heap

pipes, libc = [os.pipe() for _ in range(5)], ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for number, (read, write) in zip((0, 0, 1, 1, 2), pipes):
    if not os.fork():
        shake_heap(number)
        os.write(write, json.dumps([libc.malloc(ctypes.c_size_t(3000)) for _ in range(20)]).encode())
        os._exit(0)
print(json.dumps([os.read(read, 4096).decode() for read, _ in pipes]))
"""


UNDER_ULIMIT = """
import json, resource, sys, torch
from batchtune.device.host_memory import HostMemory
soft, hard = (int(each) for each in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
memory = HostMemory()
memory.enforce(4 << 30)
torch.empty(1 << 28)
allowed = resource.getrlimit(resource.RLIMIT_AS)
try:
    torch.empty(4 << 30)
except RuntimeError:
    memory.lift()
    print(json.dumps([allowed, resource.getrlimit(resource.RLIMIT_AS)]))
"""


@pytest.mark.parametrize("hard", [3 * GIB, 2**63 - 1])
def test_what_ulimit_leaves_is_all_there_is(hard):
    assert run(UNDER_ULIMIT, 3 * GIB, hard) == [[3 * GIB, hard]] * 2


def test_forks_of_one_image_have_the_same_heap_until_they_are_shaken():
    as_it_is, again, first, first_again, second = run(SHAKEN)
    assert as_it_is == again
    assert first == first_again
    assert len({as_it_is, first, second}) == 3


def test_the_host_is_named_with_its_memory_and_what_is_free():
    name, total, free = HostMemory().describe()
    assert "cores)" in name
    assert 0 < free < total


@pytest.fixture
def container(monkeypatch, tmp_path):
    """A host of 64 GiB, 20 of them free, and cgroups with these files."""
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)

    def write(**files):
        memory = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {20 << 20} kB"}
        for path, text in (memory | files).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")

    return write


def version_2(folder="", **figures):
    return {f"sys/fs/cgroup/{folder}memory.{name}": text for name, text in figures.items()}


IN_A_JOB = {"proc/self/cgroup": "0::/slurm/job_7/step_0"} | version_2("slurm/job_7/step_0/", max="max", current=GIB)
FIRST_VERSION = {
    "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n0::/",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
    "sys/fs/cgroup/memory/memory.usage_in_bytes": 9 * GIB,
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 6 * GIB,
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
    "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
}


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        (version_2(max=4 * GIB, current=1 * GIB), 4 * GIB, 3 * GIB),
        (version_2(max=4 * GIB, current=0), 4 * GIB, 4 * GIB),
        ({}, 64 * GIB, 20 * GIB),
        (version_2(max="max", current=1 * GIB), 64 * GIB, 20 * GIB),
        (version_2(max=30 * GIB, current=2 * GIB), 30 * GIB, 20 * GIB),
        (
            version_2(max=4 * GIB, current=4 * GIB, stat=f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}"),
            4 * GIB,
            2 * GIB,
        ),
        (version_2(max=4 * GIB, current=5 * GIB), 4 * GIB, 0),
        (IN_A_JOB | version_2("slurm/job_7/", max=8 * GIB, current=3 * GIB), 8 * GIB, 5 * GIB),
        (
            IN_A_JOB
            | version_2("slurm/job_7/", max=8 * GIB, current=1 * GIB)
            | version_2("slurm/", max=9 * GIB, current=7 * GIB),
            8 * GIB,
            2 * GIB,
        ),
        (FIRST_VERSION, 6 * GIB, 4 * GIB),
        (version_2(max=4 * GIB, current=1 * GIB) | {"proc/self/cgroup": "0::/../elsewhere"}, 4 * GIB, 3 * GIB),
    ],
    ids=[
        "a container's is its own",
        "an empty one",
        "no container",
        "one without a limit",
        "a busy host with a container",
        "files that nobody uses are no use of memory",
        "a full one",
        "a job whose step has no limit of its own",
        "a job of whose memory others leave less",
        "a job by the first version of cgroups",
        "a container whose group lies elsewhere",
    ],
)
def test_the_limit_leaves_a_fifth_of_what_is_free_to_others(container, files, total, free):
    container(**files)
    memory = HostMemory()
    assert memory.describe()[1:] == (total, free)
    assert memory.default_limit(margin=0.05) == int(0.8 * free)
    assert memory.default_limit(margin=0.5) == int(0.5 * free)


def test_a_host_that_does_not_tell_what_is_free_has_no_limit_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "SYSTEM", tmp_path)
    assert HostMemory().default_limit(margin=0.05) is None


def test_the_limit_of_find_batch_size_holds_during_the_search_and_not_after(tmp_path):
    program = tmp_path / "search.py"  # of its own: what this one has freed is room that no limit counts
    program.write_text(
        """
import resource, batchtune, torch

weights = torch.zeros(1, requires_grad=True)

def step(batch_size):
    torch.autograd.backward((torch.ones(batch_size, 2**18) * weights).sum())  # at least 2 MiB a sample

before = resource.getrlimit(resource.RLIMIT_AS)
size = batchtune.find_batch_size(step, device="cpu", memory_limit="200MiB", tolerance=0.1)
assert 40 <= size <= 100, size
assert resource.getrlimit(resource.RLIMIT_AS) == before
step(4 * size)
"""
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    searched = re.search(r"up to (\d+) MiB is searched", done.stderr)
    assert 130 < int(searched[1]) < 157  # of 160, without what was imported for the search

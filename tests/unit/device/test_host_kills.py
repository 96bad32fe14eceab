"""Telling a kill by the host's out-of-memory killer from any other, by the kernel's counters."""

import pytest

from batchtune.device.host import children_of, describe_kill, oom_kills


@pytest.fixture
def write(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"


def test_our_own_cgroup_counts_first(tmp_path, write):
    write("proc/self/cgroup", "0::/user.slice/job\n")
    write("sys/fs/cgroup/user.slice/job/memory.events", EVENTS.format(2))
    write("sys/fs/cgroup/memory.events", EVENTS.format(7))
    write("proc/vmstat", "oom_kill 9\n")
    assert oom_kills(tmp_path) == 2


def test_in_a_container_our_cgroup_is_the_root(tmp_path, write):
    write("proc/self/cgroup", "0::/../../elsewhere\n")
    write("sys/fs/cgroup/memory.events", EVENTS.format(7))
    assert oom_kills(tmp_path) == 7


def test_the_first_version_of_cgroups_counts_too(tmp_path, write):
    write("proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n")
    write("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom_kills(tmp_path) == 4


def test_without_cgroups_the_hosts_count_serves(tmp_path, write):
    write("proc/vmstat", "pgfault 1\noom_kill 9\nthp_fault 3\n")
    assert oom_kills(tmp_path) == 9


def test_a_system_that_keeps_no_count_has_none(tmp_path):
    assert oom_kills(tmp_path) is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(3, 4, "the host's memory ran out"), (3, 3, "counted no victim"), (None, 3, "most likely")],
)
def test_a_kill_is_named_as_far_as_the_counts_tell(before, after, said):
    assert said in describe_kill(before, after)


def test_the_children_of_a_process_are_those_that_name_it_whatever_they_are_called(tmp_path, write):
    write("7/stat", "7 (python) S 1 7 7 0 -1\n")
    write("8/stat", "8 (a ) S 9 (b) T 7 8 8 0 -1\n")
    write("9/stat", "9 (python) R 8 8 8 0 -1\n")
    write("10/stat", "")  # it has ended meanwhile
    write("self/stat", "7 (python) S 7 7 7 0 -1\n")
    assert children_of(7, tmp_path) == [8]
    assert children_of(7, tmp_path / "nowhere") == []

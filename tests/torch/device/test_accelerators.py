"""Memory of accelerators other than CUDA, by modules that offer what torch's own modules offer on each."""

from types import SimpleNamespace

import pytest
import torch

from batchtune.device._base import Peaks
from batchtune.device.host_memory import HostMemory
from batchtune.device.memory import AcceleratorMemory
from batchtune.errors import UsageError

GIB = 2**30


@pytest.fixture
def open_as(monkeypatch):
    def open_as(device, **functions):
        monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(**functions))
        return AcceleratorMemory(torch.device(device))

    return open_as


def raises(error):
    def function(*_):
        raise error

    return function


@pytest.fixture
def mps(open_as, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Max")
    fractions = []
    memory = open_as(
        "mps:0",
        recommended_max_memory=lambda: 16 * GIB,
        driver_allocated_memory=lambda: 3 * GIB,
        set_per_process_memory_fraction=fractions.append,
    )
    return memory, fractions


def test_mps_is_limited_without_naming_a_device(mps):
    memory, fractions = mps
    memory.enforce(4 * GIB)
    assert fractions == [0.25]


def test_mps_has_no_marks_but_what_the_driver_has_given(mps):
    assert mps[0].peaks() == Peaks(None, 3 * GIB)


def test_mps_tells_its_own_use_as_the_only_one(mps):
    assert mps[0].describe() == ("Apple M3 Max", 16 * GIB, 13 * GIB)


def test_an_xpu_is_limited_by_device(open_as):
    asked = []
    memory = open_as(
        "xpu:0",
        mem_get_info=lambda _: (20 * GIB, 40 * GIB),
        set_per_process_memory_fraction=lambda *arguments: asked.append(arguments),
    )
    memory.enforce(10 * GIB)
    assert asked == [(0.25, torch.device("xpu:0"))]


def test_the_limit_is_taken_from_what_others_leave_free(open_as):
    memory = open_as("xpu:0", mem_get_info=lambda _: (20 * GIB, 40 * GIB))
    assert memory.default_limit(0.1) == 18 * GIB


def test_the_limit_of_a_device_of_ones_own_is_the_whole_less_the_margin(open_as):
    memory = open_as("xpu:0", mem_get_info=lambda _: (39 * GIB, 40 * GIB))
    assert memory.default_limit(0.1) == 36 * GIB


def test_a_driver_that_does_not_tell_what_is_free_still_has_a_limit(open_as):
    memory = open_as(
        "xpu:0",
        mem_get_info=raises(RuntimeError("the device doesn't support querying the available free memory")),
        get_device_properties=lambda _: SimpleNamespace(total_memory=40 * GIB),
    )
    assert memory.describe() == ("xpu:0", 40 * GIB, None)
    assert memory.default_limit(0.1) == 36 * GIB


def test_a_device_that_tells_nothing_has_no_limit_of_its_own(open_as, monkeypatch):
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    memory = open_as("mtia:0")
    assert memory.describe() == ("mtia:0", None, None)
    assert memory.default_limit(0.1) is None


def test_where_torch_cannot_keep_the_limit_a_peak_above_it_is_an_oom(open_as):
    high = iter([3 * GIB, 5 * GIB])
    memory = open_as("mtia:0", mem_get_info=lambda _: (8 * GIB, 8 * GIB), max_memory_allocated=lambda: next(high))
    memory.enforce(4 * GIB)
    assert memory.peaks() == Peaks(3 * GIB, None)
    with pytest.raises(torch.OutOfMemoryError, match="more than the limit"):
        memory.peaks()


def test_no_device_is_given_a_limit_beyond_what_it_has(open_as):
    xpu = open_as("xpu:0", mem_get_info=lambda _: (20 * GIB, 40 * GIB))
    for memory, there in ((xpu, 40 * GIB), (HostMemory(), HostMemory().describe()[1])):
        with pytest.raises(UsageError, match=f"{there + 1} bytes is more than the {there} bytes of {memory.device}"):
            memory.enforce(there + 1)

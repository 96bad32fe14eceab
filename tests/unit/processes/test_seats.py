"""Groups of ranks on devices that are close to one another."""

import sys
import types

import pytest
from fakes import opened

from batchtune.config.ranks import Ranks
from batchtune.device.nvml import distances
from batchtune.observer import Observer
from batchtune.processes import pool
from batchtune.processes.pool import WorkerPool
from batchtune.processes.ranks import by_closeness, closest_seats
from batchtune.protocol.commands import OpenTask

FAR, NEAR, LINKED, TWICE = 50, 10, -1, -2


def apart(count, **pairs):
    """Distances of devices that are far apart but for some pairs, such as `_0_3=NEAR`."""
    found = [[0 if one == other else FAR for other in range(count)] for one in range(count)]
    for name, distance in pairs.items():
        one, other = map(int, name.strip("_").split("_"))
        found[one][other] = found[other][one] = distance
    return found


@pytest.mark.parametrize(
    ("distances", "each", "order"),
    [
        (apart(4), 2, [0, 1, 2, 3]),
        (apart(4, _0_1=NEAR, _2_3=NEAR), 2, [0, 1, 2, 3]),
        (apart(4, _0_2=NEAR, _1_3=NEAR), 2, [0, 2, 1, 3]),
        (apart(4, _1_2=LINKED, _0_3=NEAR), 2, [1, 2, 0, 3]),
        (apart(4, _0_1=TWICE, _0_2=LINKED, _1_3=LINKED), 2, [0, 2, 1, 3]),  # the best pair would leave a far one
        (apart(5, _0_4=NEAR, _1_3=NEAR), 2, [0, 4, 1, 3, 2]),
        (apart(8, **{f"_{one}_{one + 4}": LINKED for one in range(4)}), 2, [0, 4, 1, 5, 2, 6, 3, 7]),
        (apart(3, _1_2=LINKED), 2, [1, 2, 0]),
        (apart(2), 2, [0, 1]),
        (apart(4, _0_3=NEAR), 1, [0, 1, 2, 3]),
        ([], 2, []),
    ],
)
def test_the_widest_distance_in_a_group_counts_first_and_the_closest_group_comes_first(distances, each, order):
    assert by_closeness(distances, each) == order


def test_eight_devices_on_two_sockets_are_two_groups_of_four():
    odd = {f"_{one}_{other}": NEAR for one in range(8) for other in range(one + 1, 8) if (other - one) % 2 == 0}
    assert by_closeness(apart(8, **odd), 4) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_sixteen_devices_take_no_time():
    pairs = {f"_{one}_{15 - one}": LINKED for one in range(8)}
    order = by_closeness(apart(16, **pairs), 2)
    assert all(one + other == 15 for one, other in zip(order[::2], order[1::2], strict=True))
    assert sorted(by_closeness(apart(16), 8)) == list(range(16))


class Nvml(types.ModuleType):
    """Four GPUs, of which the first has two lanes of NVLink to the last, and the others are on one switch."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_NVLINK_MAX_LINKS = 2, 0, 3
    tells = True
    names = ("H100",) * 4

    def nvmlInit(self): ...
    def nvmlShutdown(self): ...
    def nvmlDeviceGetCount(self):
        return 4

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle):
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId=str(handle))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        if handle not in {0, 3} or link > 1:
            raise OSError
        return types.SimpleNamespace(busId=str(3 - handle))

    def nvmlDeviceGetP2PStatus(self, one, other, _):
        return 0 if {one, other} == {1, 2} else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        if not self.tells:
            raise OSError
        return NEAR if {one, other} == {0, 1} else FAR


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", found := Nvml("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def test_nvml_tells_lanes_switches_and_the_bus(nvml):
    names, found = distances(None)
    assert names == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert found[0] == [0, NEAR, FAR, TWICE]
    assert found[1] == [NEAR, 0, LINKED, FAR]
    assert distances("3,GPU-0,1") == (["GPU-3", "GPU-0", "GPU-1"], [[0, TWICE, FAR], [TWICE, 0, NEAR], [FAR, NEAR, 0]])
    nvml.tells = False
    assert distances(None) is None
    nvml.tells, nvml.names = True, ("H100", "A100", "H100", "H100")
    assert distances(None) is None


@pytest.mark.parametrize("visible", ["MIG-a,MIG-b", "9"])
@pytest.mark.usefixtures("nvml")
def test_of_slices_and_of_devices_that_are_not_there_it_tells_nothing(visible):
    assert distances(visible) is None


def seats(monkeypatch, workers=2, **settings):
    """What each group of two ranks sees."""
    seen = []
    monkeypatch.setattr(pool, "launcher_of", lambda *given: seen.append(given[2].get("CUDA_VISIBLE_DEVICES")))
    crew = WorkerPool(OpenTask(task="m.py", **settings), workers, Observer(), Ranks(per_trial=2))
    crew.grow(opened(device="cuda:0", device_count=4, world_size=2, strategy="ddp", backend="nccl"))
    return seen


@pytest.mark.usefixtures("nvml")
def test_groups_are_seated_on_close_devices_and_the_first_sees_the_order_of_all(monkeypatch):
    assert seats(monkeypatch) == ["GPU-0,GPU-3,GPU-1,GPU-2", "GPU-1,GPU-2"]


def test_where_nobody_tells_the_order_is_that_of_the_devices(monkeypatch, nvml):
    nvml.tells = False
    assert seats(monkeypatch) == [None, "2,3"]


@pytest.mark.usefixtures("nvml")
def test_the_users_own_list_is_seated_too(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert seats(monkeypatch, "auto")[1] == "GPU-1,GPU-2"


@pytest.mark.usefixtures("nvml")
def test_the_ranks_of_a_probe_are_seated_as_those_of_a_study():
    assert closest_seats("cuda", 2) == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-3,GPU-1,GPU-2"}
    assert closest_seats("auto", 4) == closest_seats("cuda", 1) == closest_seats("cpu", 2) == {}

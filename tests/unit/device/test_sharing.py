"""Who else is on a GPU, by a fake NVML that speaks as nvidia-ml-py does."""

from types import SimpleNamespace

import pytest

from batchtune.device.nvml import candidate_uuids, find_handle, look, sharing
from batchtune.device.sharing import Sharing
from batchtune.document import DeviceProcess

WHOLE, SLICE = "GPU-1f2e", "MIG-77aa"


class FakeNvml:
    """A GPU of 100 bytes; `mig` cuts it into slices whose second place is taken."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, *, mig=False, compute=(), graphics=()):
        self.mig, self.compute, self.graphics = mig, compute, graphics

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid in ({WHOLE, SLICE} if self.mig else {WHOLE}):
            return uuid
        raise self.NVMLError("Not Found")

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return handle.startswith("MIG-")

    def nvmlDeviceGetMigMode(self, handle):
        return [int(self.mig), int(self.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index != 1:
            raise self.NVMLError("Not Found")
        return SLICE

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=100, used=30, free=70)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        if self.graphics is None:
            raise self.NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.graphics]


def test_what_is_ours_counts_as_free():
    seen = sharing(FakeNvml(compute=[(7, 20), (8, None), (9, 5)]), WHOLE)
    assert seen.without({7, 8}.__contains__) == Sharing(90, (DeviceProcess(pid=9, memory_bytes=5),))


@pytest.mark.parametrize("reported", ["1f2e", "GPU-1f2e"])
def test_a_whole_gpu_is_found_by_the_uuid_torch_gives(reported):
    assert find_handle(FakeNvml(), candidate_uuids(reported, 0, None)) == WHOLE


def test_a_slice_is_found_by_the_uuid_torch_gives():
    assert find_handle(FakeNvml(mig=True), candidate_uuids("77aa", 0, None)) == SLICE


def test_a_slice_that_the_environment_names_is_found_though_torch_gives_its_gpus_uuid():
    assert find_handle(FakeNvml(mig=True), candidate_uuids("1f2e", 0, SLICE)) == SLICE


def test_of_a_gpu_cut_into_slices_the_first_one_counts():
    assert find_handle(FakeNvml(mig=True), candidate_uuids("1f2e", 0, "0")) == SLICE


def test_the_environment_is_read_at_the_devices_own_place():
    assert candidate_uuids("1f2e", 1, "MIG-a, MIG-b")[0] == "MIG-b"
    assert candidate_uuids("1f2e", 2, "MIG-a, MIG-b") == ["MIG-1f2e", "GPU-1f2e"]


def test_a_device_that_nvml_does_not_know_is_an_error():
    with pytest.raises(LookupError, match="GPU-0000"):
        find_handle(FakeNvml(), candidate_uuids("0000", 0, None))


def test_every_process_is_listed_once_with_what_it_holds():
    seen = sharing(FakeNvml(compute=[(7, 20), (3, None)], graphics=[(7, None), (9, 5)]), WHOLE)
    assert seen.free_bytes == 70
    assert seen.processes == (
        DeviceProcess(pid=3),
        DeviceProcess(pid=7, memory_bytes=20),
        DeviceProcess(pid=9, memory_bytes=5),
    )


def test_a_list_that_the_driver_does_not_give_is_left_out():
    assert sharing(FakeNvml(compute=[(7, 20)], graphics=None), WHOLE).processes == (
        DeviceProcess(pid=7, memory_bytes=20),
    )


def test_there_is_nothing_to_see_where_no_device_has_that_uuid():
    assert look("GPU-00000000-0000-0000-0000-000000000000") is None

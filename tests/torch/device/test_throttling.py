"""Why a GPU's clocks are held back, and how long a reason must last to be named."""

import sys
from types import SimpleNamespace

import pytest
import torch

from batchtune.device.nvml import Readings, Sensors


class OldDriver:
    """NVML of a driver that knows the older of two names only, and of a GPU that cannot be cut into slices."""

    class NVMLError(Exception):
        """As pynvml's."""

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return SimpleNamespace()

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return 0

    def nvmlDeviceGetMigMode(self, handle):
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        raise self.NVMLError("Function Not Found")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x24


class NoSuchSensor(OldDriver):
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        raise self.NVMLError("Not Supported")


@pytest.fixture
def sensors_of(monkeypatch):
    """Opens the sensors of a GPU whose driver library is this one."""

    def opened(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
        sensors = Sensors(torch.device("cuda", 0))
        assert sensors.present
        return sensors

    return opened


def test_a_driver_that_knows_the_older_name_is_asked_by_it(sensors_of):
    assert sensors_of(OldDriver()).throttle_mask() == 0x24


def test_a_device_that_does_not_tell_has_no_reasons(sensors_of):
    assert sensors_of(NoSuchSensor()).throttle_mask() is None
    assert Sensors(torch.device("cpu")).throttle_mask() is None


def test_reasons_that_last_are_named():
    readings = Readings(throttle_masks=[0x04] * 9 + [0x44])
    assert readings.summary()["throttle_reasons"] == ["power cap", "hardware thermal slowdown"]


def test_a_reason_seen_in_passing_is_not():
    assert Readings(throttle_masks=[0] * 19 + [0x40]).summary()["throttle_reasons"] == []


def test_an_idle_gpu_is_not_held_back():
    assert Readings(throttle_masks=[0x01] * 5).summary()["throttle_reasons"] == []


def test_reasons_that_nobody_measured_are_absent():
    assert "throttle_reasons" not in Readings().summary()

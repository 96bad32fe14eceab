"""Why a GPU's clocks are held back, and how long a reason must last to be named."""

from types import SimpleNamespace

import pytest
import torch

from batchtune.device.telemetry import Readings, Sensors


class OldDriver:
    """NVML of a driver that knows the older of two names only."""

    class NVMLError(Exception):
        """As pynvml's."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        raise self.NVMLError("Function Not Found")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x24


class NoSuchSensor(OldDriver):
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        raise self.NVMLError("Not Supported")


def sensors_of(nvml):
    sensors = Sensors(torch.device("cpu"))
    sensors._nvml, sensors._handle = nvml, SimpleNamespace()
    return sensors


def test_a_driver_that_knows_the_older_name_is_asked_by_it():
    assert sensors_of(OldDriver()).throttle_mask() == 0x24


@pytest.mark.parametrize("sensors", [sensors_of(NoSuchSensor()), Sensors(torch.device("cpu"))])
def test_a_device_that_does_not_tell_has_no_reasons(sensors):
    assert sensors.throttle_mask() is None


def test_reasons_that_last_are_named():
    readings = Readings(throttle_masks=[0x04] * 9 + [0x44])
    assert readings.summary()["throttle_reasons"] == ["power cap", "hardware thermal slowdown"]


def test_a_reason_seen_in_passing_is_not():
    assert Readings(throttle_masks=[0] * 19 + [0x40]).summary()["throttle_reasons"] == []


def test_an_idle_gpu_is_not_held_back():
    assert Readings(throttle_masks=[0x01] * 5).summary()["throttle_reasons"] == []


def test_reasons_that_nobody_measured_are_absent():
    assert "throttle_reasons" not in Readings().summary()

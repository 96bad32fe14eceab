"""What is told of a busy card whose NVML is whole, old, WSL's or not there: a sensor is there, or it is absent."""

import fake_gpu
import pytest
from cuda.tasks import PERCEPTRON
from fixtures.waiting import wait_until

import batchtune

GiB = 2**30
ALL = {"gpu_utilization", "memory_controller_utilization", "memory_used_bytes", "power_watts", "temperature_celsius"}


@pytest.mark.parametrize(
    ("nvml", "sensors", "others"),
    [("full", ALL, [4242]), ("old driver", ALL, [4242]), ("wsl", ALL, []), ("absent", set(), None)],
)
def test_what_a_driver_does_not_tell_is_absent_and_the_rest_is_there(nvml, sensors, others):
    busy = fake_gpu.Card("8GiB", other={4242: GiB}, busy_by_others=0.5)
    with fake_gpu.machine(busy, nvml=nvml):
        found = batchtune.environment("cuda")
    environment = found["environment"]
    assert set(found["sensors"]) == sensors
    assert environment["device"] == "NVIDIA GeForce RTX 3090"
    assert (environment["driver"] is None) == (nvml == "absent")
    processes = environment["other_processes"]
    assert (None if processes is None else [each["pid"] for each in processes]) == others
    assert environment["device_memory_free_bytes"] == 7 * GiB
    if sensors:
        assert found["sensors"]["gpu_utilization"] == pytest.approx(0.5, abs=0.2)
        assert found["sensors"]["power_watts"] > 100


@pytest.mark.parametrize(
    ("nvml", "there", "absent"),
    [
        ("old driver", {"power_watts", "joules_per_sample", "throttle_reasons"}, set()),
        ("wsl", {"power_watts"}, {"joules_per_sample", "throttle_reasons"}),
        ("absent", {"samples_per_second"}, {"power_watts", "gpu_utilization", "joules_per_sample"}),
    ],
)
def test_a_probe_goes_on_without_what_cannot_be_read(tmp_path, monkeypatch, nvml, there, absent):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(PERCEPTRON)
    clock = {"launch_seconds": 2e-5, "flops": 2e13}
    with fake_gpu.machine(fake_gpu.Card("8GiB", **clock), nvml=nvml) as machine:
        result = batchtune.probe(tmp_path / "model.py", device="cuda", precision="fp32", max=8, min=8, verify_steps=1)
        assert wait_until(lambda: machine.cards[0].used == 0)
    point = result.probe.throughput[-1]
    assert result.status == "complete"
    assert {name for name in there if getattr(point, name) is None} == set()
    assert {name for name in absent if getattr(point, name) is not None} == set()

"""Machines with several cards, like and unlike, whole and in slices: which one a name, a worker or a rank takes."""

import os
from unittest.mock import ANY

import fake_gpu
import pytest
from cuda.tasks import PERCEPTRON
from fakes import opened

import batchtune
from batchtune.errors import DeviceError
from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.protocol.commands import OpenTask

GiB, MiB = 2**30, 2**20
LARGE = fake_gpu.Card("24GiB", name="NVIDIA GeForce RTX 3090", uuid="GPU-aaaaaaaa-0000-0000-0000-000000000001")
SMALL = fake_gpu.Card(
    "8GiB", name="Tesla T4", capability=(7, 5), uuid="GPU-bbbbbbbb-0000-0000-0000-000000000002", other={4242: GiB}
)
SLICED = fake_gpu.Card("80GiB", name="NVIDIA A100-SXM4-80GB", capability=(8, 0), mig=["10GiB", "20GiB"])


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(PERCEPTRON)
    return tmp_path / "model.py"


@pytest.mark.parametrize(
    ("visible", "device", "name", "others"),
    [
        (None, "auto", "NVIDIA GeForce RTX 3090", []),
        (None, "cuda:1", "Tesla T4", [4242]),
        ("1", "cuda:0", "Tesla T4", [4242]),
        ("1,0", "cuda:1", "NVIDIA GeForce RTX 3090", []),
        (SMALL.uuid, "cuda", "Tesla T4", [4242]),
    ],
)
def test_the_card_and_its_sensors_are_those_of_the_name_that_the_user_gave(monkeypatch, visible, device, name, others):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with fake_gpu.machine(LARGE, SMALL) as machine:
        found = batchtune.environment(device)
        assert [card.contexts for card in machine.cards] == [[], []]
    assert found["environment"]["device"] == name
    assert [process["pid"] for process in found["environment"]["other_processes"]] == others
    assert found["sensors"]["memory_used_bytes"] >= len(others) * GiB
    assert isinstance(found["sensors"]["memory_used_bytes"], int)


@pytest.mark.parametrize("which", [None, 0, 1])
def test_a_slice_is_found_by_its_name_and_its_neighbours_are_not_its_own(monkeypatch, which):
    with fake_gpu.machine(SLICED) as machine:
        first, second = machine.cards[0].slices
        first.other, second.other = {4242: GiB}, {4343: 2 * GiB}
        if which is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", (first, second)[which].uuid)
        found = batchtune.environment("cuda")
    memory, pid, free = ((10 * GiB, 4242, 9 * GiB), (20 * GiB, 4343, 18 * GiB))[which or 0]
    environment = found["environment"]
    assert (environment["device_memory_bytes"], environment["device_memory_free_bytes"]) == (memory, free)
    assert [process["pid"] for process in environment["other_processes"]] == [pid]
    assert "power_watts" not in found["sensors"]  # they are the whole GPU's


def test_no_card_is_visible_where_the_user_hides_all(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with fake_gpu.machine(LARGE), pytest.raises(DeviceError, match="device=cuda: not available here"):
        batchtune.environment("cuda")


def test_a_probe_of_the_second_card_leaves_the_first_alone(task):
    with fake_gpu.machine(LARGE, SMALL) as machine:
        result = batchtune.probe(task, device="cuda:1", precision="fp32", max=8, verify_steps=1, throughput=False)
        large, small = machine.cards
        assert (large.mallocs, large.ooms) == (0, 0)
        assert small.mallocs > 0
    assert result.environment.device == "Tesla T4"
    assert result.environment.device_memory_free_bytes == 7 * GiB
    assert result.warnings == [ANY]
    assert "(pid 4242 1.0 GiB)" in result.warnings[0]


def only_start(worker):
    """A step of work after which there is nothing more to do."""
    worker.start()
    return False


def test_four_workers_have_a_card_each_in_the_order_of_the_users_own_list(task, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,1,0")
    with fake_gpu.machine(*[fake_gpu.Card("8GiB")] * 4) as machine:
        with WorkerPool(OpenTask(task=str(task), device="cuda", precision=("fp32",)), 4, Observer()) as pool:
            pool.grow(pool.first.start())
            pool.work(only_start)
            occupied = [card.contexts for card in machine.cards]
        assert [card.used for card in machine.cards] == [0] * 4
    assert [len(contexts) for contexts in occupied] == [1] * 4
    assert len({pid for contexts in occupied for pid in contexts} - {os.getpid()}) == 4


def test_a_worker_on_an_unlike_card_is_refused_by_name(task):
    settings = OpenTask(task=str(task), device="cuda", precision=("fp32",))
    with fake_gpu.machine(LARGE, SMALL), WorkerPool(settings, 2, Observer()) as pool:
        pool.grow(pool.first.start())
        with pytest.raises(DeviceError, match="workers: device cuda:1 is a Tesla T4, but the study is of NVIDIA Ge"):
            pool.work(only_start)


def test_five_workers_on_four_cards_are_refused(task):
    settings = OpenTask(task=str(task), device="cuda", precision=("fp32",))
    task = opened(device="cuda:0", device_count=4, environment={"device": "Tesla T4"})
    with (
        WorkerPool(settings, 5, Observer()) as pool,
        pytest.raises(DeviceError, match="workers 5: there are only 4 devices"),
    ):
        pool.grow(task)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_group_of_ranks_is_limited_by_the_one_with_the_least_memory(task, strategy):
    cards = fake_gpu.Card("4GiB"), fake_gpu.Card("4GiB", other={4242: GiB})
    bounds = {"min": 20_000, "max": 80_000, "tolerance": 0.5}
    with fake_gpu.machine(*cards) as machine:
        result = batchtune.probe(
            task, device="cuda", precision="fp32", nproc_per_node=2, strategy=strategy, verify_steps=1,
            throughput=False, **bounds,
        )  # fmt: skip
        assert [card.used for card in machine.cards] == [0, GiB]
    found = result.probe
    assert found.memory_limit_bytes == int(3 * GiB * 0.95)
    assert found.peak_reserved_bytes <= 3 * GiB
    assert (found.limited_by, found.verified_in_fresh_process) == ("memory", True)
    ranks = found.data_parallel
    assert (ranks.world_size, ranks.strategy, ranks.backend, ranks.limiting_rank) == (2, strategy, "nccl", 1)
    assert any("(pid 4242 1.0 GiB)" in warning for warning in result.warnings)

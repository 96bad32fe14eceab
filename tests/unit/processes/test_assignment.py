"""How many workers there are, and whose device is whose."""

import os

import pytest

from batchtune.errors import DeviceError, UsageError
from batchtune.processes import ranks
from batchtune.processes.pool import DeviceAssignment, assign_devices, count_workers
from batchtune.processes.ranks import RankLauncher

HERE = {"devices": 4, "processors": 8, "visible": None}


class TestHowMany:
    def test_auto_takes_every_device_and_on_the_cpu_one(self):
        assert count_workers("auto", "cuda:0", **HERE) == 4
        assert count_workers("auto", "cpu", **HERE) == 1

    def test_slices_that_are_listed_count_though_a_process_sees_only_one(self):
        assert count_workers("auto", "cuda:0", devices=1, processors=8, visible="MIG-a, MIG-b,MIG-c") == 3

    def test_devices_are_not_shared(self):
        with pytest.raises(DeviceError, match="workers 5: there are only 4 devices"):
            count_workers(5, "cuda:0", **HERE)

    def test_processors_are_split_but_not_shared(self):
        assert count_workers(8, "cpu", **HERE) == 8
        with pytest.raises(UsageError, match="workers 9: more than the 8 processors"):
            count_workers(9, "cpu", **HERE)


class TestGroups:
    """Workers that are groups of ranks each."""

    def test_each_takes_as_many_devices_as_it_has_ranks(self):
        assert count_workers("auto", "cuda:0", **HERE, each=2) == 2
        assert count_workers(1, "cuda:0", **HERE, each=4) == 1
        with pytest.raises(DeviceError, match="workers 2 of 4 ranks each: there are only 4 devices"):
            count_workers(2, "cuda:0", **HERE, each=4)

    def test_on_a_cpu_the_ranks_of_one_worker_share_it_and_several_workers_do_not(self):
        assert count_workers(1, "cpu", **HERE, each=16) == 1
        assert count_workers(2, "cpu", **HERE, each=4) == 2
        with pytest.raises(UsageError, match="workers 3 of 4 ranks each: more than the 8 processors here"):
            count_workers(3, "cpu", **HERE, each=4)

    def test_side_by_side_they_need_devices_that_can_be_hidden_from_each_other(self):
        with pytest.raises(UsageError, match="workers 2 of 2 ranks each: groups side by side need CUDA"):
            count_workers(2, "xpu:0", **HERE, each=2)

    @pytest.mark.parametrize(("visible", "sets"), [(None, ["0,1", "2,3"]), ("5,4,7,6,1", ["5,4", "7,6"])])
    def test_each_has_a_set_of_its_own(self, visible, sets):
        found = assign_devices("cuda:0", 2, devices=4, visible=visible, each=2)
        assert found == [DeviceAssignment("cuda", {"CUDA_VISIBLE_DEVICES": each}) for each in sets]

    def test_the_ranks_of_one_split_the_processors_that_it_may_use_not_all_of_the_machine(self, monkeypatch):
        started = []
        monkeypatch.setattr(ranks, "LocalProcess", lambda command, environment, *_, **__: started.append(environment))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        RankLauncher(2, "ddp").start()
        assert [each["OMP_NUM_THREADS"] for each in started] == ["3"]

    def test_more_than_the_machine_could_start_are_refused_before_one_is(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)), raising=False)
        monkeypatch.setattr(ranks, "LocalProcess", lambda *_, **__: "a group")
        assert RankLauncher(32, "ddp").start() == "a group"
        with pytest.raises(
            UsageError, match="--nproc-per-node 99999: more than the 32 ranks that may share the 2 proc"
        ):
            RankLauncher(99999, "ddp").start()


class TestAssignment:
    def test_each_has_the_device_of_its_number(self):
        assert assign_devices("cuda:0", 2, devices=2, visible=None) == [
            DeviceAssignment("cuda:0", {}),
            DeviceAssignment("cuda:1", {}),
        ]

    def test_of_the_devices_listed_each_sees_its_own_alone(self):
        found = assign_devices("cuda:0", 2, devices=1, visible="3,MIG-b")
        assert found == [
            DeviceAssignment("cuda:0", {"CUDA_VISIBLE_DEVICES": "3"}),
            DeviceAssignment("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        ]

    def test_none_has_the_device_that_the_first_was_given_by_its_number(self):
        assert [assigned.device for assigned in assign_devices("cuda:1", 3, devices=4, visible=None)] == [
            "cuda:1",
            "cuda:2",
            "cuda:3",
        ]
        assert [assigned.device for assigned in assign_devices("xpu:1", 2, devices=2, visible=None)] == [
            "xpu:1",
            "xpu:0",
        ]
        listed = assign_devices("cuda:1", 2, devices=2, visible="5,7")
        assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in listed] == ["7", "5"]

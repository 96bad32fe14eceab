"""What a probe's reader is told besides the numbers: shared devices, recompiling; and FLOPs along the curve."""

import pytest
from fakes import opened

from batchtune.config.probe import Bounds, ProbeOptions
from batchtune.device.sharing import sharing_warnings
from batchtune.document import Attempt, DeviceProcess, Environment, ThroughputPoint
from batchtune.probe.findings import (
    Findings,
    attempt_warnings,
    foreign_warnings,
    kept_warnings,
    leak_warnings,
    recompile_warnings,
)
from batchtune.probe.timing.steps import busy_warnings
from batchtune.probe.timing.throughput import with_flops
from batchtune.protocol.data import SamplesSeen

GIB = 2**30


def environment(*, before=None, after=None, others=None):
    return Environment(
        device="a GPU",
        device_memory_bytes=100 * GIB,
        device_memory_free_bytes=before,
        device_memory_free_after_bytes=after,
        other_processes=others,
    )


def test_whoever_holds_memory_is_named_with_what_they_hold():
    others = [DeviceProcess(pid=12, memory_bytes=3 * GIB), DeviceProcess(pid=99)]
    (said,) = sharing_warnings(environment(others=others))
    assert "hold 3.0 GiB" in said
    assert "pid 12 3.0 GiB, pid 99" in said


@pytest.mark.parametrize("after", [93 * GIB, 97 * GIB])
def test_free_memory_that_moved_either_way_is_told(after):
    (said,) = sharing_warnings(environment(before=95 * GIB, after=after))
    assert "moved by 2% of the whole, from 95.0 GiB" in said


@pytest.mark.parametrize(
    "found",
    [
        None,
        environment(),
        environment(others=[]),
        environment(before=95 * GIB, after=95.5 * GIB),
        environment(after=GIB),
    ],
)
def test_a_device_of_ones_own_is_not_worth_a_sentence(found):
    assert sharing_warnings(found) == []


def failed(size, outcome="oom", **more):
    return Attempt(batch_size=size, outcome=outcome, message="no", **more)


def test_above_the_largest_fit_the_first_failure_of_each_kind_is_told_and_how_many_more_there_were():
    attempts = [
        *(failed(size, "user_error") for size in (900, 1, 400, 2, 101)),
        *(failed(size, "crash") for size in (300, 200)),
        failed(150, "timeout"),
        failed(120),
        Attempt(batch_size=100, outcome="fit"),
    ]
    assert attempt_warnings(attempts, 100) == [
        "batch size 1 ended in an error of the task's code, and the search went on above it: no",
        "batch size 2 ended in an error of the task's code, and the search went on above it: no",
        "batch size 101 ended in an error of the task's code: no (2 larger sizes failed so, too)",
        "batch size 150 ended in timeout: no",
        "batch size 200 ended in crash: no (1 larger size failed so, too)",
    ]


def test_that_larger_sizes_were_not_searched_is_said_where_it_is_true():
    assert attempt_warnings([failed(9, "crash")], 8) == [
        "batch size 9 ended in crash: no (larger sizes were not searched)"
    ]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({128: 3, 32: 3}, "after 3 steps"),
        ({128: 3, 64: 4, 1: 4}, "after 3 to 4 steps"),
        ({128: 3, 64: 3}, None),
        ({128: 2, 1: 4}, None),
        ({128: 0, 1: 1}, None),
        ({}, None),
    ],
)
def test_memory_that_grows_whatever_the_batch_size_is_told(steps, said):
    checks = [failed(size, steps=count, purpose="verify") for size, count in steps.items()]
    told = kept_warnings(checks, checks)
    assert [said in each for each in told] == [True] * bool(said)
    assert kept_warnings([*checks, Attempt(batch_size=1, outcome="fit")], checks) == []


def point(size, recompiles=None):
    return ThroughputPoint(batch_size=size, samples_per_second=100.0, step_seconds=1.0, recompiles=recompiles)


def test_compiling_again_is_told_once_where_it_was_worst():
    attempts = [Attempt(batch_size=4, outcome="fit", recompiles=1), Attempt(batch_size=8, outcome="fit", recompiles=7)]
    (said,) = recompile_warnings(attempts, [point(2, 3)])
    assert "compiled 7 more graphs" in said
    assert "at batch 8" in said


def test_speeds_of_a_busy_machine_are_told_as_such():
    points = [point(2), point(4).model_copy(update={"processors_used_by_others": 0.41})]
    (said,) = busy_warnings(points)
    assert "up to 41% of the processors while" in said


@pytest.mark.parametrize("others", [None, 0.1])
def test_a_machine_that_is_hardly_used_is_not_worth_a_sentence(others):
    assert busy_warnings([point(2).model_copy(update={"processors_used_by_others": others})]) == []


def test_a_model_that_compiles_once_is_not_worth_a_sentence():
    assert recompile_warnings([Attempt(batch_size=4, outcome="fit", recompiles=0)], [point(2, 0), point(4)]) == []


def test_utilisation_is_the_share_of_the_peak():
    found = with_flops([point(2)], lambda _: 1e9, peak=1e12)
    assert found[0].flops_per_sample == 1e9
    assert found[0].mfu == pytest.approx(0.1)


def test_utilisation_is_absent_where_the_peak_is_not_known():
    found = with_flops([point(2)], lambda _: 1e9, peak=None)
    assert (found[0].flops_per_sample, found[0].mfu) == (1e9, None)


def test_flops_that_do_not_depend_on_the_size_are_counted_twice_only():
    counted = []
    found = with_flops([point(size) for size in (1, 2, 4, 8, 16)], lambda size: counted.append(size) or 5.0, None)
    assert counted == [1, 2]
    assert [each.flops_per_sample for each in found] == [5.0] * 5


def test_flops_that_grow_with_the_size_are_counted_at_every_size():
    found = with_flops([point(size) for size in (1, 2, 4, 8)], float, None)
    assert [each.flops_per_sample for each in found] == [1.0, 2.0, 4.0, 8.0]


def test_sizes_that_cannot_be_counted_stay_as_they_are():
    points = [point(1), point(2), point(4)]
    found = with_flops(points, lambda size: None if size == 2 else float(size), None)
    assert found == [points[0].model_copy(update={"flops_per_sample": 1.0}), *points[1:]]


def test_parameters_of_the_optimizer_that_are_not_the_models_are_told():
    assert "the optimizer holds 2 parameters that are not the model's" in foreign_warnings(2)[0]
    assert foreign_warnings(0) == []


def test_what_an_adapter_took_for_granted_is_said_with_the_answer():
    assumed = "the configuration names no longest sequence: batches of 512 tokens were made"
    known = Findings(
        options=ProbeOptions(),
        opened=opened(notes=(assumed,)),
        precision="fp32",
        bounds=Bounds(),
        attempts=[Attempt(batch_size=4, outcome="fit")],
    )
    assert known.result(1.0).warnings == [assumed]


def test_what_is_said_of_inference_speaks_of_no_training():
    growing = Attempt(
        batch_size=8, outcome="fit", steps=20, growth_bytes_per_step=GIB, peak_reserved_bytes=GIB, recompiles=3
    )
    said = [*leak_warnings([growing], 9 * GIB), *recompile_warnings([growing], [])]
    assert [("longer run" in each, "train" in each) for each in said] == [(True, False)] * 2


def test_a_rise_that_a_longer_look_did_not_see_is_no_leak():
    rising = Attempt(batch_size=8, outcome="oom", steps=6, growth_bytes_per_step=GIB)
    assert len(leak_warnings([rising], 9 * GIB)) == 1
    assert leak_warnings([Attempt(batch_size=16, outcome="oom", steps=17), rising], 9 * GIB) == []


def test_before_a_check_has_passed_no_size_is_the_largest_above_one_that_ran_out_of_memory():
    def fits(size, **more):
        return Attempt(batch_size=size, outcome="fit", **more)

    searched = [fits(64), fits(128), failed(160), fits(153), failed(1, "user_error"), failed(150, "timeout")]
    known = Findings(options=ProbeOptions(), opened=opened(), precision="fp32", bounds=Bounds(), attempts=searched)
    assert (known.largest, known.result(1.0).first_failing_batch_size) == (153, 160)
    known.attempts.append(failed(103, steps=11))  # in more steps than those of the search
    assert (known.largest, known.result(1.0).first_failing_batch_size) == (64, 103)
    known.verified = fits(110, purpose="verify")  # what is checked is believed
    assert known.largest == 110


def test_a_result_of_inference_says_so_and_accumulates_nothing():
    known = Findings(
        options=ProbeOptions(),
        opened=opened(optimizer=""),
        precision="fp32",
        bounds=Bounds(),
        attempts=[Attempt(batch_size=4, outcome="fit")],
    )
    found = known.result(1.0)
    assert (found.inference, found.gradient_accumulation_steps) == (True, None)


def test_a_size_that_is_too_odd_for_a_task_that_takes_some_only_limits_nothing():
    tried = {4952: "user_error", 1: "fit", 5: "user_error", 8: "fit", 4096: "fit", 8192: "oom"}
    attempts = [Attempt(batch_size=size, outcome=outcome) for size, outcome in tried.items()]
    known = Findings(options=ProbeOptions(), opened=opened(), precision="fp32", bounds=Bounds(), attempts=attempts)
    found = known.result(1.0)
    assert (found.max_batch_size, found.first_failing_batch_size, found.limited_by) == (4096, 8192, "memory")


@pytest.mark.parametrize(("device", "told"), [("cpu", 1), ("cuda:0", 0)])
def test_a_training_set_that_keeps_what_it_loads_fills_the_memory_of_a_cpu_alone(device, told):
    seen = SamplesSeen(places=(0,), seen=40, total=4000, is_all=False, differing={}, kept_bytes=1 << 20)
    bounds = {"options": ProbeOptions(), "bounds": Bounds(), "precision": "fp32", "attempts": []}
    found = Findings(opened=opened(device=device, samples=seen), **bounds).result(0.0).warnings
    assert [each.startswith("the training set seems to keep what it has loaded, 1 MiB") for each in found] == [
        True
    ] * told

"""The data loader against the step: what is measured next, what the figures say, and a loader measured for real."""

import pytest
from fakes import FakeChild, opened

from batchtune.document import LoaderPoint, ProbeResult, ThroughputFit, ThroughputPoint
from batchtune.observer import Observer
from batchtune.probe.timing.loader import (
    TOTAL_SECONDS,
    Setting,
    batch_to_feed,
    choose,
    judge,
    measure_input_pipeline,
    next_setting,
)
from batchtune.processes.worker import WorkerDied

STEP = ThroughputPoint(batch_size=64, samples_per_second=8000.0, step_seconds=0.008)


def loader(num_workers, rate, *, pinned=False):
    return LoaderPoint(num_workers=num_workers, pin_memory=pinned, samples_per_second=rate)


def ladder(rate_of, *, processors=16, pins=False, step_rate=8000.0):
    """Every setting measured, in order, where `rate_of` says what each would give."""
    measured = []
    while (setting := next_setting(measured, step_rate, processors=processors, pins=pins)) is not None:
        measured.append(LoaderPoint(**setting._asdict(), samples_per_second=rate_of(setting)))
    return measured


def test_workers_are_doubled_until_they_keep_up():
    measured = ladder(lambda setting: 1500.0 * max(1, setting.num_workers))
    assert [point.num_workers for point in measured] == [0, 1, 2, 4, 8]
    assert choose(measured, 8000.0).num_workers == 8


def test_a_loader_that_is_fast_enough_without_workers_ends_it_at_once():
    assert ladder(lambda _: 1e6) == [loader(0, 1e6)]


def test_without_workers_a_loader_must_be_much_faster_than_the_step_because_the_step_waits():
    measured = ladder(lambda _: 16000.0)
    assert choose(measured, 8000.0).num_workers == 1


def test_no_more_workers_are_tried_than_there_are_processors():
    measured = ladder(lambda setting: 100.0 * max(1, setting.num_workers), processors=6)
    assert [point.num_workers for point in measured] == [0, 1, 2, 4, 6]


def test_more_workers_are_not_tried_once_they_bring_nothing():
    measured = ladder(lambda setting: 100.0 * min(2, max(1, setting.num_workers)), processors=128)
    assert [point.num_workers for point in measured] == [0, 1, 2, 4, 8]
    assert choose(measured, 8000.0).num_workers == 2


def test_pinned_memory_is_tried_where_the_device_can_use_it_and_taken_if_faster():
    measured = ladder(lambda setting: 9000.0 + 500 * setting.pin_memory if setting.num_workers else 10.0, pins=True)
    assert measured[-1] == loader(1, 9500.0, pinned=True)
    assert choose(measured, 8000.0).pin_memory


def test_pinned_memory_is_left_alone_if_slower():
    measured = ladder(lambda setting: 9000.0 - 500 * setting.pin_memory if setting.num_workers else 10.0, pins=True)
    assert choose(measured, 8000.0) == loader(1, 9000.0)


def test_a_loader_that_fails_is_not_asked_again():
    failed = LoaderPoint(num_workers=1, message="cannot pickle")
    assert next_setting([loader(0, 10.0), failed], 8000.0, processors=8, pins=True) is None


def test_a_slow_loader_is_called_input_bound_with_both_figures():
    found = judge([loader(0, 900.0), loader(1, 950.0), loader(2, 1200.0)], STEP, "", shares_cores=False)
    assert found.verdict == "input-bound: the loader gives 1,200 samples/s (with 2 workers), the step takes 8,000"
    assert found.input_bound
    assert (found.num_workers, found.loader_samples_per_second) == (2, 1200.0)


def test_a_loader_that_keeps_up_is_said_to():
    found = judge([loader(0, 900.0), loader(1, 9000.0)], STEP, "", shares_cores=False)
    assert found.verdict == "the loader keeps up with 1 worker: it gives 9,000 samples/s, the step takes 8,000"
    assert not found.input_bound


def test_where_workers_are_slower_than_waiting_nobody_is_told_that_the_loader_is_too_slow_for_the_step():
    found = judge([loader(0, 20000.0), loader(1, 1000.0)], STEP, "", shares_cores=False)
    assert found.input_bound
    assert found.num_workers == 0
    assert "steps wait 29% of the time for their data" in found.verdict


def test_on_a_cpu_the_verdict_says_that_both_share_it():
    assert "share the processors" in judge([loader(0, 900.0)], STEP, "", shares_cores=True).verdict


def test_a_loader_that_fails_from_the_start_has_no_figures_but_its_message():
    found = judge([LoaderPoint(num_workers=0, message="KeyError: 7")], STEP, "", shares_cores=False)
    assert found.verdict == "the loader failed: KeyError: 7"
    assert found.loader_samples_per_second is None
    assert found.input_bound is None


def probe_with(sizes, near):
    points = [ThroughputPoint(batch_size=size, samples_per_second=size, step_seconds=1.0) for size in sizes]
    fit = near and ThroughputFit(alpha_seconds=1, beta_seconds_per_sample=1, batch_size_within_5_percent=near)
    return ProbeResult(precision="fp32", throughput=points, throughput_fit=fit)


@pytest.mark.parametrize(("near", "chosen", "why"), [(4, 4, "within 5 %"), (None, 8, "largest")])
def test_the_loader_is_measured_where_training_is_about_as_fast_as_it_gets(near, chosen, why):
    point, reason = batch_to_feed(probe_with([2, 4, 8], near))
    assert point.batch_size == chosen
    assert why in reason


class FakeWorker(FakeChild):
    """Answers each setting with ten samples a second a worker, or with an error."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    def start(self):
        return opened(device="cuda:0")

    def answer(self, command, *, timeout, batch_size, seconds, **setting):
        self.asked.append(Setting(**setting))
        if self.error:
            raise self.error
        return loader(setting["num_workers"], 10.0 * max(1, setting["num_workers"])).model_dump()


def test_measuring_ends_when_its_time_is_over():
    worker, now = FakeWorker(), iter([0.0, 1.0, TOTAL_SECONDS + 1])
    found = measure_input_pipeline(worker, probe_with([1000], None), Observer(), timeout=1.0, clock=lambda: next(now))
    assert worker.asked == [Setting(0, pin_memory=False), Setting(1, pin_memory=False)]
    assert len(found.measured) == 2


def test_a_child_that_dies_over_the_loader_is_a_failed_setting():
    worker = FakeWorker(WorkerDied("timeout", "no sign of life for 1 s"))
    found = measure_input_pipeline(worker, probe_with([1000], None), Observer(), timeout=1.0)
    assert found.verdict == "the loader failed: no sign of life for 1 s"


def test_without_a_timed_step_there_is_nothing_to_compare_with():
    assert measure_input_pipeline(FakeWorker(), ProbeResult(precision="fp32"), Observer(), timeout=1.0) is None


def test_workers_that_failed_are_not_called_slower():
    step = STEP.model_copy(update={"samples_per_second": 100.0})
    failed = LoaderPoint(num_workers=1, message="TypeError: cannot pickle")
    verdict = judge([loader(0, 120.0), failed], step, "", shares_cores=False).verdict
    assert verdict.endswith("which comes at 120 samples/s; 1 worker failed: TypeError: cannot pickle")
    slower = judge([loader(0, 50.0), failed], step, "", shares_cores=False).verdict
    assert slower.endswith("the step takes 100; 1 worker failed: TypeError: cannot pickle")

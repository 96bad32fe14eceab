"""A probe with gradient accumulation: what each attempt is asked for, by a worker that records it."""

import pytest
from fakes import FakeChild, opened

from batchtune.config.probe import ProbeOptions
from batchtune.document import Attempt, ThroughputPoint
from batchtune.observer import Observer
from batchtune.probe.runner import Probe


class FakeWorker(FakeChild):
    """A device on which eight samples train."""

    def __init__(self):
        self.asked = []

    def start(self):
        environment = {"device": "NVIDIA A100-SXM4-80GB"}
        return opened(memory_limit_bytes=800, device="cuda:0", environment=environment)

    def renew(self, *, as_fork=True):
        self.asked.append(("renew", None))

    def answer(self, command, *, timeout, batch_size, precision, **arguments):
        self.asked.append((command, arguments.get("accumulation_steps")))
        if command == "attempt":
            outcome = "fit" if batch_size <= 8 else "oom"
            purpose = "verify" if arguments["verify"] else "search"
            attempt = Attempt(batch_size=batch_size, outcome=outcome, purpose=purpose, steps=arguments["steps"])
            return {"attempt": attempt.model_dump()}
        if command == "count_flops":
            return {"per_sample": 3.12e12}
        return ThroughputPoint(batch_size=batch_size, samples_per_second=10.0, step_seconds=1.0).model_dump()


@pytest.fixture(scope="module")
def probed():
    worker = FakeWorker()
    return worker, Probe(worker, ProbeOptions(accumulation_steps=16), "bf16", Observer()).run()


def accumulated(worker, command):
    return [steps for asked, steps in worker.asked if asked == command]


def test_the_search_accumulates_twice_which_is_all_that_memory_can_tell(probed):
    worker, result = probed
    searched = [each for each in result.attempts if each.purpose == "search"]
    assert accumulated(worker, "attempt")[: len(searched)] == [2] * len(searched)


def test_the_final_check_and_the_timing_accumulate_as_training_does(probed):
    worker, _ = probed
    assert accumulated(worker, "attempt")[-1] == 16
    assert set(accumulated(worker, "time_steps")) == {16}


def test_the_result_says_how_many_were_accumulated(probed):
    assert probed[1].gradient_accumulation_steps == 16


def test_without_accumulation_one_micro_batch_is_a_step():
    worker = FakeWorker()
    Probe(worker, ProbeOptions(), "bf16", Observer()).run()
    assert set(accumulated(worker, "attempt")) == {1}


def test_every_timed_size_has_its_share_of_the_peak(probed):
    assert [round(point.mfu, 3) for point in probed[1].throughput] == [0.1] * 4  # of 312 TFLOP/s in bf16


def test_after_counting_the_next_work_begins_in_a_fresh_child(probed):
    assert probed[0].asked[-1] == ("renew", None)
    assert probed[0].asked[-2][0] == "count_flops"

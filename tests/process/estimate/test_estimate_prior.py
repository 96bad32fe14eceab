"""The estimate as a probe's prior, on a child that is scripted and on a real one."""

from __future__ import annotations

import time

import pytest
from fakes import opened
from fixtures.tracing import TASK

from batchtune.document import Attempt
from batchtune.errors import DeviceError
from batchtune.estimate import prior as estimate_prior
from batchtune.estimate.calibration import offsets_of
from batchtune.estimate.commands import LengthEstimates, Refusal, Replayed, TaskEstimate
from batchtune.estimate.memory.overheads import UNMEASURED
from batchtune.estimate.prior import EstimatePrior
from batchtune.observer import Observer
from batchtune.processes.worker import WorkerDied

MIB, GIB = 1 << 20, 1 << 30
FACTS = {
    "device": "cuda:0",
    "memory_limit_bytes": 20 * GIB,
    "environment": {"device": "NVIDIA A100-SXM4-80GB"},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Notes(Observer):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Child:
    """A worker whose answer is given."""

    def __init__(self, answer):
        self.answer, self.asked, self.closed = answer, [], 0

    def call(self, command, *, timeout):
        self.asked.append((type(command).__name__, dict(command)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self):
        self.closed += 1


def estimated(**changes):
    """A gigabyte and a mebibyte for each sample."""
    fields = {
        "expected": 18_000,
        "start": 17_822,
        "peaks": [(1, GIB + MIB), (100, GIB + 100 * MIB), (100_000, GIB + 100_000 * MIB)],
        "unseen_share": 0.0,
        "kind": "convolution",
        "model_independent": True,
    }
    return TaskEstimate(**fields | changes)


def fits(*pairs):
    return [Attempt(batch_size=size, outcome="fit", peak_allocated_bytes=int(peak)) for size, peak in pairs]


def test_the_peaks_run_straight_between_those_that_were_traced_with_what_libraries_take_on_top():
    found = estimated(unseen_share=0.5)
    assert found.allocated_bytes(18_000) == pytest.approx(1.5 * (GIB + 18_000 * MIB))
    assert found.traced_bytes(5_000) == pytest.approx(GIB + 5_000 * MIB)
    assert found.traced_bytes(400_000) == pytest.approx(GIB + 400_000 * MIB)


class TestOfAllLengths:
    """The child is asked by a thread, so that the probe is at the longest length meanwhile."""

    @pytest.fixture
    def look(self):
        def look(child, notes=None):
            prior = EstimatePrior("model.py", "mps", notes or Notes())
            prior._worker = child
            return prior.look_at_lengths(opened(**FACTS), "bf16", 1, (128, 512))

        return look

    def test_each_has_an_estimate_and_batches_of_all_are_replayed_once(self, look):
        child = Child(LengthEstimates(lengths=((128, estimated()), (512, estimated(expected=4000))), replays=True))
        ahead = look(child)
        assert {length: each.expected for length, each in ahead.peaks().items()} == {128: 18_000, 512: 4000}
        child.answer = Replayed(fails_in=3)
        assert [ahead.fails_in({512: 4000, 128: 16_000}, 20 * GIB) for _ in range(2)] == [3, 3]
        assert [name for name, _ in child.asked] == ["ExpectLengths", "ReplayLengths"]

    @pytest.mark.parametrize(
        ("answer", "told"),
        [
            (Refusal(refused="ctc_loss needs data"), "ctc_loss needs data"),
            (WorkerDied("timeout", "nothing for 180 s"), "tracing took too long"),
            (OSError("broken pipe"), "broken pipe"),
        ],
    )
    def test_what_cannot_be_traced_is_told_and_costs_nothing_but_the_estimate(self, look, answer, told):
        notes = Notes()
        ahead = look(Child(answer), notes)
        assert (ahead.peaks(), ahead.replays) == ({}, False)
        assert any(told in note for note in notes.notes)

    def test_after_a_replay_that_does_not_come_back_nothing_is_foreseen_to_train(self, look):
        child = Child(LengthEstimates(lengths=((128, estimated()),), replays=True))
        ahead = look(child)
        ahead.peaks()
        child.answer = WorkerDied("timeout", "nothing for 100 s")
        assert ahead.fails_in({128: 16_000}, 20 * GIB) == 0
        assert not ahead.replays


@pytest.mark.parametrize(
    ("changes", "attempts"),
    [
        ({"kind": "plain"}, fits((10, GIB + 110 * MIB))),  # where the trace sees all
        ({"model_independent": False}, fits((10, GIB + 110 * MIB))),
        ({}, [Attempt(batch_size=10, outcome="oom")]),
        ({}, [Attempt(batch_size=10, outcome="fit", peak_reserved_bytes=GIB)]),
    ],
)
def test_what_is_not_the_gpus_own_is_not_learnt(changes, attempts):
    estimated(**changes).learn("NVIDIA A100-SXM4-80GB", attempts)
    assert offsets_of("A100-80GB") == UNMEASURED


def test_what_cudnn_takes_is_learnt_as_a_share():
    estimated().learn("NVIDIA A100-SXM4-80GB", fits((1000, 1.1 * (GIB + 1000 * MIB)), (10, 1.1 * (GIB + 10 * MIB))))
    assert offsets_of("A100-80GB").convolution_share == pytest.approx(0.1, abs=1e-6)


def test_what_was_measured_under_two_of_a_drivers_names_counts_together():
    for name, share in (("NVIDIA A100-SXM4-80GB", 1.1), ("NVIDIA A100-SXM-80GB", 1.3)):
        estimated().learn(name, fits((1000, share * (GIB + 1000 * MIB)), (10, share * (GIB + 10 * MIB))))
    assert offsets_of("A100-80GB").convolution_share == pytest.approx(0.2, abs=1e-6)


def looking(answer, opening=FACTS, device="cuda:0"):
    notes, child = Notes(), Child(answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate_prior, "Worker", lambda settings, program: child)
        with EstimatePrior("model.py", device, notes) as sight:
            found = sight.look(opened(**opening), "bf16", 2, timeout=120)
    return found, notes.notes, child


def test_the_child_is_started_at_once_and_asked_once_the_device_is_known():
    found, notes, child = looking(estimated())
    assert [name for name, _ in child.asked] == ["LoadTracer", "ExpectMemory"]
    asked = child.asked[1][1]
    assert (asked["precision"], asked["accumulation_steps"], asked["memory_limit"]) == ("bf16", 2, 20 * GIB)
    assert asked["gpu"].generation == "Ampere"
    assert found == estimated()
    assert notes == ["estimate: about 18,000 samples fit at bf16"]
    assert child.closed == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Refusal(refused="model.py:3: cannot be traced"), "model.py:3: cannot be traced"),
        (WorkerDied("timeout", "no sign of life for 60 s"), "tracing took too long, and a probe can do without"),
        (WorkerDied("crash", "the process died by SIGSEGV"), "the process died by SIGSEGV"),
        (DeviceError("not in this build"), "not in this build"),
    ],
)
def test_an_estimate_that_fails_is_a_note_and_never_an_error(answer, why):
    found, notes, _ = looking(answer)
    assert found is None
    assert notes == [f"no estimate to start from: {why}"]


def test_all_precisions_together_hold_a_probe_up_for_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(estimate_prior, "TRACE_SECONDS", 0.2)
    notes, child = Notes(), Child(WorkerDied("timeout", "no sign of life"))
    child.call = lambda command, *, timeout: time.sleep(timeout) or Child.call(child, command, timeout=timeout)
    monkeypatch.setattr(estimate_prior, "Worker", lambda settings, program: child)
    with EstimatePrior("model.py", "mps", notes) as sight:
        found = [sight.look(opened(**FACTS), precision, 1, timeout=120) for precision in ("bf16", "fp16", "fp32")]
    assert found == [None] * 3
    assert len(notes.notes) == len(child.asked) == 1


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_are_not_estimated_and_no_child_is_started(device):
    found, notes, child = looking(None, FACTS | {"device": device}, device)
    assert (found, notes, child.asked) == (None, [], [])


def test_a_real_child_foresees_what_the_allocator_model_would_hold(tmp_path):
    path = tmp_path / "mlp.py"
    path.write_text(TASK)
    notes = Notes()
    with EstimatePrior(str(path), "auto", notes) as sight:
        found = sight.look(opened(**FACTS), "fp32", 1, timeout=120)
    assert found is not None, notes.notes
    assert 18 * GIB < found.allocated_bytes(found.expected) < 20 * GIB
    assert found.kind == "plain"
    assert found.model_independent

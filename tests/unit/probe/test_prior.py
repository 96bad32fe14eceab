"""A probe that starts from an estimate: where it looks first, what it learns, and that it never needs one."""

import importlib
import math

import pytest
from fakes import FakeChild, opened

from batchtune.config.probe import Bounds, ProbeOptions
from batchtune.document import Attempt
from batchtune.estimate.commands import TaskEstimate
from batchtune.observer import Observer
from batchtune.probe.runner import Probe
from batchtune.probe.search import next_size
from batchtune.protocol.commands import OpenTask

run, session = map(importlib.import_module, ("batchtune.probe.run", "batchtune.probe.session"))
MIB, GIB = 1 << 20, 1 << 30
LIMIT = 20 * GIB


class Device(FakeChild):
    """A child that trains on a device of 20 GiB: a gibibyte, and so many MiB for each sample."""

    def __init__(self, mib_per_sample=4.0, device="cuda:0"):
        self.bytes_per_sample, self.device, self.sizes = mib_per_sample * MIB, device, []
        self.opened = self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def start(self):
        return opened(
            device=self.device,
            memory_limit_bytes=LIMIT,
            precision=[("bf16", "asked for")],
            environment={"device": "NVIDIA A100-SXM4-80GB"},
        )

    def prepare(self):
        return None

    def renew(self, *, as_fork=True):
        return None

    def close(self):
        return None

    def answer(self, command, *, batch_size, steps, verify=False, **_):
        self.sizes.append(batch_size)
        peak = int(GIB + batch_size * self.bytes_per_sample)
        purpose = "verify" if verify else "search"
        if peak > LIMIT:
            return {"attempt": Attempt(batch_size=batch_size, outcome="oom", purpose=purpose).model_dump()}
        fit = Attempt(
            batch_size=batch_size,
            outcome="fit",
            steps=steps,
            purpose=purpose,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            forward_backward_peak_bytes=peak,
        )
        return {"attempt": fit.model_dump()}


def expecting(size):
    """An estimate in which `size` samples fill the limit."""
    per_sample = (LIMIT - GIB) / size
    return TaskEstimate(
        expected=size,
        start=math.ceil(size / 1.01),
        peaks=[(1, int(GIB + per_sample)), (10 * size, int(GIB + 10 * size * per_sample))],
        unseen_share=0.0,
        kind="plain",
        model_independent=True,
    )


def probed(device, prior=None, **options):
    found = Probe(device, ProbeOptions(throughput=False, **options), "bf16", Observer(), prior=prior).run()
    return found, [attempt.batch_size for attempt in found.attempts if attempt.purpose == "search"]


def test_the_first_attempt_lies_just_below_the_estimate():
    _, tried = probed(Device(), expecting(4700))
    assert tried[0] == pytest.approx(0.99 * 4700, rel=0.002)


def test_the_second_attempt_lies_at_four_fifths_of_an_estimate_that_was_too_high():
    _, tried = probed(Device(), expecting(5000))
    assert tried[:2] == pytest.approx([0.99 * 5000, 0.8 * 5000], rel=0.002)


@pytest.mark.parametrize("expected", [4864, 5000, 4500])
def test_an_estimate_that_is_about_right_spares_attempts_and_changes_no_answer(expected):
    without, more = probed(Device())
    found, fewer = probed(Device(), expecting(expected))
    assert len(fewer) < len(more)
    assert found.max_batch_size == pytest.approx(without.max_batch_size, rel=0.01)


@pytest.mark.parametrize("expected", [60, 400_000])
def test_an_estimate_that_is_far_off_changes_no_answer(expected):
    found, _ = probed(Device(), expecting(expected))
    assert found.max_batch_size == pytest.approx(4864, rel=0.01)


def test_an_estimate_that_an_oom_has_refuted_is_asked_no_more():
    _, without = probed(Device())
    _, tried = probed(Device(), expecting(400_000))
    assert tried[0] > 300_000
    assert len(tried) <= len(without) + 4


def test_a_maximum_that_is_expected_to_fit_is_tried_at_once():
    found, tried = probed(Device(), expecting(4864), maximum=1000)
    assert (found.max_batch_size, tried) == (1000, [1000])


@pytest.mark.parametrize("maximum", [None, 2**23])
def test_where_a_search_ends_without_a_maximum_is_told(maximum):
    found, _ = probed(Device(1e-6), maximum=maximum)
    assert found.max_batch_size == (maximum or 2**22)
    assert [text for text in found.warnings if "--max" in text] == (
        [] if maximum else ["a search without a maximum ends at 4,194,304 samples: --max looks for more"]
    )


class Sight:
    """Stands where `EstimatePrior` stands."""

    def __init__(self, estimated):
        self.estimated, self.learnt = estimated, []

    def __call__(self, task, device, observer):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def look(self, facts, precision, accumulation_steps, *, timeout):
        return self.estimated


@pytest.mark.parametrize("estimated", [None, expecting(4864)])
def test_the_command_probes_with_an_estimate_and_without(monkeypatch, tmp_path, estimated):
    device, learnt = Device(), []
    (tmp_path / "model.py").write_text("")
    monkeypatch.setattr(TaskEstimate, "learn", lambda self, name, attempts: learnt.append((name, len(attempts))))
    monkeypatch.setattr(run, "Worker", lambda *_, **_how: device)
    monkeypatch.setattr(session, "EstimatePrior", Sight(estimated))
    result = run.run_probe(
        OpenTask(task=str(tmp_path / "model.py")),
        ProbeOptions(throughput=False),
        name="model",
        observer=Observer(),
    )
    assert result.probe.max_batch_size == pytest.approx(4864, rel=0.01)
    assert (device.sizes[0] > 1000) == (estimated is not None)
    assert learnt == ([("NVIDIA A100-SXM4-80GB", len(result.probe.attempts))] if estimated else [])


def test_a_start_at_the_maximum_that_the_task_rejects_does_not_end_the_search():
    bounds = Bounds(minimum=10, maximum=14, multiple_of=1, tolerance=0.0)
    rejected = Attempt(batch_size=14, outcome="user_error", seconds=0.1, message="no more than 12 classes")
    choice = next_size([rejected], bounds, LIMIT, expecting(1_000_000))
    assert choice.batch_size == 10

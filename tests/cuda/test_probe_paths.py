"""A probe of a card from its first look to its calibration, and that nobody but one child ever opens a context."""

import os

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES, PERCEPTRON
from fixtures.waiting import wait_until

import batchtune
from batchtune.errors import UserCodeError
from batchtune.estimate.calibration import offsets_of
from batchtune.observer import Observer

MiB = 2**20


class Watch(Observer):
    """Who has a context on the card whenever something happens, and what is told."""

    def __init__(self, card):
        self._card, self.contexts, self.notes = card, [], []

    def _look(self):
        self.contexts.append(self._card.contexts)

    def attempting(self, batch_size, reason):
        self._look()

    def attempted(self, attempt):
        self._look()

    def throughput(self, point):
        self._look()

    def note(self, text):
        self.notes.append(text)
        self._look()


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(PERCEPTRON)
    return tmp_path / "model.py"


@ESTIMATES
@pytest.mark.usefixtures("started_children")
def test_a_probe_starts_from_its_estimate_calibrates_the_next_and_only_one_child_opens_the_card(task):
    card = fake_gpu.Card(
        "8GiB", context_bytes=300 * MiB, cublas_handle_bytes=32 * MiB, launch_seconds=2e-5, flops=2e13,
        throttle_reasons=0x4,
    )  # fmt: skip
    with fake_gpu.machine(card) as machine:
        card, watch = machine.cards[0], Watch(machine.cards[0])
        options = {"precision": "fp32", "memory_limit": "2GiB"}
        result = batchtune.probe(task, device="cuda", tolerance=0.1, verify_steps=2, observer=watch, **options)
        assert os.getpid() not in {pid for contexts in watch.contexts for pid in contexts}
        assert max(len(contexts) for contexts in watch.contexts) == 1
        assert wait_until(lambda: card.processes == {})
        (again,) = batchtune.estimate(task, gpus="RTX 3090", **options).estimates
        assert card.contexts == []

    found = result.probe
    assert any(note.startswith("estimate: about ") for note in watch.notes)
    assert found.attempts[0].batch_size > 0.5 * found.max_batch_size
    assert (found.limited_by, found.verified_in_fresh_process) == ("memory", True)
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= found.memory_limit_bytes == 2048 * MiB

    # what a process takes outside of its allocator: the context, and a handle of cuBLAS for each thread that multiplies
    assert offsets_of("RTX 3090").context_bytes == 300 * MiB + 2 * 32 * MiB
    assert "calibrated" in again.confidence
    assert again.max_batch_size == pytest.approx(found.max_batch_size, rel=0.1)

    environment = result.environment
    assert (environment.device, environment.device_type) == ("NVIDIA GeForce RTX 3090", "cuda")
    assert environment.device_memory_bytes == environment.device_memory_free_bytes == 8192 * MiB
    assert environment.device_memory_free_after_bytes == 8192 * MiB
    assert environment.other_processes == []
    assert environment.driver
    assert environment.cuda

    largest = found.throughput[-1]
    assert 0.5 < largest.gpu_utilization <= 1
    assert 0 < largest.memory_controller_utilization <= 1
    assert 25 < largest.power_watts <= 350
    assert largest.joules_per_sample > 0
    assert largest.throttle_reasons == ["power cap"]
    assert largest.memory_used_bytes > 300 * MiB
    assert found.throughput_fit is not None


def test_every_precision_of_the_card_is_probed_at_multiples_between_the_bounds(task):
    with fake_gpu.machine(fake_gpu.Card("8GiB")) as machine:
        bounds = {"min": 10, "max": 40, "multiple_of": 12}
        result = batchtune.probe(
            task, device="cuda", precision="all", accumulation=4, verify_steps=1, throughput=False, **bounds
        )
        assert wait_until(lambda: machine.cards[0].processes == {})
    assert {probe.precision for probe in result.probes} == {"bf16", "fp16", "fp32", "tf32"}
    for probe in result.probes:
        assert (probe.max_batch_size, probe.limited_by, probe.gradient_accumulation_steps) == (36, "max", 4)
        assert {attempt.batch_size % 12 for attempt in probe.attempts} == {0}
        assert probe.verified_in_fresh_process


BCE = PERCEPTRON.replace("model(batch).square().mean()", "nn.BCELoss()(model(batch).sigmoid(), torch.ones_like(batch))")
LBFGS = """

def build_optimizer(model, lr):
    return torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=2)

def train_step(model, batch, optimizer, context):
    def closure():
        optimizer.zero_grad()
        with context.autocast():
            loss = compute_loss(model, batch)
        context.backward(loss)
        return loss
    return context.step(optimizer, closure)
"""


@ESTIMATES
@pytest.mark.parametrize(
    ("source", "capability", "half", "why"),
    [
        (BCE, (8, 6), "bf16", "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"),
        (PERCEPTRON + LBFGS, (7, 5), "fp16", "fp16's loss scale does not go with an optimizer stepped with a closure"),
    ],
    ids=["BCELoss", "LBFGS"],
)
def test_where_a_half_precision_that_nobody_asked_for_is_refused_probe_and_estimate_take_fp32(
    task, source, capability, half, why
):
    task.write_text(source)
    name, options = {"bf16": "RTX 3090", "fp16": "T4"}[half], {"max": 4, "throughput": False, "verify_steps": 1}
    with fake_gpu.machine(fake_gpu.Card("8GiB", capability=capability, name=name)):
        result = batchtune.probe(task, device="cuda", **options)
        with pytest.raises(UserCodeError, match=why):
            batchtune.probe(task, device="cuda", precision=half, **options)
        (estimated,) = batchtune.estimate(task, gpus=name).estimates
    told = f"fp32 and not {half}, since {why}"
    assert (result.probe.precision, result.probe.max_batch_size, estimated.precision) == ("fp32", 4, "fp32")
    assert (told in result.warnings, told in estimated.notes) == (True, True)


FREES_BETWEEN = """
import json, sys, torch
import model as task
torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.mem_get_info()[1])
model = task.build_model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = task.make_batch(int(sys.argv[2])).cuda()
try:
    for _ in range(4):
        loss = task.compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(json.dumps(True))
except torch.OutOfMemoryError:
    print(json.dumps(False))
"""


def test_a_loop_that_frees_gradients_between_loss_and_backward_trains_what_accumulated_gradients_leave(task, script):
    limit, found = 256 * MiB, {}
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        for steps in (1, 2):
            options = {"memory_limit": limit, "accumulation": steps, "throughput": False}
            found[steps] = batchtune.probe(task, device="cuda", precision="fp32", verify_steps=4, **options).probe
        sizes = {steps: probe.max_batch_size for steps, probe in found.items()}
        assert sizes[2] < sizes[1]
        assert script(FREES_BETWEEN, limit, sizes[2], PYTHONPATH=str(task.parent))
        assert not script(FREES_BETWEEN, limit, 2 * sizes[1], PYTHONPATH=str(task.parent))

"""The records that an estimate ends in, from the child's answers and the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from fixtures.tracing import TASK

from batchtune.errors import UsageError
from batchtune.estimate import run as estimating
from batchtune.estimate.commands import EstimateMemory
from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.events import Work
from batchtune.estimate.memory.overheads import OVERHEADS, capacity_bytes, confidence, gpu_of, overhead_of
from batchtune.estimate.run import choose, samples_per_second

GIB = 1 << 30
estimate_task = partial(estimating.estimate_task, timeout=60.0)
DEEP = (
    TASK.replace("nn.Sequential(", "nn.Sequential(*[nn.Sequential(")
    .replace("4096, 1024))", "4096, 1024)) for _ in range(4)])")
    .replace("torch.randn(", "torch.zeros(1).expand(")  # which takes no memory: it would be hundreds of megabytes
)


@dataclass
class Gpu:
    name: str = "A100"
    vendor: str = "NVIDIA"
    generation: str = "Ampere"
    capacity_bytes: int = 40 * GIB
    memory_bytes: int = 41 * GIB
    compute_capability: tuple[int, int] | None = (8, 0)
    bandwidth_bytes_per_second: float = 1.5e12
    tflops: dict = field(default_factory=lambda: {"bf16": 312.0, "fp32": 19.5, "tf32": 156.0})
    board_power_watts: int | None = 400


LOADER = """
def train_loader(size):
    samples = torch.zeros(200, 64, 1024)
    samples[:: 400 // size]  # which refuses sizes above 400 in words of its own
    return [samples[at : at + size] for at in range(0, 201 - size, size)]
"""


@pytest.mark.parametrize(
    ("own", "which"),
    [
        ("def train_dataset():\n    return [torch.randn(64, 1024)] * 200\n", "train_dataset"),
        (LOADER, "an epoch of train_loader"),
    ],
)
def test_a_batch_that_the_training_set_does_not_hold_is_told(tmp_path, own, which):
    path = tmp_path / "mlp.py"
    path.write_text(TASK.replace("def make_batch(size):\n    return torch.randn(size, 64, 1024)\n", own))
    gpus = [Gpu("small", capacity_bytes=900 * MIB), Gpu("large")]
    small, large = estimate_task(EstimateMemory(task=str(path)), gpus, ["fp32"]).estimates
    assert small.max_batch_size <= 200 < large.max_batch_size
    note = f"{which} has 200 samples: training makes no larger batches"
    assert (note in small.notes, note in large.notes) == (False, True)


def test_one_record_for_each_gpu_and_precision_larger_gpus_holding_more(tmp_path):
    path = tmp_path / "mlp.py"
    path.write_text(TASK)
    gpus = [Gpu("small", capacity_bytes=8 * GIB), Gpu("large"), Gpu("tiny", capacity_bytes=500 * MIB)]
    run = estimate_task(EstimateMemory(task=str(path)), gpus, ["fp32", "tf32"])
    assert [(each.gpu, each.precision) for each in run.estimates] == [
        (gpu.name, precision) for gpu in gpus for precision in ("fp32", "tf32")
    ]
    small, _, large, _, tiny, _ = run.estimates
    assert 4 * small.max_batch_size < large.max_batch_size
    assert small.safe_max_batch_size < small.max_batch_size <= small.expandable_segments_max_batch_size
    assert 0.9 * (8 * GIB - 450 * MIB) < small.peak_bytes < 8 * GIB
    assert tiny.max_batch_size == 0
    assert tiny.peak_bytes is None
    assert any("a batch of 1 needs" in note for note in tiny.notes)
    assert run.estimates[0].max_batch_size == run.estimates[1].max_batch_size, "TF32 stores what FP32 does"
    assert run.estimates[1].samples_per_second > run.estimates[0].samples_per_second
    assert [detail.precision for detail in run.details] == ["fp32"]
    assert run.details[0].batch_size == large.max_batch_size


def test_where_nothing_fits_what_would_make_it_fit_is_traced_too(tmp_path):
    path = tmp_path / "deep.py"
    path.write_text(DEEP.replace("(size, 64, 1024)", "(size, 16384, 1024)"))
    (found,) = estimate_task(EstimateMemory(task=str(path)), [Gpu(capacity_bytes=2500 * MIB)], ["fp32"]).estimates
    assert found.max_batch_size == 0
    (note,) = [note for note in found.notes if note.startswith("would fit with ")]
    assert "with activation checkpointing of its repeated blocks: " in note


def test_what_would_make_the_longest_inputs_fit_is_traced_with_batches_of_that_length(tmp_path):
    path = tmp_path / "long.py"
    path.write_text(
        DEEP.replace("make_batch(size)", "make_batch(size, length)").replace("(size, 64, 1024)", "(size, length, 1024)")
    )
    question = EstimateMemory(task=str(path), lengths=(16384,))
    (found,) = estimate_task(question, [Gpu(capacity_bytes=2500 * MIB)], ["fp32"], timeout=240.0).estimates
    assert found.max_batch_size == 0
    (note,) = [note for note in found.notes if note.startswith("would fit with ")]
    assert "with activation checkpointing of its repeated blocks: " in note


def test_each_precision_has_a_detail_of_its_largest_batch(tmp_path):
    path = tmp_path / "mlp.py"
    path.write_text(TASK)
    old = Gpu("T4", generation="Turing", capacity_bytes=2 * GIB, compute_capability=(7, 5))
    run = estimate_task(EstimateMemory(task=str(path)), [old, Gpu()], ["auto"])
    assert [each.precision for each in run.estimates] == ["fp16", "bf16"]
    assert not any("emulated" in note for each in run.estimates for note in each.notes)
    assert [(each.precision, each.batch_size) for each in run.details] == [
        (row.precision, row.max_batch_size) for row in run.estimates
    ]


SCORES = """
import torch

def build_model():
    return torch.nn.Linear(64, 4000)

def make_batch(size):
    return torch.randn(size, 64)

def compute_loss(model, batch):
    scores = model(batch)
    return FORMULA[:, 0].mean()
"""


@pytest.mark.parametrize(
    "formula",
    [
        "torch.softmax(scores, -1)",  # CUDA casts fp16 alone as it goes
        "torch.log_softmax(scores, -1)",
        "(scores if scores.dtype == torch.float16 else scores.float().square())",
    ],
)
def test_fp16_takes_what_it_takes_alone_whatever_else_is_asked_about(tmp_path, formula):
    path = tmp_path / "scores.py"
    path.write_text(SCORES.replace("FORMULA", formula))
    question = EstimateMemory(task=str(path))
    run = estimate_task(question, [Gpu()], ["bf16", "fp16"])
    assert [detail.precision for detail in run.details] == ["bf16", "fp16"]
    bf16, fp16 = (detail.peak_allocated_bytes / detail.batch_size for detail in run.details)
    assert 1.1 * fp16 < bf16
    (alone,) = estimate_task(question, [Gpu()], ["fp16"]).estimates
    assert alone == run.estimates[1]


BY_CLOSURE = """
def build_optimizer(model, lr):
    return torch.optim.LBFGS(model.parameters(), lr=lr)

def train_step(model, batch, optimizer, context):
    def closure():
        optimizer.zero_grad()
        loss = compute_loss(model, batch)
        context.backward(loss)
        return loss
    return context.step(optimizer, closure)
"""


def test_where_fp16_does_not_train_a_gpu_without_bf16_is_estimated_at_fp32_unless_fp16_was_asked_for(tmp_path):
    path = tmp_path / "mlp.py"
    path.write_text(TASK + BY_CLOSURE)
    old = Gpu("T4", generation="Turing", compute_capability=(7, 5), tflops={"fp32": 8.1})
    question, why = (
        EstimateMemory(task=str(path)),
        "fp16's loss scale does not go with an optimizer stepped with a closure",
    )
    run = estimate_task(question, [old, Gpu()], ["auto"])
    assert [(each.gpu, each.precision) for each in run.estimates] == [("T4", "fp32"), ("A100", "bf16")]
    assert [any(why in note for note in each.notes) for each in run.estimates] == [True, False]
    assert [each.precision for each in run.details] == ["fp32", "bf16"]
    assert run.estimates[0].max_batch_size == estimate_task(question, [old], ["fp32"]).estimates[0].max_batch_size
    both = estimate_task(question, [old], ["auto", "fp32"])
    assert [(each.gpu, each.precision) for each in both.estimates] == [("T4", "fp32")]
    assert [each.precision for each in both.details] == ["fp32"]
    (tiny,) = estimate_task(question, [replace(old, capacity_bytes=300 * MIB)], ["auto"]).estimates
    assert tiny.max_batch_size == 0
    assert not any("bf16" in note for note in tiny.notes)
    refused = estimate_task(question, [old, Gpu()], ["fp16", "bf16"])
    assert [each.confidence == "refused" for each in refused.estimates] == [True, False, True, False]
    assert str(estimate_task(question, [old], ["fp16"]).refusal) == f"{why}; use bf16 or fp32"


def test_precisions_that_an_old_gpu_only_emulates_are_called_so(tmp_path):
    path = tmp_path / "mlp.py"
    path.write_text(TASK)
    old = Gpu("V100", generation="Volta", compute_capability=(7, 0))
    rows = estimate_task(EstimateMemory(task=str(path)), [old, Gpu()], ["bf16", "fp16"]).estimates
    assert [any("bf16 is emulated" in note for note in row.notes) for row in rows] == [True, False, False, False]


def test_what_no_change_makes_fit_is_said_to_be_for_several_gpus(tmp_path):
    path = tmp_path / "mlp.py"
    path.write_text(TASK)
    (found,) = estimate_task(EstimateMemory(task=str(path)), [Gpu(capacity_bytes=500 * MIB)], ["bf16"]).estimates
    assert found.max_batch_size == 0
    assert [note for note in found.notes if note.startswith("would fit")] == []
    assert any("--strategy fsdp" in note for note in found.notes)


def test_a_memory_limit_counts_where_it_is_below_what_the_gpu_has():
    ops = {"aten.addmm.default"}
    free = capacity_bytes(40 * GIB, "Ampere", "NVIDIA", ops, None)
    assert capacity_bytes(40 * GIB, "Ampere", "NVIDIA", ops, 20 * GIB) == 20 * GIB
    assert capacity_bytes(40 * GIB, "Ampere", "NVIDIA", ops, 80 * GIB) == free
    assert capacity_bytes(40 * GIB, "Ampere", "NVIDIA", set(), None) == 40 * GIB - 450 * MIB


def test_hopper_keeps_larger_workspaces_and_an_unknown_generation_counts_as_the_costliest():
    assert overhead_of("Hopper").gpu.cublas_bytes == 32 * MIB
    assert overhead_of("Ada Lovelace") is OVERHEADS["Ada"]
    assert overhead_of("of next year").context_bytes == max(each.context_bytes for each in OVERHEADS.values())


@pytest.mark.parametrize(
    ("ops", "vendor", "precision", "level"),
    [
        ({"aten.addmm.default"}, "NVIDIA", "fp32", "high"),
        ({"aten.convolution.default"}, "NVIDIA", "bf16", "medium"),
        ({"aten.convolution.default"}, "NVIDIA", "fp32", "low"),
        ({"aten._cudnn_rnn.default", "aten.addmm.default"}, "NVIDIA", "bf16", "low"),
        ({"my_kernels.fused.default"}, "NVIDIA", "bf16", "low"),
        ({"aten.addmm.default"}, "AMD", "bf16", "low"),
    ],
)
def test_confidence_falls_with_what_a_trace_cannot_see_and_says_why(ops, vendor, precision, level):
    found = confidence(ops, [], aligned=True, vendor=vendor, precision=precision)
    assert found.name == level
    assert bool(found.notes) == (level != "high")
    assert f"{found.band:.0%}" in str(found)


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        (Gpu(), "bf16"),
        (Gpu(compute_capability=(7, 5)), "fp16"),
        (Gpu(compute_capability=(6, 1)), "fp32"),
        (Gpu(vendor="AMD", compute_capability=None), "bf16"),
        (Gpu(vendor="Apple", compute_capability=None), "fp32"),
    ],
)
def test_auto_is_what_the_gpu_does_well(gpu, precision):
    assert choose(gpu) == precision


def test_speed_is_bounded_by_arithmetic_or_by_memory_and_absent_where_a_rate_is_not_known():
    work = Work(flops=312e12, matmul_bytes=0.0, other_bytes=1.5e12)
    assert samples_per_second(Gpu(), "bf16", 10, work) == pytest.approx(5.0)
    assert samples_per_second(Gpu(), "fp16", 10, work) is None
    assert samples_per_second(Gpu(), "bf16", 0, None) is None


def test_an_unknown_precision_is_a_usage_error():
    with pytest.raises(UsageError, match="--precision int8"):
        estimate_task(EstimateMemory(task="model.py"), [Gpu()], ["int8"])


def test_scratch_is_that_of_the_gpu_where_it_is_known_and_else_of_its_generations_largest():
    a5000, a4000, unknown = (
        gpu_of(name, "Ampere") for name in ("NVIDIA RTX A5000", "RTX A4000", "nothing of the kind")
    )
    assert (a5000.multiprocessors, a5000.threads) == (64, 1536)
    assert (a4000.multiprocessors, a4000.threads) == (108, 1536)
    assert unknown == OVERHEADS["Ampere"].gpu

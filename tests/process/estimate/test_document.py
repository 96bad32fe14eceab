"""Which documents an estimate ends in, and with which exit code."""

from __future__ import annotations

import pytest

import batchtune
from batchtune.document import Estimate, Remedy
from batchtune.errors import NothingFitsError
from batchtune.estimate.document import too_large

TASK = """
import torch
from torch import nn

def build_model():
    return nn.Linear(1024, 1024)

def make_batch(size):
    return torch.randn(size, 1024)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "linear.py"
    path.write_text(TASK)
    return str(path)


def test_where_nothing_fits_the_command_says_so_prints_its_rows_and_exits_with_4(quick_cli, task):
    found = quick_cli("estimate", task, "--gpu", "T4", "--gpu", "4090", "--memory-limit", "4MiB", "--json", "-q")
    assert found.code == 4
    assert found.err.startswith("batchtune: nothing fits on any of 2 GPUs; RTX 4090 at bf16: a batch of 1 needs ")
    assert found.err.count("\n") == 1
    rows = found.document["estimates"]
    assert [(row["gpu"], row["max_batch_size"]) for row in rows] == [("T4", 0), ("RTX 4090", 0)]
    assert all(any("does not fit with activation checkpointing" in note for note in row["notes"]) for row in rows)


def test_where_one_gpu_holds_it_the_question_is_answered(task):
    rows = batchtune.estimate(task, gpus=["T4", "4090"], precision=["fp32"], memory_limit="1GiB").estimates
    assert all(row.max_batch_size for row in rows)


def test_the_error_carries_the_document(task):
    with pytest.raises(NothingFitsError, match=r"^nothing fits on T4 at fp16: a batch of 1 needs ") as raised:
        batchtune.estimate(task, gpus="T4", memory_limit="4MiB")
    assert raised.value.result.status == "complete"
    assert [row.max_batch_size for row in raised.value.result.estimates] == [0]


def test_the_line_is_about_the_gpu_that_something_helps_on():
    nothing = {"max_batch_size": 0, "needed_bytes": 30 << 30}
    rows = [
        Estimate(gpu="large", memory_bytes=80, precision="bf16", **nothing),
        Estimate(
            gpu="small",
            memory_bytes=24,
            precision="fp32",
            notes=["convolutions"],
            remedies=[Remedy(name="bf16 or fp16", max_batch_size=3)],
            **nothing,
        ),
    ]
    helped = ["a batch of 1 needs 30.0 GiB for tensors alone", "would fit with bf16 or fp16: 3"]
    assert too_large(rows) == f"nothing fits on any of 2 GPUs; small at fp32: {helped[0]}; {helped[1]}"

"""Which documents an estimate ends in, and with which exit code."""

from __future__ import annotations

import signal

import pytest

import batchtune
from batchtune.document import Estimate, Remedy
from batchtune.errors import NothingFitsError
from batchtune.estimate.run import too_large

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


ENDLESS = (
    TASK
    + """
import time

def compute_loss(model, batch):
    print("tracing", flush=True)
    time.sleep(600)
"""
)


def test_tracing_is_given_up_at_the_limit_with_the_reason(tmp_path):
    path = tmp_path / "endless.py"
    path.write_text(ENDLESS)
    reason = r"nothing could be estimated: tracing took longer than 2 s \(0% of it was done\); timeout=10m gives it "
    with pytest.raises(NothingFitsError, match=reason) as raised:
        batchtune.estimate(path, gpus=["T4", "4090"], timeout="2s")
    assert [row.confidence for row in raised.value.result.estimates] == ["refused", "refused"]


SLOW_AT_FP16 = (
    TASK
    + """
import time

def compute_loss(model, batch):
    out = model(batch)
    if out.dtype == torch.float16 and len(batch) == 8:
        time.sleep(600)
    return out.softmax(-1).square().mean()
"""
)


def test_where_one_precision_takes_too_long_the_other_is_answered_and_no_reason_is_guessed_at(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(SLOW_AT_FP16)
    old, new = batchtune.estimate(path, gpus=["T4", "4090"], timeout="20s").estimates
    assert (old.confidence, new.confidence) == ("refused", "high (±4% of memory)")
    assert new.max_batch_size > 0
    assert old.notes == ["tracing took longer than 20 s (50% of it was done); --timeout 10m gives it longer"]


def test_the_first_ctrl_c_ends_an_estimate_at_once(cli, all_gone):
    cli.write("endless.py", ENDLESS)
    command = cli.start("estimate", "endless.py", "--gpu", "T4", "-v")
    command.wait_for("| tracing")
    family = command.family()
    command.process.send_signal(signal.SIGINT)
    finished = command.finish(10)  # 2 s on an idle machine; the step takes 600
    assert finished.code == 130
    assert finished.err.endswith("batchtune: interrupted: nothing was estimated\n")
    assert all_gone(family)


@pytest.mark.parametrize(
    ("loss", "code", "said"),
    [
        (
            "torch.bincount(batch.long().flatten()); return model(batch).mean()",
            4,
            "nothing could be estimated: refused.py:",
        ),
        ("raise KeyError('label')", 3, "compute_loss raised KeyError in a fp16 step of batch size 3: refused.py:"),
    ],
    ids=["needs data", "fails with data too"],
)
def test_where_every_gpu_is_refused_the_command_does_not_exit_with_0(quick_cli, loss, code, said):
    quick_cli.write("refused.py", TASK.replace("return model(batch).square().mean()", loss))
    found = quick_cli("estimate", "refused.py", "--gpu", "T4", "--gpu", "4090", "--json", "-q")
    assert found.code == code
    assert f"batchtune: {said}" in found.err
    assert (found.document["status"], found.document["error"]["exit_code"]) == ("failed", code)
    assert [row["confidence"] for row in found.document["estimates"]] == ["refused", "refused"]
    assert ("'batchtune probe' measures it where there is a GPU" in found.err) == (code == 4)
    assert not quick_cli("estimate", "refused.py", "--gpu", "T4", "-q").out  # it would say the same again

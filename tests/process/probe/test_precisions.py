"""A probe at several precisions with real children."""

import json

ONLY_IN_HALF = """
import torch
from torch import nn

def build_model():
    return nn.Linear(8, 1)

def make_batch(batch_size):
    return torch.ones(batch_size, 8)

def compute_loss(model, batch):
    if not torch.is_autocast_enabled("cpu"):
        raise ValueError("half precision only")
    return model(batch).mean()
"""


def test_a_task_that_one_precision_does_not_suit_is_probed_at_the_others(quick_cli):
    quick_cli.write("half.py", ONLY_IN_HALF)
    flags = ("--max", 2, "--memory-limit", "300MiB", "--precision", "all", "--device", "cpu", "--no-throughput", "-q")
    found = quick_cli("probe", "half.py", *flags, "--json", "-o", "half.json")
    assert found.code == 0, found.err
    document = json.loads(found.out or (quick_cli.folder / "half.json").read_text())
    assert (document["status"], document["probe"]["precision"], document["probe"]["max_batch_size"]) == (
        "complete",
        "bf16",
        2,
    )
    (failed,) = (each for each in document["probes"] if "max_batch_size" not in each)
    assert failed["precision"] == "fp32"
    assert any(each.startswith("fp32: compute_loss raised ValueError") for each in document["warnings"])
    shown = quick_cli("report", "half.json", "--format", "table")
    assert shown.out.startswith("2 is the largest micro-batch size that trains\n")
    assert "\nfp32       nothing trains" in shown.out
    page = quick_cli("report", "half.json", "--format", "html", "-o", "half.html")
    assert (page.code, page.err) == (0, "")
    assert "half precision only" in (quick_cli.folder / "half.html").read_text()

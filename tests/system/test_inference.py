"""`--inference` with real children: the largest batch of forward passes, checked in a fresh process; its estimate."""

DEEP = """
import os
import torch
from torch import nn

WIDTH = 1 << 12

def build_model():
    return nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), *(nn.Hardtanh() for _ in range(23)))

def make_batch(batch_size):
    return torch.ones(batch_size, 1, WIDTH)

def compute_loss(model, batch):
    if not torch.is_grad_enabled():
        assert torch.is_inference_mode_enabled() and not model.training
        with open("passes", "a") as file:
            print(os.getpid(), file=file)
    return model(batch).mean()
"""


def test_the_answer_is_of_forward_passes_and_passed_in_a_process_of_its_own(quick_cli):
    quick_cli.write("deep.py", DEEP)
    how = ("--memory-limit", "160MiB", "--tolerance", 0.3, "--steps", 1, "--verify-steps", 2, "--no-throughput")
    found = quick_cli("probe", "deep.py", "--inference", *how, "--json", "-q")
    assert found.code == 0, found.err
    probe = found.document["probe"]
    assert (probe["inference"], probe["limited_by"]) == (True, "memory")
    assert (probe["verified_in_fresh_process"], probe["verify_steps"]) == (True, 2)
    *_, last_of_search, _, of_check = (quick_cli.folder / "passes").read_text().split()
    assert last_of_search != of_check
    assert "optimizer" not in found.document["task"]
    shown = quick_cli("report", "inference-deep").out
    head = f"{probe['max_batch_size']:,} is the largest inference batch size, not one to train with"
    assert shown.startswith(f"{head}\nran 2 forward passes")


def test_an_estimate_of_inference_holds_more_than_one_of_training(quick_cli):
    quick_cli.write("deep.py", DEEP)
    how = ("estimate", "deep.py", "--gpu", "T4", "--memory-limit", "200MiB", "--json", "-q")
    (inference,), (training,) = (quick_cli(*how, *more).document["estimates"] for more in (("--inference",), ()))
    assert (inference["inference"], "inference" in training) == (True, False)
    assert inference["max_batch_size"] > 3 * training["max_batch_size"]

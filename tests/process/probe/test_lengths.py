"""The largest batch of every length with real children on a CPU, and what does not go together with lengths."""

import json

import pytest
from fixtures.tasks import MADE_LENGTHS

SAMPLES = """
import torch
from torch import nn

def build_model():
    return nn.Linear(8, 8)

def train_dataset():
    return [torch.ones(length, 8) for length in [3, 5, 9, 12, 30, 16] * 20]

def sample_length(sample):
    return len(sample)

def collate(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""
QUICK = ("--device", "cpu", "--precision", "fp32", "--no-throughput", "-q", "--verify-steps", 1, "--steps", 1)


def test_lengths_of_samples_are_chosen_and_their_distribution_is_told(quick_cli):
    quick_cli.write("model.py", SAMPLES)
    found = quick_cli("probe", "model.py", "--lengths", "auto", "--max", 4, *QUICK, "--json")
    assert found.code == 0, found.err
    probe = json.loads(found.out)["probe"]
    assert [point["length"] for point in probe["lengths"]] == [3, 5, 9, 12, 16, 30]
    assert [point["max_batch_size"] for point in probe["lengths"]] == [4] * 6
    assert {point["limited_by"] for point in probe["lengths"]} == {"max"}
    assert [count["samples"] for count in probe["length_distribution"]] == [20] * 6


@pytest.mark.parametrize(
    ("text", "flags", "code", "message"),
    [
        (MADE_LENGTHS, (), 2, "make_batch takes a length, too; say which there are: --lengths 128,256,512,1024"),
        (MADE_LENGTHS, ("--lengths", "12,many"), 2, "--lengths many: is no length"),
        (MADE_LENGTHS, ("--lengths", "auto"), 2, "has no sample_length(sample) with a train_dataset to choose by"),
        (MADE_LENGTHS, ("--lengths", "8", "--inference"), 2, "--lengths: not with --inference"),
        (MADE_LENGTHS, ("--lengths", "8", "--nproc-per-node", 2), 2, "--nproc-per-node 2: not with --lengths"),
        (SAMPLES, ("--lengths", "4,8"), 2, "longer than the longest, 8: add"),
        (SAMPLES, ("--lengths", "17,20,30"), 2, "--lengths 20: no sample of train_dataset is longer than 17"),
        (SAMPLES.replace("len(sample)", "'long'"), ("--lengths", "auto"), 3, "sample_length returned a str, long, for"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(quick_cli, text, flags, code, message):
    quick_cli.write("model.py", text)
    found = quick_cli("probe", "model.py", *flags, *QUICK)
    assert (found.code, len(found.err.strip().splitlines())) == (code, 1), found.err
    assert message in found.err

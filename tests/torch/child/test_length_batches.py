"""Batches of a run whose sizes count tokens."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from batchtune.child.trainer import TrainingBatches
from batchtune.errors import UserCodeError
from batchtune.task.contract import Task

LENGTHS = [3, 8, 8, 2, 3, 1, 7, 8, 3, 3]


def task(lengths=LENGTHS, sample_length=len):
    source = SimpleNamespace(
        build_model=lambda: torch.nn.Linear(1, 1),
        compute_loss=lambda model, batch: batch.sum(),
        train_dataset=lambda: [torch.full((length,), length) for length in lengths],
        sample_length=sample_length,
        collate=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True),
    )
    return Task(source, "model.py")


def some(count, **settings):
    batches = TrainingBatches(task(), 12, 0, **settings)
    return [next(batches) for _ in range(count)], batches


def test_they_are_of_samples_of_similar_length_and_count_their_tokens():
    seen, batches = some(40, length_batches=((3, 4), (8, 2)))
    assert {each.shape[0] for each in seen if each.shape[1] <= 3} == {2, 4}
    assert {each.shape[0] for each in seen if each.shape[1] > 3} == {2}
    assert batches.samples == 40 * 12


def test_every_epoch_has_every_sample_once_and_other_batches():
    seen, _ = some(8, length_batches=((3, 4), (8, 2)))
    epochs = [sorted(each.amax(1).tolist() for each in some) for some in (seen[:4], seen[4:])]
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [sorted(LENGTHS)] * 2


def test_the_baseline_s_have_as_many_samples_as_today_and_count_their_tokens():
    seen, batches = some(6, samples=5)
    assert {each.shape[0] for each in seen} == {5}
    assert batches.samples == 6 * 12


def test_a_sample_longer_than_all_that_was_measured_is_named_with_its_index():
    with pytest.raises(UserCodeError, match="train_dataset, sample 2: its length is 9, longer than the longest"):
        TrainingBatches(task([3, 8, 9]), 12, 0, length_batches=((3, 4), (8, 2)))


@pytest.mark.parametrize("value", ["many", 0, -1, 2.5, None, True, (), (3, "x")])
def test_a_length_that_is_none_is_named_with_its_index(value):
    with pytest.raises(UserCodeError, match=r"sample_length returned .* for sample 0 of train_dataset"):
        TrainingBatches(task(sample_length=lambda _: value), 12, 0, length_batches=((3, 4), (8, 2)))

"""The sampler in torch's own DataLoader, and in a process group."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from batchtune import LengthBatchSampler, length_batches

FRONTIER = {8: 16, 16: 7, 32: 3}
LENGTHS = [1 + 7 * index % 32 for index in range(150)]


def samples():
    return [torch.full((length,), index) for index, length in enumerate(LENGTHS)]


def pad(batch):
    return pad_sequence(batch, batch_first=True, padding_value=-1)


def seen(batches):
    return sorted(int(row[0]) for batch in batches for row in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_every_sample_once_in_batches_that_fit(workers):
    sampler = LengthBatchSampler(LENGTHS, FRONTIER)
    loader = DataLoader(samples(), batch_sampler=sampler, collate_fn=pad, num_workers=workers)
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == len(loader)
    assert seen(first) == seen(second) == list(range(len(LENGTHS)))
    assert [batch.shape for batch in first] != [batch.shape for batch in second]
    for batch in first:
        assert len(batch) <= max(size for edge, size in FRONTIER.items() if edge >= batch.shape[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_after_the_batches_that_were_trained(workers):
    def loader(sampler):
        return DataLoader(samples(), batch_sampler=sampler, collate_fn=pad, num_workers=workers)

    whole = [batch.tolist() for batch in loader(LengthBatchSampler(LENGTHS, FRONTIER))]
    stopped, trained = LengthBatchSampler(LENGTHS, FRONTIER), []
    for batch in loader(stopped):
        trained.append(batch.tolist())
        if len(trained) == 5:
            break
    resumed = LengthBatchSampler(LENGTHS, FRONTIER)
    resumed.load_state_dict(stopped.state_dict(epoch=0, batch=5))
    assert trained + [batch.tolist() for batch in loader(resumed)] == whole


class Batches(IterableDataset):
    def __iter__(self):
        return length_batches(iter(samples()), len, FRONTIER)


def test_an_iterable_data_set_is_batched_as_it_comes():
    batches = list(DataLoader(Batches(), batch_size=None, collate_fn=pad))
    assert seen(batches) == list(range(len(LENGTHS)))
    for batch in batches:
        assert len(batch) <= max(size for edge, size in FRONTIER.items() if edge >= batch.shape[1])


def test_lengths_may_be_a_tensor():
    assert list(LengthBatchSampler(torch.tensor(LENGTHS), FRONTIER)) == list(LengthBatchSampler(LENGTHS, FRONTIER))
    pairs = [[length, 8] for length in LENGTHS]
    frontier = {(edge, 8): batch for edge, batch in FRONTIER.items()}
    assert list(LengthBatchSampler(torch.tensor(pairs), frontier)) == list(LengthBatchSampler(LENGTHS, FRONTIER))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_ranks_are_those_of_the_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    expected = list(LengthBatchSampler(LENGTHS, FRONTIER, num_replicas=3, rank=2))
    assert list(LengthBatchSampler(LENGTHS, FRONTIER)) == expected

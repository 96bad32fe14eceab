"""Which samples each rank trains on and evaluates: all of them see what one device would, and none sees another's."""

import functools
import itertools
import math
import secrets
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from batchtune.child.evaluate import _batches
from batchtune.child.ranks._base import ALONE, every_nth, shared_by_user
from batchtune.child.trainer import TrainingBatches, training_loader

SAMPLES, MICRO, RANKS = 67, 4, 3


def rank(number, count=RANKS):
    return SimpleNamespace(rank=number, world_size=count)


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))


def drawn(task, batches, *, ranks=ALONE, size=MICRO, seed=3):
    """The samples of so many batches, batch by batch."""
    found = TrainingBatches(task, size, seed, ranks)
    return [torch.as_tensor(each).tolist() for each in itertools.islice(found, batches)]


def of_all(task, batches):
    """Of each batch, what the ranks have together."""
    each = [drawn(task, batches, ranks=rank(number)) for number in range(RANKS)]
    return [sorted(itertools.chain(*parts)) for parts in zip(*each, strict=True)]


def test_ranks_together_train_the_batches_that_one_device_would(linear_task):
    task = linear_task(train_dataset=Numbers)
    epoch = SAMPLES // (MICRO * RANKS)
    assert of_all(task, epoch) == [sorted(batch) for batch in drawn(task, epoch, size=MICRO * RANKS)]


def test_no_sample_is_two_ranks_and_the_next_epoch_is_another_order(linear_task):
    task, epoch = linear_task(train_dataset=Numbers), SAMPLES // (MICRO * RANKS)
    first, second = of_all(task, 2 * epoch)[:epoch], of_all(task, 2 * epoch)[epoch:]
    for found in (first, second):
        samples = list(itertools.chain(*found))
        assert len(set(samples)) == len(samples) == epoch * MICRO * RANKS
    assert first != second


def test_a_sampler_that_draws_from_the_global_random_numbers_gives_ranks_the_same_order(linear_task):
    class Sampler(torch.utils.data.Sampler):
        def __len__(self):
            return SAMPLES

        def __iter__(self):
            return iter(torch.randperm(SAMPLES).tolist())

    task = linear_task(train_dataset=Numbers)
    task.sampler = lambda _: Sampler()
    torch.manual_seed(1)
    found = drawn(task, 5, ranks=rank(0))
    torch.manual_seed(2)  # on another rank something else has been drawn meanwhile
    others = drawn(task, 5, ranks=rank(1))
    assert not set(itertools.chain(*found)) & set(itertools.chain(*others))


def test_a_stream_is_read_by_all_and_each_keeps_its_own_part(linear_task):
    found = of_all(linear_task(train_dataset=Stream), 5)
    assert found == [list(range(first, first + 12)) for first in range(0, 60, 12)]
    assert list(every_nth(range(7), rank(2))) == [2, 5]  # the last round is not whole


def test_a_loader_of_the_users_own_is_dealt_out_batch_by_batch(linear_task):
    data = TensorDataset(torch.arange(SAMPLES))
    task = linear_task(
        train_loader=lambda size: DataLoader(
            data, size, shuffle=True, drop_last=True, collate_fn=lambda each: [n for (n,) in each]
        )
    )
    each = []
    for number in range(RANKS):
        torch.manual_seed(number)
        each.append(drawn(task, 5, ranks=rank(number)))
    samples = list(itertools.chain(*itertools.chain(*each)))
    assert len(set(samples)) == len(samples) == 5 * MICRO * RANKS


def test_a_loader_that_shares_the_set_among_ranks_by_itself_is_taken_as_it_is(linear_task):
    def loader(size, number=1):
        sampler = DistributedSampler(Numbers(), num_replicas=RANKS, rank=number, shuffle=False)
        return DataLoader(Numbers(), size, sampler=sampler)

    assert drawn(linear_task(train_loader=loader), 2, ranks=rank(1)) == [[1, 4, 7, 10], [13, 16, 19, 22]]


@pytest.mark.parametrize("samples", [1, 5, 24, 25, 67])
@pytest.mark.parametrize("count", [1, 2, RANKS])
def test_each_sample_is_evaluated_once_and_ranks_have_batches_of_one_size_at_each_turn(linear_task, samples, count):
    task = linear_task(val_dataset=lambda: list(range(samples)))
    found = [list(_batches(task, MICRO, rank(number, count))) for number in range(count)]
    counted = [place for each in found for size, batch in each for place in batch[:size].tolist()]
    assert sorted(counted) == list(range(samples))
    assert all(len({len(batch) for _, batch in turn}) == 1 for turn in zip(*found, strict=True))
    assert all(len(batch) <= MICRO for each in found for _, batch in each)


def test_of_a_stream_that_is_shorter_on_one_rank_that_one_takes_its_last_batch_again_without_counting_it(linear_task):
    task, others = linear_task(val_dataset=Stream), iter([1.0] * 19 + [0.0])
    ranks = rank(0, 2)
    ranks.together = lambda how, own: max(own, next(others)) if how == "max" else None
    found = list(_batches(task, MICRO, ranks))
    assert [size for size, _ in found] == [MICRO] * 16 + [3, 0, 0]
    assert found[-1][1].tolist() == found[16][1].tolist()


class Noticing(DistributedSampler):
    """As of a loop over epochs that calls `set_epoch`."""

    def __init__(self, number, count):
        super().__init__(Numbers(), num_replicas=count, rank=number)


@pytest.mark.parametrize("count", [1, RANKS])
def test_a_loader_that_shares_the_set_by_itself_is_told_the_epoch_and_shuffles_anew(linear_task, count):
    task = linear_task(train_loader=lambda size: DataLoader(Numbers(), size, sampler=Noticing(0, count)))
    epoch = math.ceil(SAMPLES / count / MICRO)
    found = drawn(task, 2 * epoch, ranks=rank(0, count))
    (expected := Noticing(0, count)).set_epoch(1)
    assert list(itertools.chain(*found[:epoch])) == list(Noticing(0, count))
    assert list(itertools.chain(*found[epoch:])) == list(expected)


def test_a_stream_and_a_sampler_are_told_the_epoch_on_one_device_and_on_ranks(linear_task):
    class Counted(IterableDataset):
        epoch = None

        def set_epoch(self, number):
            self.epoch = number

        def __iter__(self):
            return iter([self.epoch] * MICRO * RANKS)

    for ranks, batches in ((ALONE, RANKS), (rank(1), 1)):
        found = drawn(linear_task(train_dataset=Counted), 2 * batches, ranks=ranks)
        assert found == [[epoch] * MICRO for epoch in (0, 1) for _ in range(batches)]


class Parts(IterableDataset):
    """A stream that gives each rank its part, as one that asks for the rank does."""

    def __iter__(self):
        return iter(range(Parts.number, SAMPLES, RANKS))


class OwnLoader:
    """Batches of each rank's part, by no loader of torch's."""

    def __iter__(self):
        return iter([[each] for each in Parts()])


class Unseeded(IterableDataset):
    """A stream whose samples differ each time, as with a random generator of its own that nobody seeds."""

    def __iter__(self):
        return (each + float(secrets.randbelow(1000)) / 1000 for each in range(SAMPLES))


class Augmented(Numbers):
    """A whole set, of whose samples each rank makes something else."""

    def __getitem__(self, place):
        return place + Parts.number / 10


class Objects(IterableDataset):
    """The same samples on each rank, which say nothing of their values."""

    def __iter__(self):
        return iter([object() for _ in range(SAMPLES)])


def of_each_rank(monkeypatch, task):
    """What ranks, one after the other at each step, find of whose the samples are."""
    monkeypatch.setattr(Parts, "number", 0, raising=False)
    here, said, found = threading.Barrier(RANKS), [0.0] * RANKS, {}
    turn = threading.Lock()

    def work(number):
        def each(own):
            said[number] = own
            turn.release()
            here.wait()
            all_said = list(said)
            here.wait()
            take()
            return all_said

        def take():
            turn.acquire()
            Parts.number = number

        take()
        own = task()
        loader_of = own.loader if own.has("train_loader") else functools.partial(training_loader, own, seed=0)
        found[number] = shared_by_user(loader_of, SimpleNamespace(each=each, world_size=RANKS, rank=number))
        turn.release()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    (alike,) = {found[number] for number in range(RANKS)}
    return alike


@pytest.mark.parametrize(
    ("functions", "is_shared"),
    [
        ({"train_dataset": Parts}, True),
        ({"train_loader": lambda size: DataLoader(Parts(), size)}, True),
        ({"train_loader": lambda _size: OwnLoader()}, True),
        ({"train_dataset": Stream}, False),
        ({"train_dataset": Unseeded}, False),
        ({"train_dataset": Objects, "collate": list}, False),
        ({"train_dataset": Augmented}, False),
        ({"train_loader": lambda size: DataLoader(Augmented(), size, shuffle=True)}, False),
        ({"train_loader": lambda size: DataLoader(Numbers(), size, sampler=Noticing(Parts.number, RANKS))}, False),
        ({"train_loader": lambda size: 1 // (size > 8)}, False),
    ],
)
def test_whether_the_users_code_deals_out_its_samples_is_seen_by_what_ranks_read(
    linear_task, monkeypatch, functions, is_shared
):
    assert of_each_rank(monkeypatch, lambda: linear_task(**functions)) is is_shared


def test_a_distributed_sampler_of_a_library_is_taken_as_it_is_and_told_the_epoch(linear_task):
    task, epoch = linear_task(train_dataset=Numbers), SAMPLES // RANKS // MICRO
    own = Noticing(1, RANKS)
    task.sampler = lambda _: own
    found = drawn(task, 2 * epoch, ranks=rank(1))
    (expected := Noticing(1, RANKS)).set_epoch(1)
    assert list(itertools.chain(*found[epoch:])) == list(expected)[: epoch * MICRO]
    assert task.train_size() == SAMPLES


@pytest.mark.parametrize(
    "functions", [{"train_dataset": Parts}, {"train_loader": lambda size: DataLoader(Parts(), size)}]
)
def test_what_the_users_code_deals_out_is_not_dealt_out_again(linear_task, monkeypatch, functions):
    task = linear_task(**functions)
    task.parts = RANKS
    monkeypatch.setattr(Parts, "number", 1, raising=False)
    assert drawn(task, 2, ranks=rank(1)) == [[1, 4, 7, 10], [13, 16, 19, 22]]


@pytest.mark.parametrize("how", ["sum", "max", "min", "first"])
def test_alone_there_is_nobody_to_agree_with(how):
    assert ALONE.together(how, 3.5) == 3.5
    assert (ALONE.agree(go_on=True), ALONE.agree(go_on=False)) == (True, False)

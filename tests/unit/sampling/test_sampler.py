"""Batches of samples of many lengths: each fits, every sample comes once, ranks are even, any step can be resumed."""

import itertools
import json
from collections import Counter

import documents
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune import LengthBatchSampler, length_batches
from batchtune.errors import UsageError

FRONTIER = {16: 9, 32: 4, 64: 2, 128: 1}
LENGTHS = st.lists(st.integers(0, 128), min_size=1, max_size=120)
RANKS = st.integers(1, 5)
HALVED = {16: 90, 32: 40, 64: 20, 128: 10}  # no batch so small that it cannot be shared


def largest(frontier, lengths):
    """The most samples that were measured to train together."""
    return max(batch for edge, batch in frontier.items() if edge >= max(lengths))


def everyone(lengths, frontier, ranks, **more):
    return [LengthBatchSampler(lengths, frontier, num_replicas=ranks, rank=rank, **more) for rank in range(ranks)]


def result_with_lengths(points, **more):
    lengths = [{"length": length, "max_batch_size": batch} for length, batch in points.items()]
    probe = documents.probed() | {"lengths": lengths, "length_check": {"steps": 200}}
    return documents.Result.model_validate(documents.document("probe", probe=probe | more))


@given(LENGTHS, RANKS, st.integers(0, 3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_batch_fits_and_every_rank_has_as_many(lengths, ranks, epoch, shuffle):
    samplers = everyone(lengths, FRONTIER, ranks, shuffle=shuffle)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(samplers[0])}
    for batch in (batch for part in parts for batch in part):
        assert 1 <= len(batch) <= largest(FRONTIER, [lengths[index] for index in batch])
    times = Counter(index for part in parts for batch in part for index in batch)
    assert times.keys() == set(range(len(lengths)))
    if any(len(batch) > 1 for part in parts for batch in part):
        assert set(times.values()) == {1}
    assert times.total() - len(lengths) < ranks


@given(st.lists(st.integers(0, 128), min_size=40, max_size=200), RANKS)
@settings(deadline=None)
def test_no_sample_comes_twice_where_there_are_batches_of_two_for_the_ranks_to_share(lengths, ranks):
    parts = [list(sampler) for sampler in everyone(lengths, HALVED, ranks)]
    assert sorted(index for part in parts for batch in part for index in batch) == list(range(len(lengths)))


@given(LENGTHS, RANKS, st.data())
@settings(deadline=None)
def test_it_goes_on_at_any_step(lengths, ranks, data):
    rank = data.draw(st.integers(0, ranks - 1))
    whole = LengthBatchSampler(lengths, FRONTIER, num_replicas=ranks, rank=rank)
    batches = [*whole, *whole]  # two epochs
    stop = data.draw(st.integers(0, len(batches) - 1))
    broken_off = LengthBatchSampler(lengths, FRONTIER, num_replicas=ranks, rank=rank)
    seen = []
    while len(seen) < stop:
        for batch in broken_off:
            seen.append(batch)
            if len(seen) == stop:
                break
    state = json.loads(json.dumps(broken_off.state_dict()))
    resumed = LengthBatchSampler(lengths, FRONTIER, num_replicas=ranks, rank=rank)
    resumed.load_state_dict(state)
    while len(seen) < len(batches):
        seen += resumed
    assert seen == batches


@given(LENGTHS)
@settings(deadline=None)
def test_a_bucket_has_one_batch_that_is_not_full(lengths):
    for frontier in (FRONTIER, HALVED):
        short = Counter()
        for batch in LengthBatchSampler(lengths, frontier):
            most = largest(frontier, [lengths[index] for index in batch])
            short[most] += len(batch) < most
        assert max(short.values()) <= 1


@given(LENGTHS, RANKS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_nothing_is_padded_beyond_the_bucket(lengths, ranks, streamed):
    edges = sorted(FRONTIER)
    bucket = lambda length: next(edge for edge in edges if edge >= length)  # noqa: E731
    stream = lambda rank: length_batches(iter(range(len(lengths))), lengths.__getitem__, FRONTIER, ranks, rank)  # noqa: E731
    parts = [stream(rank) for rank in range(ranks)] if streamed else everyone(lengths, FRONTIER, ranks)
    for batch in (batch for part in parts for batch in part):
        assert len({bucket(lengths[index]) for index in batch}) == 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_hardly_anything_is_padded_within_a_bucket_of_many_batches(ranks):
    lengths = [1 + index * 37 % 128 for index in range(8000)]
    batches = [batch for sampler in everyone(lengths, HALVED, ranks) for batch in sampler]
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    assert padded <= 1.05 * sum(lengths)


def test_ranks_work_on_the_same_bucket_at_the_same_step():
    lengths = list(range(1, 129)) * 20
    mixed = 0
    for step in zip(*everyone(lengths, FRONTIER, 4), strict=True):
        mixed += len({largest(FRONTIER, [lengths[index] for index in batch]) for batch in step}) > 1
    assert mixed <= 1


def test_each_epoch_has_other_batches_that_all_ranks_and_processes_agree_on():
    lengths = [1 + index % 128 for index in range(500)]
    sampler = LengthBatchSampler(lengths, FRONTIER, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    again = LengthBatchSampler(lengths, FRONTIER, seed=1)
    again.set_epoch(1)
    assert list(again) == second
    assert list(LengthBatchSampler(lengths, FRONTIER, seed=2)) != first
    assert [len(batch) for batch in first] != sorted(len(batch) for batch in first)


def test_who_takes_as_many_batches_as_there_are_and_asks_for_no_more_gets_the_next_epoch():
    sampler, whole = LengthBatchSampler(range(1, 129), FRONTIER), LengthBatchSampler(range(1, 129), FRONTIER)
    for _ in range(3):
        assert list(itertools.islice(sampler, len(sampler))) == list(whole)


@given(LENGTHS, RANKS, st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_batches_that_are_not_full_come_last_in_an_epoch(lengths, ranks, epoch):
    samplers = everyone(lengths, FRONTIER, ranks)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    full = [
        [len(batch) == FRONTIER[min(edge for edge in FRONTIER if lengths[batch[0]] <= edge)] for batch in step]
        for step in zip(*samplers, strict=True)
    ]
    assert [all(step) for step in full] == sorted((all(step) for step in full), reverse=True)


def test_without_shuffling_batches_follow_the_data_and_those_that_are_not_full_come_last():
    lengths = [1, 100, 2, 3, 60, 61, 4]
    sampler = LengthBatchSampler(lengths, FRONTIER, shuffle=False)
    assert list(sampler) == [[1], [4, 5], [0, 2, 3, 6]] == list(sampler)


def test_an_iteration_that_was_broken_off_starts_anew():
    sampler = LengthBatchSampler(range(1, 129), FRONTIER)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    assert len(list(sampler)) == len(sampler)


def test_with_workers_the_state_is_what_was_trained_and_not_what_was_asked_for():
    sampler = LengthBatchSampler(range(1, 129), FRONTIER)
    batches = list(sampler)  # workers took the whole epoch
    sampler.load_state_dict(sampler.state_dict(epoch=0, batch=7))
    assert list(sampler) == batches[7:]
    sampler.load_state_dict(sampler.state_dict(epoch=0, batch=len(batches)))
    assert list(sampler) == []
    assert sampler.epoch == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"num_replicas": 2, "rank": 0}, "num_replicas"),
        ({"lengths": [1, 2, 3]}, "samples"),
        ({"result": FRONTIER | {128: 2}}, "batch_sizes"),
    ],
)
def test_a_state_of_other_batches_is_refused(change, named):
    arguments = {"lengths": [1, 20, 70, 128], "result": FRONTIER}
    state = LengthBatchSampler(**arguments).state_dict()
    with pytest.raises(ValueError, match=f"state is of another {named}, "):
        LengthBatchSampler(**arguments | change).load_state_dict(state)


def test_one_shot_of_a_single_sample_for_each_rank_is_all_that_has_to_be_repeated():
    batches = [list(sampler) for sampler in everyone([128, 128, 128], FRONTIER, 2)]
    assert [len(part) for part in batches] == [2, 2]
    assert sorted(Counter(index for part in batches for batch in part for index in batch).values()) == [1, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 129, 3], r"sample 1: its length is 129, longer than the longest measured, 128; .*--lengths"),
        ([5, 3, "12"], "sample 2: its length is '12', which is no whole number"),
        ([2.5], "sample 0: its length is 2.5, which is no whole number"),
        ([5, True], "sample 1: its length is True, which is no whole number"),
        ([float("nan")], "sample 0: its length is nan"),
        ([-1], "sample 0: its length is -1"),
        ([5, None], "sample 1: its length is None"),
        ([5, (3, 4)], r"sample 1: its length is \(3, 4\), but what was measured are lengths such as 128"),
        ([()], r"sample 0: its length is \(\)"),
        ([], "lengths: there are none"),
    ],
)
def test_a_length_that_cannot_be_is_named_with_its_index(lengths, message):
    with pytest.raises(ValueError, match=message):
        LengthBatchSampler(lengths, FRONTIER)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, "an empty dict"),
        ({16: 0}, "the largest batch at length 16 is 0"),
        ({16: 2.5}, "the largest batch at length 16 is 2.5"),
        ({"long": 4}, "result: its length is 'long'"),
        ({8: 2, (3, 4): 2}, r"of the lengths 8, \(3, 4\) some have more numbers than others"),
    ],
)
def test_batches_that_cannot_be_are_refused(result, message):
    with pytest.raises(ValueError, match=message):
        LengthBatchSampler([3], result)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_is_none_of_them_is_refused(ranks, rank):
    with pytest.raises(ValueError, match=f"rank is {rank} of {ranks}"):
        LengthBatchSampler([3], FRONTIER, num_replicas=ranks, rank=rank)


def test_a_result_its_file_and_its_folder_say_the_same_as_a_dict(tmp_path):
    lengths = list(range(1, 129))
    result = result_with_lengths(FRONTIER)
    (tmp_path / "result.json").write_text(result.to_json())
    expected = list(LengthBatchSampler(lengths, FRONTIER))
    for source in (result, tmp_path, str(tmp_path / "result.json")):
        assert list(LengthBatchSampler(lengths, source)) == expected


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (documents.result("probe"), "this probe has no lengths; run 'batchtune probe model.py --lengths auto'"),
        (
            documents.result("probe", task={"path": "my model.py"}),
            "this probe has no lengths; run 'batchtune probe 'my",
        ),
        (documents.result("probe", probe=documents.probed() | {"inference": True}), "this probe is of inference"),
        (7, "result is an int; it must be a result, its path, or a dict {length: batch}"),
    ],
)
def test_a_result_without_batches_for_lengths_is_refused(result, message):
    with pytest.raises(UsageError) as refused:
        LengthBatchSampler([3], result)
    assert str(refused.value).startswith(message)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=60), RANKS)
@settings(deadline=None)
def test_lengths_of_two_numbers_fit_in_both(lengths, ranks):
    frontier = {(16, 64): 8, (64, 16): 6, (64, 64): 3}
    parts = [list(sampler) for sampler in everyone(lengths, frontier, ranks)]
    assert len({len(part) for part in parts}) == 1
    assert {index for part in parts for batch in part for index in batch} == set(range(len(lengths)))
    for batch in (batch for part in parts for batch in part):
        needed = [max(lengths[index][number] for index in batch) for number in range(2)]
        assert len(batch) <= max(
            size for edge, size in frontier.items() if needed[0] <= edge[0] and needed[1] <= edge[1]
        )


@given(LENGTHS, RANKS)
@settings(max_examples=200, deadline=None)
def test_samples_as_they_come_are_batched_by_the_same_rules(lengths, ranks):
    samples = list(enumerate(lengths))
    parts = [list(length_batches(iter(samples), lambda each: each[1], FRONTIER, ranks, rank)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    for batch in (batch for part in parts for batch in part):
        assert 1 <= len(batch) <= largest(FRONTIER, [length for _, length in batch])
    times = Counter(index for part in parts for batch in part for index, _ in batch)
    assert times.keys() == set(range(len(lengths)))
    assert times.total() - len(lengths) < ranks


@given(LENGTHS, RANKS, st.data())
@settings(deadline=None)
def test_samples_as_they_come_go_on_at_any_step_by_leaving_out_what_was_trained(lengths, ranks, data):
    samples, rank = list(enumerate(lengths)), data.draw(st.integers(0, ranks - 1))
    batches = [list(length_batches(iter(samples), lambda each: each[1], FRONTIER, ranks, rank)) for _ in range(2)]
    stop = data.draw(st.integers(0, len(batches[0])))
    again = itertools.islice(length_batches(iter(samples), lambda each: each[1], FRONTIER, ranks, rank), stop, None)
    assert [*batches[0][:stop], *again] == batches[1]


def test_samples_as_they_come_wait_for_no_more_than_their_own_bucket():
    def stream():
        yield from ["ab", "x" * 100, "cd"] * 100_000
        pytest.fail("the stream was read to its end")

    batches = length_batches(stream(), len, {2: 3, 100: 2})
    assert [next(batches) for _ in range(3)] == [["ab", "cd", "ab"], ["x" * 100] * 2, ["cd", "ab", "cd"]]


def test_a_sample_of_a_stream_that_is_too_long_is_named_with_its_number():
    batches = length_batches(["ab", "abc", "abcdef"], len, {3: 1})
    assert [next(batches), next(batches)] == [["ab"], ["abc"]]
    with pytest.raises(ValueError, match="sample 2: its length is 6, longer than the longest measured, 3"):
        next(batches)

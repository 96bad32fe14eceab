"""What is exported of a probe of many lengths: what libraries batch by at each length, never more than measured."""

import json

import documents
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.errors import UsageError
from batchtune.report.view.lengths import most_tokens
from batchtune.report.view.read import view_of
from batchtune.report.view.trainers import EXPORTS

FRONTIER = {64: 900, 128: 410, 256: 176}


def probed_at(points):
    lengths = [{"length": length, "max_batch_size": batch} for length, batch in points.items()]
    more = {"lengths": lengths, "max_batch_size": 176, "length_check": {"steps": 200}}
    return documents.Result.model_validate(documents.document("probe", probe=documents.probed() | more))


def exported(name, points):
    return yaml.safe_load(EXPORTS[name].text(probed_at(points)))


def test_lhotse_gets_each_bucket_with_its_batch():
    assert exported("lhotse", FRONTIER) == {
        "use_bucketing": True,
        "num_buckets": 3,
        "bucket_duration_bins": [64, 128, 256],
        "bucket_batch_size": [900, 410, 176],
    }


def test_lhotse_gets_lengths_of_two_numbers_as_pairs():
    assert exported("lhotse", {(64, 10): 90, (128, 40): 41})["bucket_duration_bins"] == [[64, 10], [128, 40]]


def test_what_lhotse_cannot_be_told_is_said_beside_it():
    said = EXPORTS["lhotse"].said_beside(probed_at(FRONTIER))
    assert said[0].startswith("the bins are in the unit of your lengths; lhotse counts seconds")
    assert "# take batch_size, batch_duration" in EXPORTS["lhotse"].text(probed_at(FRONTIER))


FRONTIERS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=5, unique_by=lambda pair: pair[0]
).map(
    lambda pairs: dict(zip(sorted(key for key, _ in pairs), sorted((b for _, b in pairs), reverse=True), strict=True))
)


def fits(tokens, batches):
    """Whether batches of so many tokens, and of no more samples than the largest batch, fit at every length."""
    return all(
        min(tokens // length, max(batches.values())) <= max(batch for edge, batch in batches.items() if edge >= length)
        for length in range(1, max(batches) + 1)
    )


@settings(deadline=None)
@given(FRONTIERS)
def test_the_most_tokens_are_safe_at_every_length_and_more_would_not_be(batches):
    tokens = most_tokens(batches)
    assert fits(tokens, batches)
    assert fits(tokens + 1, batches) == (len(set(batches.values())) == 1)


def test_fairseq_gets_tokens_and_samples():
    found = exported("fairseq", FRONTIER)
    assert found == {"dataset": {"max_tokens": 177 * 129 - 1, "batch_size": 900}}
    assert fits(found["dataset"]["max_tokens"], FRONTIER)


def test_the_trainer_groups_by_length_with_the_batch_of_the_longest():
    found = json.loads(EXPORTS["hf"].text(probed_at(FRONTIER)))
    assert found["train_sampling_strategy"] == "group_by_length"
    assert found["per_device_train_batch_size"] == 176
    assert "LengthBatchSampler" in EXPORTS["hf"].said_beside(probed_at(FRONTIER))[0]
    without = documents.result("probe")
    assert "train_sampling_strategy" not in json.loads(EXPORTS["hf"].text(without))
    assert EXPORTS["hf"].said_beside(without) == []


@pytest.mark.parametrize("name", ["lhotse", "fairseq"])
def test_a_probe_of_one_length_has_nothing_to_bucket(name):
    without = documents.result("probe")
    with pytest.raises(UsageError, match=r"this probe has no lengths; run 'batchtune probe model\.py --lengths auto'"):
        EXPORTS[name].text(without)
    assert EXPORTS[name].title not in view_of(without).settings


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({(64, 10): 90, (128, 40): 41}, "counts one length of a sample, and these have several; take --format lhotse"),
        ({16: 40, 1024: 1}, "max_tokens would be 33 to be safe at every length, less than the longest sample, 1024"),
    ],
)
def test_what_fairseq_cannot_say_is_refused(points, message):
    with pytest.raises(UsageError, match=message):
        EXPORTS["fairseq"].text(probed_at(points))


def test_the_page_shows_them():
    assert {"lhotse", "fairseq"} < view_of(probed_at(FRONTIER)).settings.keys()

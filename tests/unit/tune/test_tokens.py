"""Batches of tokens: what they are made of, and a plan with every size in tokens."""

import json
from unittest.mock import Mock

import documents
import pytest

from batchtune.config.schema import Config
from batchtune.document import LengthCount, LengthPoint, ProbeResult, ThroughputFit, ThroughputPoint
from batchtune.errors import UsageError
from batchtune.tune.plan.configure import read_warm_start
from batchtune.tune.plan.tokens import Split, in_samples, probe_in_tokens, require_tokens, split, token_batches

POINTS = ((16, 400), (64, 100), (256, 20))
SAMPLES = ((16, 600), (40, 100), (64, 200), (256, 100))
TOKENS = 600 * 16 + 100 * 40 + 200 * 64 + 100 * 256  # 52 a sample


def config(**more):
    sizes = {"unit": "tokens"} | more.pop("batch_size", {})
    return Config.model_validate({"task": "model.py", "batch_size": sizes, "baseline": {"batch_size": 8}} | more)


def probe(points=POINTS, samples=SAMPLES):
    return ProbeResult(
        precision="fp32",
        max_batch_size=20,
        lengths=[LengthPoint(length=length, max_batch_size=most) for length, most in points],
        length_distribution=[LengthCount(length=length, samples=count) for length, count in samples],
        throughput=[ThroughputPoint(batch_size=10, samples_per_second=5.0, step_seconds=2.0)],
        throughput_fit=ThroughputFit(
            alpha_seconds=1.0, beta_seconds_per_sample=0.1, saturation_batch_size=10.0, batch_size_within_5_percent=10
        ),
    )


def batches(made):
    """Batches of an epoch."""
    groups = {16: 600, 64: 300, 256: 100}
    return sum(groups[length] / samples for length, samples in made)


def test_a_study_that_counts_samples_has_none():
    assert token_batches(Config(task="model.py"), probe()) is None
    assert split(None, 96, 40, 40) == Split(32, 3, 40)


def test_the_largest_is_all_that_fits_in_the_mean_of_an_epoch():
    found = token_batches(config(), probe())
    assert found.mean == TOKENS / 1000
    assert found.largest == int(TOKENS / (600 / 400 + 300 / 100 + 100 / 20))
    assert found.made_up(found.largest) == POINTS
    assert found.made_up(10 * found.largest) == POINTS


@pytest.mark.parametrize("tokens", [300, 1000, 2500, 5000])
def test_batches_have_so_many_tokens_in_the_mean_and_never_more_samples_than_train(tokens):
    made = token_batches(config(), probe()).made_up(tokens)
    assert TOKENS / batches(made) == pytest.approx(tokens, rel=0.15)
    assert all(1 <= samples <= most for (_, samples), (_, most) in zip(made, POINTS, strict=True))
    assert [samples for _, samples in made] == sorted((samples for _, samples in made), reverse=True)


def test_the_baseline_keeps_its_samples_and_others_are_split_by_their_tokens():
    found = token_batches(config(), probe())
    assert found.baseline == 8 * 52
    assert split(found, found.baseline, found.largest, found.largest) == Split(416, 1, 20, 8)
    micro, steps, at_once, samples, made = split(found, 3 * found.largest, found.largest, found.largest)
    assert (micro, steps, at_once, samples, made) == (found.largest, 3, 20, None, POINTS)


def test_a_baseline_that_ran_out_of_memory_is_made_up_of_smaller_micro_batches():
    found = token_batches(config(), probe())
    assert split(found, found.baseline, found.largest // 2, found.largest)[:4] == (104, 4, 20, 2)


def test_a_baseline_larger_than_memory_is_accumulated():
    found = token_batches(config(baseline={"batch_size": 60}), probe())
    assert (found.samples, found.steps, found.baseline) == ((20, 20), 3, 3 * 20 * 52)


def test_sizes_and_speeds_of_the_probe_are_of_the_longest_samples():
    found = probe_in_tokens(probe(), token_batches(config(), probe()))
    assert found.throughput[0].samples_per_second == 5.0 * 256
    assert found.throughput_fit.beta_seconds_per_sample == 0.1 / 256
    assert found.throughput_fit.saturation_batch_size == 2560


def test_before_the_study_all_is_measured_in_samples_without_bounds():
    assert in_samples(config(batch_size={"min": 4096})).batch_size.min == 1
    assert in_samples(Config(task="model.py", batch_size={"min": 4})).batch_size.min == 4


def test_a_warm_start_from_a_study_of_tokens_is_refused_where_samples_count(tmp_path):
    (tmp_path / "model.py").touch()
    earlier = documents.tuned()
    earlier["task"]["path"] = str(tmp_path / "model.py")
    earlier["recommendation"]["batch_unit"] = "tokens"
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    with pytest.raises(UsageError, match="its batch sizes count tokens, and this study's samples"):
        read_warm_start(str(tmp_path / "earlier.json"), Config(task=str(tmp_path / "model.py")), tmp_path)


def test_a_warm_start_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--warm-start earlier: not with batch_size\.unit tokens"):
        read_warm_start("earlier", config(), tmp_path)


@pytest.mark.parametrize(
    ("size", "longest", "problem"), [(None, 8, "no number of samples"), (9, (16, 8), "must return one number")]
)
def test_streams_and_lengths_of_several_numbers_are_refused(size, longest, problem):
    opened = Mock(train_size=size, lengths=Mock(longest=longest))
    with pytest.raises(UsageError, match=problem):
        require_tokens(config(), opened)
    require_tokens(Config(task="model.py"), opened)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"batch_size": {"global": 64}}, "there is no global"),
        ({"batch_size": {"multiple_of": 8}}, "there is no multiple_of"),
        ({"batch_size": {"unit": "words"}}, "'samples' or 'tokens'"),
        ({"ranks": {"per_trial": 2}}, "not with batch_size.unit tokens, whose runs are on one device"),
        ({"ranks": {"per_trial": "auto"}}, "not with batch_size.unit tokens"),
    ],
)
def test_what_does_not_go_together_is_said(given, problem):
    with pytest.raises(ValueError, match=problem):
        config(**given)

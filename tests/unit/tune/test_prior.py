import law
import pytest

from batchtune.document import ProbeResult, ThroughputFit
from batchtune.errors import UsageError
from batchtune.tune.plan.prior import candidate_batch_sizes, split_batch, surface_prior


def probe(largest, limited_by="memory", saturation=64.0):
    fit = ThroughputFit(alpha_seconds=saturation * 1e-4, beta_seconds_per_sample=1e-4, saturation_batch_size=saturation)
    points = law.timed({size: 1e-4 * (saturation + size) for size in (16, 64, 256, 1024)})
    return ProbeResult(
        precision="fp32", max_batch_size=largest, limited_by=limited_by, throughput=points, throughput_fit=fit
    )


def sizes(largest=512, **changes):
    known = {"minimum": 1, "maximum": None, "baseline": 32, "multiple_of": 1, "data_size": 50_000}
    limited_by = changes.pop("limited_by", "memory")
    return candidate_batch_sizes(probe(largest, limited_by), **(known | changes))


def test_candidates_go_from_a_quarter_of_saturation_to_two_octaves_beyond_memory():
    assert sizes().batch_sizes == (16, 32, 64, 128, 256, 512, 1024, 2048)


def test_little_is_concluded_from_step_times_too_noisy_for_a_line():
    found = probe(512)
    noisy = found.model_copy(update={"throughput_fit": found.throughput_fit.model_copy(update={"error_share": 0.5})})
    untimed = found.model_copy(update={"throughput_fit": None})
    bounds = {"minimum": 1, "maximum": None, "baseline": 32, "multiple_of": 1, "data_size": 50_000}
    assert candidate_batch_sizes(noisy, **bounds) == candidate_batch_sizes(untimed, **bounds)
    belief = {"batch_size": 32, "rate": 0.01, "spread_decades": 0.5}
    sure, unsure, unknown = (surface_prior(each, **belief).saturation_spread for each in (found, noisy, untimed))
    assert 2 * sure < unsure < unknown


def test_a_step_that_seems_to_cost_nothing_but_its_samples_is_believed_no_further_than_it_was_measured():
    """Timed on a busy machine: 0 s and 9.6 us a sample, with residuals of 9 %."""
    steps = {size: 9.6e-6 * size for size in (1024, 2048, 4096, 8192)}
    fit = ThroughputFit(alpha_seconds=0.0, beta_seconds_per_sample=9.6e-6, error_share=0.09, saturation_batch_size=0.0)
    found = probe(8192).model_copy(update={"throughput": law.timed(steps), "throughput_fit": fit})
    belief = {"batch_size": 32, "rate": 0.01, "spread_decades": 0.5}
    busy = surface_prior(found, **belief)
    assert busy.saturation_batch_size > 20
    assert busy.saturation_spread > 1
    ran = surface_prior(found, **belief, paces={(32, 1): 1.1e-3 + 32e-5, (256, 1): 1.1e-3 + 256e-5})
    assert ran.saturation_batch_size == pytest.approx(110, rel=0.4)
    assert ran.saturation_spread < 0.7


def test_a_users_maximum_and_the_data_set_are_never_passed():
    assert max(sizes(maximum=200).batch_sizes) <= 200
    assert max(sizes(data_size=300).batch_sizes) <= 300


def test_what_was_not_limited_by_memory_is_not_exceeded_by_accumulation():
    assert max(sizes(700, limited_by="max").batch_sizes) <= 700


def test_the_baseline_is_a_candidate_whatever_else_is():
    assert 48 in sizes(baseline=48).batch_sizes
    assert 7 in sizes(baseline=7).batch_sizes


def test_the_reason_names_what_ends_the_range():
    assert "memory" in sizes().reason
    assert "data set" in sizes(data_size=300).reason
    assert "your maximum 200" in sizes(maximum=200).reason


def test_a_users_range_without_a_power_of_two_is_tried_at_its_ends():
    found = sizes(minimum=40, maximum=60)
    assert found.batch_sizes == (40, 60)
    assert found.reason.startswith("sizes about an octave apart from about your minimum 40 to your maximum 60;")
    assert sizes(minimum=33, maximum=62, baseline=48, multiple_of=3).batch_sizes == (33, 48, 60)


def test_a_users_ends_are_tried_where_no_power_of_two_is_near():
    assert sizes(maximum=100, baseline=16).batch_sizes == (16, 32, 64, 100)
    assert sizes(maximum=72, baseline=16).batch_sizes == (16, 32, 64)
    assert sizes(minimum=24, maximum=64).batch_sizes == (24, 32, 64)


def test_no_candidate_is_below_a_users_minimum():
    assert min(sizes(minimum=4, multiple_of=3, baseline=6).batch_sizes) == 6


def test_an_end_that_must_be_accumulated_is_one_that_divides_evenly():
    last = sizes(largest=256, maximum=499, baseline=16).batch_sizes[-1]
    assert last == 498
    assert split_batch(last, 256) == (249, 2)
    assert sizes(largest=256, minimum=349, maximum=600, baseline=512).batch_sizes[0] == 350


@pytest.mark.parametrize(
    ("bounds", "baseline", "expected"),
    [
        ({"minimum": 64, "maximum": 512}, 8, (64, 128, 256, 512)),
        ({"minimum": 24, "maximum": 250, "multiple_of": 24}, 50, (24, 48, 120, 240)),
        ({"maximum": 16}, 300, (8, 16)),
        ({"maximum": 100}, 300, (16, 32, 64, 100)),
    ],
)
def test_a_baseline_outside_of_the_users_bounds_is_no_candidate(bounds, baseline, expected):
    found = sizes(**bounds, baseline=baseline)
    assert found.batch_sizes == expected
    assert found.reason.endswith(f"; the baseline's {baseline} is outside of your bounds and only measured")


@pytest.mark.parametrize("largest", [1, 5, 16, 48])
@pytest.mark.parametrize("maximum", [1, 16, 21, 41, 97])
def test_a_maximum_far_below_saturation_leaves_something_to_search(largest, maximum):
    found = candidate_batch_sizes(
        probe(largest, saturation=4000.0),
        minimum=1,
        maximum=maximum,
        baseline=300,
        multiple_of=1,
        data_size=None,
    )
    assert 0.5 * maximum < max(found.batch_sizes) <= maximum
    assert "saturation" not in found.reason


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"minimum": 1000}, r"batch_size.min 1000 leaves no .*: 1000 > 4 accumulated .*, or set batch_size.max$"),
        ({"minimum": 41, "maximum": 47, "multiple_of": 8}, r"leaves no .*: 48 > your maximum 47; lower it$"),
        ({"minimum": 41, "data_size": 40}, r"leaves no .*: 41 > the data set's 40 samples; lower it$"),
    ],
)
def test_bounds_that_leave_no_candidate_are_refused_by_their_key(bounds, told):
    with pytest.raises(UsageError, match=told):
        sizes(largest=16, **bounds)


def test_a_batch_that_bounds_leave_alone_is_made_up_of_what_micro_batches_there_are():
    assert sizes(largest=64, minimum=1000, maximum=1000).batch_sizes == (1000,)
    assert sizes(largest=16, minimum=41, maximum=41).batch_sizes == (41,)


def test_a_baseline_that_is_no_multiple_leaves_the_least_where_no_power_of_two_is_within_reach():
    found = sizes(largest=24, limited_by="max", multiple_of=24, baseline=20)
    assert found.batch_sizes == (24,)
    assert found.reason.startswith("sizes about")


def test_the_reason_says_where_the_range_starts():
    assert "from about a quarter of the saturation batch size 64 to" in sizes().reason
    assert "from about 7 to" in sizes(baseline=7).reason

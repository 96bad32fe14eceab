"""Which size comes next when a final check does not pass, how long a check is, and when to give up."""

import pytest

from batchtune.document import Attempt
from batchtune.probe.final_check import (
    Check,
    cut_short,
    out_in_evaluation,
    size_below,
    steps_to_verify,
    timed_out_twice,
    with_spread,
)
from batchtune.probe.options import ProbeOptions


def check(size, outcome="oom", *, steps=0, asked=20):
    return Check(Attempt(batch_size=size, outcome=outcome, seconds=1.0, steps=steps, purpose="verify"), asked)


def test_what_failed_in_training_is_told_from_what_failed_in_evaluation():
    checks = [check(100, steps=7), check(99, steps=20), check(98, "timeout", steps=20), check(97, "fit", steps=20)]
    assert [each.batch_size for each in cut_short(checks)] == [100]
    assert [each.batch_size for each in out_in_evaluation(checks)] == [99]


def test_sizes_go_down_by_little_at_first_and_then_ever_faster():
    checks, size = [], 10_000
    sizes = []
    while len(sizes) < 8:
        checks.append(check(size))
        size = size_below(checks, ProbeOptions())
        sizes.append(size)
    shares = [1 - after / before for before, after in zip([10_000, *sizes], sizes, strict=False)]
    assert shares[:3] == pytest.approx([0.005] * 3, abs=1e-4)
    assert shares[3:] == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16], abs=1e-3)


@pytest.mark.parametrize(
    "checks",
    [[check(1000, "timeout")], [check(1010, steps=20), check(1000, steps=20)]],
    ids=["silent", "twice in evaluation"],
)
def test_what_is_not_the_batch_of_a_training_step_halves_it(checks):
    assert size_below(checks, ProbeOptions()) == 500


def test_once_in_evaluation_may_be_chance():
    assert size_below([check(1010, steps=3), check(1000, steps=20)], ProbeOptions()) == 995


def test_the_smallest_size_is_checked_before_giving_up():
    options = ProbeOptions(minimum=30, multiple_of=8)
    assert size_below([check(40, "timeout")], options) == 32
    assert size_below([check(32, "timeout")], options) is None


def test_every_size_is_a_multiple_and_smaller_than_the_last():
    for size in range(16, 400, 8):
        below = size_below([check(size)], ProbeOptions(multiple_of=8))
        assert below < size
        assert below % 8 == 0


def test_silence_at_half_the_size_too_is_the_end():
    options = ProbeOptions(timeout=5.0, verify_timeout=60.0)
    assert timed_out_twice([check(64, "timeout")], options) is None
    assert timed_out_twice([check(64, "timeout"), check(32)], options) is None
    told = str(timed_out_twice([check(64, "timeout"), check(32, "timeout")], options))
    assert "it said nothing for 60 s at batch sizes 64 and 32" in told


def test_a_check_has_the_steps_that_its_time_allows_but_those_of_an_attempt_at_least():
    slow = Attempt(batch_size=8, outcome="fit", seconds=1.0, step_seconds=0.5)
    assert steps_to_verify([slow], ProbeOptions()) == 20
    assert steps_to_verify([slow], ProbeOptions(verify_seconds=4.0)) == 8
    assert steps_to_verify([slow], ProbeOptions(verify_seconds=0.1)) == 3
    assert steps_to_verify([], ProbeOptions(verify_seconds=0.1)) == 20


def passed(peak):
    return Attempt(batch_size=100, outcome="fit", steps=20, purpose="verify", peak_reserved_bytes=peak)


@pytest.mark.parametrize(
    ("peaks", "limit", "outcome", "told"),
    [
        ([900], 1000, "fit", 900),
        ([900, 930, 880], 980, "fit", 930),
        ([900, 930, 880], 979, "oom", 980),
        ([900, 900, 900], 945, "fit", 900),
        ([900, 900, 900], 944, "oom", 945),
        ([900, 930, 880], None, "fit", 930),
        ([None], 1000, "fit", None),
    ],
)
def test_a_size_passes_where_its_peak_would_by_as_much_as_processes_differ(peaks, limit, outcome, told):
    found = with_spread([passed(peak) for peak in peaks], limit)
    assert (found.outcome, found.peak_reserved_bytes) == (outcome, told)


def test_a_peak_that_was_measured_beyond_the_limit_says_how_much_smaller_the_next_size_is():
    beyond = Check(Attempt(batch_size=1000, outcome="oom", steps=1, peak_reserved_bytes=1250), 20)
    assert size_below([beyond], ProbeOptions(), 1000) == pytest.approx(700, abs=1)
    fits = [Attempt(batch_size=size, outcome="fit", peak_reserved_bytes=750 + size // 2) for size in (100, 480)]
    assert size_below([beyond], ProbeOptions(), 1000, fits) == 500

"""Which size comes next when a final check does not pass, how long a check is, and when to give up."""

from dataclasses import replace

import pytest

from batchtune.config.probe import ProbeOptions
from batchtune.document import Attempt, Environment
from batchtune.probe.final_check import (
    Check,
    asks_for_another,
    cut_short,
    larger_with_room,
    order_warnings,
    out_in_evaluation,
    size_below,
    size_with_room,
    steps_to_verify,
    timed_out_twice,
    with_spread,
)


def check(size, outcome="oom", *, steps=0, asked=20, in_evaluation=None):
    about = {"seconds": 1.0, "steps": steps, "purpose": "verify", "in_evaluation": in_evaluation}
    return Check(Attempt(batch_size=size, outcome=outcome, **about), asked)


def evaluated(size, outcome="oom"):
    return check(size, outcome, steps=20, in_evaluation=True)


def test_what_failed_in_training_is_told_from_what_failed_in_evaluation():
    checks = [check(100, steps=7), evaluated(99), evaluated(98, "timeout"), check(97, "fit", steps=20)]
    assert [each.batch_size for each in cut_short(checks)] == [100]
    assert [each.batch_size for each in out_in_evaluation(checks)] == [99]
    from_new = [check(98, "oom", steps=10, in_evaluation=True)]  # whose steps are counted from new
    assert (out_in_evaluation(from_new), cut_short(from_new)) == ([from_new[0].attempt], [])


def test_what_failed_in_the_steps_after_an_evaluation_failed_in_training():
    checks = [check(100, steps=20), check(99, steps=20)]
    assert out_in_evaluation(checks) == cut_short(checks) == []
    assert size_below(checks, ProbeOptions()) == 98


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
    [[check(1000, "timeout")], [evaluated(1010), evaluated(1000)]],
    ids=["silent", "twice in evaluation"],
)
def test_what_is_not_the_batch_of_a_training_step_halves_it(checks):
    assert size_below(checks, ProbeOptions()) == 500


def test_once_in_evaluation_may_be_chance():
    assert size_below([check(1010, steps=3), evaluated(1000)], ProbeOptions()) == 995


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
    ("peaks", "limit", "outcome", "kept_back"),
    [
        ([900], 1000, "fit", None),
        ([900, 930, 880, 905, 895], 945, "fit", 15),
        ([900, 930, 880, 905, 895], 944, "oom", 15),
        ([900] * 5, 909, "fit", 9),
        ([900] * 5, 908, "oom", 9),
        ([900, 930, 880], None, "fit", None),
        ([990], 1000, "fit", None),
        ([991], 1000, "oom", 10),
        ([None], 1000, "fit", None),
    ],
)
def test_a_size_passes_where_19_of_20_processes_would_stay_within_the_limit(peaks, limit, outcome, kept_back):
    found = with_spread([passed(peak) for peak in peaks], "cpu", limit)
    assert (found.outcome, found.kept_back_bytes) == (outcome, kept_back)
    assert found.peak_reserved_bytes == max(peaks)  # as it was measured
    assert with_spread([passed(peak) for peak in peaks], "cuda:0", limit).fits


@pytest.mark.parametrize(
    ("peaks", "asks"),
    [
        ([700], False),
        ([810], True),
        ([810, 700], True),
        ([995], False),
        ([810] * 3, True),
        ([810, 910, 750, 850], True),
        ([810, 910, 750, 850, 830], False),
        ([700, 990, 720], False),
    ],
    ids=[
        "far below",
        "near",
        "once near",
        "what is beyond with the least spread",
        "three of five",
        "four of five",
        "all",
        "so far apart that no more helps",
    ],
)
def test_a_cpus_check_is_made_in_five_processes_where_they_may_pass(peaks, asks):
    assert asks_for_another([passed(peak) for peak in peaks], "cpu", 1000, 1) is asks
    assert not asks_for_another([passed(peak) for peak in peaks], "cuda:0", 1000, 1)


def test_a_gpus_check_is_made_in_as_many_processes_as_batches_have_orders_where_the_limit_is_near():
    assert asks_for_another([passed(999)] * 5, "cuda:0", 1000, 6)
    assert not asks_for_another([passed(999)] * 6, "cuda:0", 1000, 6)
    assert not asks_for_another([passed(700)], "cuda:0", 1000, 6)
    assert not asks_for_another([passed(999)], "cuda:0", None, 6)


def test_after_other_batches_failed_the_next_size_is_clearly_smaller():
    assert size_below([check(1000)], ProbeOptions()) == 995
    assert size_below([replace(check(1000), by_luck=True)], ProbeOptions()) == 970
    late = [replace(check(size, steps=8), by_luck=True) for size in (1000, 970, 940, 910)]  # no leak, for all that
    assert size_below(late, ProbeOptions()) == 882


def measured(batch_size, peak, trained, kept_back=10):
    """A check on a CPU that took too much in its steps, or in its evaluation."""
    peaks = {"peak_reserved_bytes": peak, "steps_peak_bytes": trained, "kept_back_bytes": kept_back}
    return Check(Attempt(batch_size=batch_size, outcome="oom", steps=20, purpose="verify", **peaks), 20)


def test_on_a_cpu_it_is_known_whether_the_steps_took_too_much_or_the_evaluation():
    in_steps, in_evaluation, between = measured(64, 1100, 1100), measured(64, 1100, 800), measured(64, 992, 985)
    assert out_in_evaluation([in_steps, in_evaluation, between], 1000) == [in_evaluation.attempt]


def test_an_evaluation_that_takes_as_much_at_any_size_is_checked_at_the_smallest_next():
    alike = [measured(1000, 1100, 800), measured(950, 1099, 780)]
    assert size_below(alike, ProbeOptions(minimum=2), 1000) == 2
    falling = [measured(1000, 1100, 800), measured(950, 1050, 780)]
    assert size_below(falling, ProbeOptions(), 1000) == 475
    assert size_below([measured(1000, 1100, 1100), measured(950, 1099, 1099)], ProbeOptions(), 1000) > 475


def test_on_a_cpu_a_warning_says_what_helps_where_batches_that_differ_take_far_more(monkeypatch):
    cpu = Environment(device="a CPU", device_type="cpu")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    (warning,) = order_warnings([check(26), check(15), check(14, "fit")], cpu)
    assert "leave memory behind: 26 did not train in every order" in warning
    assert "or set ONEDNN_PRIMITIVE_CACHE_CAPACITY=16, and probe again" in warning
    assert order_warnings([check(26), check(21, "fit")], cpu) == []
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    (warning,) = order_warnings([check(26), check(14, "fit")], cpu)
    assert warning.endswith("may need more than was found")


def test_the_room_that_a_check_leaves_is_used_up_to_what_has_failed():
    fits = [Attempt(batch_size=size, outcome="fit", peak_reserved_bytes=500 + size) for size in (100, 300)]
    failed = Attempt(batch_size=480, outcome="oom", purpose="verify", peak_reserved_bytes=1050)
    checked = passed(300).model_copy(update={"batch_size": 300, "peak_reserved_bytes": 800, "kept_back_bytes": 20})
    look = ProbeOptions()
    searched = failed.model_copy(update={"batch_size": 350, "purpose": "search"})
    assert larger_with_room(checked, [*fits, searched], 1000, look) == 463  # what grows, 200 at 300, by a tenth more
    assert larger_with_room(checked, [*fits, failed], 1000, look) == 390
    assert larger_with_room(checked, [*fits, failed.model_copy(update={"batch_size": 350})], 1000, look) is None
    assert larger_with_room(checked, [*fits, failed.model_copy(update={"outcome": "crash"})], 1000, look) is None
    assert larger_with_room(checked, fits, 1000, look) is None


@pytest.mark.parametrize(
    ("size", "peak", "usual", "larger"),
    [(300, 800, {}, 433), (300, 800, {"usual": 0.5}, 366), (450, 1050, {}, 359), (100, 600, {}, 138)],
    ids=["by a fifth of what grows", "by half of it", "it took too much", "the smallest fit, all of which grows"],
)
def test_the_size_whose_peak_leaves_room_for_what_processes_differ_by(size, peak, usual, larger):
    fits = [Attempt(batch_size=each, outcome="fit", peak_reserved_bytes=500 + each) for each in (100, 300)]
    fit = Attempt(batch_size=size, outcome="fit", peak_reserved_bytes=peak)
    assert size_with_room(fit, fits, 1000, ProbeOptions(), **usual) == larger


def test_a_peak_that_was_measured_beyond_the_limit_says_how_much_smaller_the_next_size_is():
    beyond = Check(Attempt(batch_size=1000, outcome="oom", steps=1, peak_reserved_bytes=1010), 20)
    assert size_below([beyond], ProbeOptions(), 1000) == 950  # it ended as it met the limit: not the whole peak
    beyond = Check(beyond.attempt.model_copy(update={"peak_reserved_bytes": 1250}), 20)
    assert size_below([beyond], ProbeOptions(), 1000) == pytest.approx(750, abs=1)
    beyond = Check(beyond.attempt.model_copy(update={"steps": 20}), 20)
    assert size_below([beyond], ProbeOptions(), 1000) == pytest.approx(750, abs=1)
    fits = [Attempt(batch_size=size, outcome="fit", peak_reserved_bytes=750 + size // 2) for size in (100, 480)]
    assert size_below([beyond], ProbeOptions(), 1000, fits) == 500

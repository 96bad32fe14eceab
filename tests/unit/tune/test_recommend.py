import math

import pytest

from batchtune.document import Interval, Trial, config_of
from batchtune.tune.verdict.recommend import recommend, seeds_to_tell
from batchtune.tune.verdict.scores import finalists


def trial(number, role, batch, rate, seconds, *, state="complete", value=0.1, used=None):
    return Trial(
        number=number,
        state=state,
        role=role,
        batch_size=batch,
        micro_batch_size=batch,
        gradient_accumulation_steps=1,
        learning_rate=rate,
        precision="fp32",
        seed=number,
        time_to_target_seconds=seconds,
        training_seconds=used if used is not None else seconds,
        value=value,
        outcome="reached" if seconds is not None else "finished",
    )


def confirmed(*groups):
    trials = [trial(0, "baseline", 32, 1e-3, 10.0)]
    for (batch, rate), times in groups:
        trials += [trial(len(trials) + n, "confirm", batch, rate, seconds) for n, seconds in enumerate(times)]
    return trials


def test_finalists_are_the_fastest_distinct_configurations_without_the_baseline():
    trials = [
        trial(0, "baseline", 32, 1e-3, 10.0),
        trial(1, "search", 32, 1e-3, 1.0),
        trial(2, "search", 64, 1e-2, 4.0),
        trial(3, "search", 64, 1e-2, 3.0),
        trial(4, "search", 128, 1e-2, 5.0),
        trial(5, "search", 256, 1e-2, None, state="pruned"),
    ]
    assert [each.number for each in finalists(trials, kind="time_to_target", goal="minimize")] == [3, 4]


def test_a_clear_winner_comes_with_its_interval():
    found, base = recommend(
        confirmed(((32, 1e-3), (10, 11, 12)), ((64, 1e-2), (4, 5, 6))), kind="time_to_target", goal="minimize"
    )
    assert (found.global_batch_size, base.global_batch_size) == (64, 32)
    assert found.speedup_over_baseline.low > 1
    assert found.speedup_over_baseline.median == pytest.approx(11 / 5)
    assert found.speedup_over_baseline.low <= 11 / 5 <= found.speedup_over_baseline.high


def test_a_contender_without_a_result_puts_none_aside_that_had_time_for_fewer_seeds():
    trials = confirmed(((32, 1e-3), (None, None, None)), ((64, 1e-2), (None, None, None)), ((64, 2e-2), (2.0,)))
    trials = [each.model_copy(update={"training_seconds": each.time_to_target_seconds or 6.0}) for each in trials]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert found.reason.startswith("not confirmed")
    assert "no other configuration" not in found.reason


def test_without_the_baseline_on_fresh_seeds_figures_are_of_those_that_there_are():
    trials = [
        trial(0, "baseline", 64, 1e-3, 2.21),
        trial(1, "search", 512, 1e-2, 0.68),
        trial(2, "search", 256, 1e-2, 0.44),
        trial(3, "search", 512, 5e-2, 1.4),
        trial(4, "confirm", 512, 1e-2, 2.19),
        trial(5, "confirm", 256, 1e-2, 2.16),
    ]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert (found.global_batch_size, found.time_to_target_seconds.median) == (256, 2.16)
    assert found.reason == "best of 6 single runs, not confirmed: 1 fresh seed so far"
    assert found.seeds_to_confirm == 3


@pytest.mark.parametrize(
    ("others", "batch", "told"),
    [
        (
            [],
            32,
            "and what you run today, leaving out what its own runs show to be worse, not confirmed",
        ),
        (
            [trial(2, "search", 128, 1e-2, 3.0)],
            128,
            "3 single runs, leaving out what its own runs show to be worse",
        ),
        ([trial(2, "confirm", 64, 1e-2, 3.0)], 64, "3 single runs, not confirmed: 1 fresh seed so far"),
    ],
)
def test_nothing_that_is_shown_slower_than_today_is_said_to_be_better_by_all_runs_together(others, batch, told):
    trials = [trial(0, "baseline", 32, 1e-3, 4.5), trial(1, "search", 64, 1e-2, 5.0), *others]
    believed = {config_of(each): {64: 1.0, 128: 1.1, 32: 1.5}[each.batch_size] for each in trials}
    found, _ = recommend(trials, kind="time_to_target", goal="minimize", expected=believed)
    assert found.global_batch_size == batch
    assert found.time_to_target_seconds.median <= 4.5
    assert told in found.reason


@pytest.mark.parametrize(("seconds", "batch"), [(4.501, 64), (4.58, 64), (4.6, 32)])
def test_what_is_level_with_today_is_not_said_to_be_worse(seconds, batch):
    trials = [trial(0, "baseline", 32, 1e-3, 4.5), trial(1, "search", 64, 1e-2, seconds)]
    believed = {config_of(each): {64: 1.0, 32: 1.5}[each.batch_size] for each in trials}
    found, _ = recommend(trials, kind="time_to_target", goal="minimize", expected=believed)
    assert found.global_batch_size == batch
    assert ("show to be worse" in found.reason) is (batch == 32)


def test_what_all_runs_tell_does_not_outweigh_a_fresh_seed_of_another():
    trials = [
        trial(0, "baseline", 16, 1e-3, 9.0),
        trial(1, "search", 256, 3e-3, 0.96),
        trial(2, "search", 512, 4e-3, 0.75),
        trial(3, "confirm", 512, 4e-3, 0.78),
    ]
    believed = {config_of(each): {16: 9.0, 256: 0.7, 512: 0.8}[each.batch_size] for each in trials}
    found, _ = recommend(trials, kind="time_to_target", goal="minimize", expected=believed)
    assert found.global_batch_size == 512
    assert "leaving out what its own runs show to be worse, not confirmed: 1 fresh seed so far" in found.reason


def test_a_run_on_a_fresh_seed_that_was_cut_off_tells_nothing_of_a_best_value():
    cut = trial(3, "confirm", 256, 1e-2, None, state="fail", value=0.99).model_copy(update={"outcome": "capped"})
    trials = [trial(0, "baseline", 64, 1e-3, None, value=0.8), trial(1, "search", 256, 1e-2, None, value=0.9), cut]
    found, _ = recommend(trials, kind="best_metric", goal="maximize")
    assert (found.global_batch_size, found.value.median) == (256, 0.9)
    assert found.reason == "best of 2 single runs, not confirmed on fresh seeds"


class TestNoise:
    """A candidate that seems faster, by runs too noisy to say so."""

    NOISY = (((32, 1e-3), (10.0, 11.0, 13.0)), ((64, 1e-2), (8.0, 9.2, 10.5)))

    def test_it_is_told_how_many_seeds_would_tell(self):
        found, base = recommend(confirmed(*self.NOISY), kind="time_to_target", goal="minimize")
        assert (found.global_batch_size, found.speedup_over_baseline) == (32, None)
        assert 3 < found.seeds_to_confirm <= 12
        assert found.reason.startswith("no significant speed-up over the baseline; the best candidate got there 1.20 ")
        assert found.reason.endswith(f"; {found.seeds_to_confirm} seeds of each may tell")
        assert base is not None

    def test_more_seeds_of_the_same_noise_do_tell(self):
        more = seeds_to_tell(Interval(median=1.25, low=0.9, high=1.6), 3)
        noise = math.log(1.25 / 0.9) * math.sqrt(3 / more)
        assert 1.25 / math.exp(noise) >= 1 > 1.25 / math.exp(noise * math.sqrt(more / (more - 1)))

    def test_a_machine_that_was_busy_meanwhile_is_named(self):
        trials = [
            each.model_copy(update={"measured_training_seconds": 1.8 * each.training_seconds})
            for each in confirmed(*self.NOISY)
        ]
        found, _ = recommend(trials, kind="time_to_target", goal="minimize")
        assert found.reason.endswith(" may tell, on an idle machine fewer (these took 1.8 times as long)")

    @pytest.mark.parametrize("slower", [1.0, 1.8])
    def test_where_seeds_are_out_of_reach_it_is_the_machine_that_may_tell(self, slower):
        groups = ((32, 1e-3), (10.0, 11.0, 13.0)), ((64, 1e-2), (6.0, 10.4, 16.0))
        trials = [
            each.model_copy(update={"measured_training_seconds": slower * each.training_seconds})
            for each in confirmed(*groups)
        ]
        found, _ = recommend(trials, kind="time_to_target", goal="minimize")
        assert found.seeds_to_confirm is None
        told = "; on an idle machine it may show (these took 1.8 times as long)"
        assert found.reason.endswith(told) == (slower > 1)

    @pytest.mark.parametrize(("median", "low"), [(1.02, 0.9), (1.06, 0.7), (0.8, 0.7), (1.5, 1.2)])
    def test_what_is_level_worse_hopeless_or_sure_needs_no_more(self, median, low):
        assert seeds_to_tell(Interval(median=median, low=low, high=2.0), 3) is None


def test_a_tie_goes_to_the_smaller_batch():
    groups = (((32, 1e-3), (10, 11, 12)), ((64, 1e-2), (5.0, 5.2, 5.4)), ((256, 1e-2), (4.9, 5.1, 5.5)))
    found, _ = recommend(confirmed(*groups), kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 64


def test_a_smaller_batch_that_is_slower_by_a_quarter_is_no_tie_however_few_its_runs():
    groups = (((32, 1e-3), (20, 21, 22)), ((64, 1e-2), (4.5, 6.5, 6.6)), ((256, 1e-2), (4.9, 5.1, 5.5)))
    found, _ = recommend(confirmed(*groups), kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 256


def test_no_better_than_the_baseline_is_an_answer():
    found, _ = recommend(
        confirmed(((32, 1e-3), (10, 11, 12)), ((64, 1e-2), (9, 11, 13))), kind="time_to_target", goal="minimize"
    )
    assert found.global_batch_size == 32
    assert found.speedup_over_baseline is None
    assert found.reason.startswith("no significant ")


def test_of_a_baseline_that_was_cut_off_its_one_whole_run_says_more():
    trials = confirmed(((64, 1e-2), (4, 5, 6)))
    trials += [trial(10 + n, "confirm", 32, 1e-3, None, used=9.0) for n in range(3)]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert "its one whole run took 2.0 times as much" in found.reason


def test_a_baseline_that_missed_the_target_makes_the_speedup_a_lower_bound():
    trials = confirmed(((64, 1e-2), (4, 5, 6)))
    trials += [trial(10 + n, "confirm", 32, 1e-3, None, used=20.0) for n in range(3)]
    found, base = recommend(trials, kind="time_to_target", goal="minimize")
    assert "at least 2.86 times" in found.reason
    assert "whole run" not in found.reason  # which was twice as long, on a seed that was kind to it
    assert found.speedup_over_baseline.at_least
    assert found.speedup_over_baseline.median == pytest.approx(4.0)
    assert base.time_to_target_seconds.at_least
    assert not found.time_to_target_seconds.at_least


def test_what_all_runs_tell_decides_between_configurations_that_three_seeds_cannot_tell_apart():
    groups = (((32, 1e-3), (30, 31, 32)), ((64, 1e-2), (4.0, 5.2, 5.4)), ((256, 1e-2), (5.5, 5.6, 5.7)))
    trials = confirmed(*groups)
    logs = {config_of(each): 1.5 if each.batch_size == 256 else 2.0 for each in trials}
    assert recommend(trials, kind="time_to_target", goal="minimize", expected=logs)[0].global_batch_size == 256
    assert recommend(trials, kind="time_to_target", goal="minimize")[0].global_batch_size == 64
    level = logs | {config_of(trials[4]): 1.51}
    assert recommend(trials, kind="time_to_target", goal="minimize", expected=level)[0].global_batch_size == 64


def test_a_lucky_run_is_no_answer_where_all_runs_tell_otherwise():
    trials = [trial(1, "search", 64, 1e-2, 4.0), trial(2, "search", 64, 2e-2, 4.4), trial(3, "search", 64, 4e-2, 3.9)]
    logs = {config_of(each): value for each, value in zip(trials, (1.5, 1.4, 1.8), strict=True)}
    found, _ = recommend(trials, kind="time_to_target", goal="minimize", expected=logs)
    assert found.learning_rate == 2e-2
    assert found.time_to_target_seconds.median == 4.4
    best = finalists(trials, kind="time_to_target", goal="minimize", expected=logs)
    assert [each.number for each in best[:2]] == [2, 1]


def test_finalists_differ_in_batch_size_where_another_is_within_reach():
    def chosen(cost_of_other_size, top=2):
        trials = [
            trial(1, "search", 64, 1e-2, 4.0),
            trial(2, "search", 64, 2e-2, 4.1),
            trial(3, "search", 128, 1e-2, 4.2),
        ]
        costs = (4.0, 4.1, cost_of_other_size)
        logs = {config_of(each): math.log(cost) for each, cost in zip(trials, costs, strict=True)}
        best = finalists(trials, kind="time_to_target", goal="minimize", expected=logs)
        return [each.number for each in best[:top]]

    assert chosen(5.9) == [1, 3]
    assert chosen(6.1) == [1, 2]
    assert chosen(3.9) == [3, 1]
    assert chosen(5.9, top=3) == [1, 3, 2]


def test_without_confirmation_the_best_single_run_is_said_to_be_just_that():
    trials = [trial(0, "baseline", 32, 1e-3, 10.0), trial(1, "search", 64, 1e-2, 4.0)]
    found, base = recommend(trials, kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 64
    assert "not confirmed" in found.reason
    assert base is None


def test_a_metric_to_maximize_is_compared_the_right_way_round():
    trials = [trial(0, "baseline", 32, 1e-3, None, value=0.8)]
    trials += [trial(1 + n, "confirm", 32, 1e-3, None, value=v) for n, v in enumerate((0.80, 0.81, 0.79))]
    trials += [trial(4 + n, "confirm", 64, 1e-2, None, value=v) for n, v in enumerate((0.90, 0.91, 0.89))]
    found, _ = recommend(trials, kind="best_metric", goal="maximize")
    assert found.global_batch_size == 64
    assert found.value.median == 0.90
    assert 0.88 < found.value.low < 0.89
    assert 0.91 < found.value.high < 0.92


def test_to_maximize_a_smaller_batch_is_level_only_where_it_is_about_as_good():
    def chosen(large, small):
        groups = {(256, 1e-2): large, (64, 1e-2): small, (32, 1e-3): (0.50, 0.50, 0.51)}
        trials = [trial(0, "baseline", 32, 1e-3, None, value=0.5)]
        for (batch, rate), values in groups.items():
            trials += [trial(len(trials), "confirm", batch, rate, None, value=value) for value in values]
        return recommend(trials, kind="best_metric", goal="maximize")[0].global_batch_size

    assert chosen((0.95, 0.94, 0.80), (0.83, 0.83, 0.83)) == 256
    assert chosen((0.95, 0.94, 0.92), (0.93, 0.93, 0.93)) == 64


def test_contenders_count_though_the_baseline_fails_on_fresh_seeds():
    trials = [trial(0, "baseline", 32, 1e-3, 10.0), trial(1, "search", 64, 1e-2, 5.0), trial(2, "search", 8, 1e-2, 6.0)]
    crash = {"outcome": "crash"}
    for _ in range(3):
        trials.append(trial(len(trials), "confirm", 64, 1e-2, None, state="fail").model_copy(update=crash))
        trials.append(trial(len(trials), "confirm", 8, 1e-2, 6.0 + len(trials) / 100))
        trials.append(trial(len(trials), "confirm", 32, 1e-3, None, state="fail").model_copy(update=crash))
    found, baseline = recommend(trials, kind="time_to_target", goal="minimize")
    assert (found.global_batch_size, baseline) == (8, None)
    assert found.reason == "the baseline diverged or failed on fresh seeds, so there is no speed-up to give"
    without = [each for each in trials if each.role != "confirm" or each.batch_size != 8]
    assert "not confirmed" in recommend(without, kind="time_to_target", goal="minimize")[0].reason


def test_a_baseline_that_diverges_is_no_measure_of_a_contender_that_gets_there():
    trials = confirmed(((32, 1e-3), (None, None, None)), ((64, 1e-2), (0.010, 0.015, 0.014)))
    apart = {"outcome": "diverged", "state": "pruned", "training_seconds": 0.003, "time_to_target_seconds": None}
    trials = [each if each.batch_size == 64 else each.model_copy(update=apart) for each in trials]
    found, baseline = recommend(trials, kind="time_to_target", goal="minimize")
    assert (found.global_batch_size, baseline) == (64, None)
    assert found.reason == "the baseline diverged or failed on fresh seeds, so there is no speed-up to give"


def test_a_baseline_that_diverges_on_one_seed_is_compared_on_the_others():
    trials = confirmed(((32, 1e-3), (10.0, 11.0, None)), ((64, 1e-2), (4.0, 4.1, 4.2)))
    trials[3] = trials[3].model_copy(update={"outcome": "diverged", "training_seconds": 0.1})
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert "3 fresh seeds, baseline 2; to compare takes 3 of each; the baseline diverged on 1 more" in found.reason
    assert (found.speedup_over_baseline, found.seeds_to_confirm) == (None, 4)
    trials.append(trial(20, "confirm", 32, 1e-3, 12.0))
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert not found.speedup_over_baseline.at_least
    assert found.seeds_to_confirm is None


def test_a_whole_run_of_the_baseline_that_missed_the_target_is_told():
    trials = confirmed(((32, 1e-3), (None,) * 3), ((64, 1e-2), (0.5,) * 3))
    whole = {"time_to_target_seconds": None, "outcome": "finished", "training_seconds": 60.0}
    trials[0] = trials[0].model_copy(update=whole)
    cut = {"training_seconds": 1.5, "outcome": "capped", "state": "pruned"}
    trials[1:4] = [each.model_copy(update=cut) for each in trials[1:4]]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert "its one whole run had not got there after 120.0 times" in found.reason


@pytest.mark.parametrize(("contender", "size"), [(9.8, 32), (9.0, 64)])
def test_one_fresh_seed_each_must_tell_more_than_chance_does(contender, size):
    trials = confirmed(((32, 1e-3), (10.0,)), ((64, 1e-2), (contender,)))
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert found.global_batch_size == size
    assert found.reason.endswith("1 fresh seed each; to compare takes 3 of each")


@pytest.mark.parametrize("seeds", [(1, 1), (2, 1), (2, 2), (3, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("baseline_seconds", [10.0, None])
def test_below_three_fresh_seeds_of_either_side_there_is_no_ratio_and_nothing_is_confirmed(seeds, baseline_seconds):
    ours, theirs = seeds
    trials = confirmed(((32, 1e-3), (baseline_seconds,) * ours), ((64, 1e-2), (4.0,) * theirs))
    trials = [each if each.batch_size == 64 else each.model_copy(update={"training_seconds": 10.0}) for each in trials]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    enough = min(seeds) >= 3
    assert found.global_batch_size == 64
    assert (found.speedup_over_baseline is not None) == enough
    assert ("times" in found.reason) == enough
    assert found.reason.startswith("not confirmed") != enough
    assert found.seeds_to_confirm == (None if enough else 3)


def test_over_a_single_run_there_is_no_gain_and_the_reason_says_so():
    trials = confirmed(((32, 1e-3), (10.0,)), ((64, 1e-2), (4.0, 4.1, 4.2)))
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert found.speedup_over_baseline is None
    assert found.reason.startswith("not confirmed: 3 fresh seeds, baseline 1")


def test_the_seeds_of_either_side_are_counted():
    trials = confirmed(((32, 1e-3), (10.0, 11.0, 12.0)), ((64, 1e-2), (4.0, 4.1, 4.2, 4.3)))
    assert "over 4 fresh seeds, baseline 3" in recommend(trials, kind="time_to_target", goal="minimize")[0].reason


def with_misses(*, misses=0, divergences=0, failures=0, reached=(4.0, 4.5, 5.0)):
    """Three seeds of the baseline, and one contender that comes to nothing on some more; it trained 0.2 s there."""
    trials = confirmed(((32, 1e-3), (10, 11, 12)), ((64, 1e-2), reached))
    for outcome, count in (("finished", misses), ("diverged", divergences), ("crash", failures)):
        state = "fail" if outcome == "crash" else "pruned"
        for _ in range(count):
            lost = trial(len(trials), "confirm", 64, 1e-2, None, state=state, used=0.2)
            trials.append(lost.model_copy(update={"outcome": outcome}))
    return trials


@pytest.mark.parametrize("how", ["misses", "divergences", "failures"])
def test_a_contender_that_comes_to_nothing_on_most_fresh_seeds_is_no_answer(how):
    found, _ = recommend(with_misses(**{how: 2}, reached=(4.0,)), kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 32
    assert found.reason == "no other configuration came to a result on most of its fresh seeds"


@pytest.mark.parametrize("how", ["misses", "divergences", "failures"])
def test_a_fresh_seed_that_came_to_nothing_was_no_faster_than_the_baseline(how):
    found, _ = recommend(with_misses(**{how: 1}, reached=(4.0, 4.5)), kind="time_to_target", goal="minimize")
    assert found.reason.startswith("no significant ")
    assert "1 of its 3 runs came to no result" in found.reason
    many = with_misses(**{how: 1}, reached=(4.0, 4.5, 4.2, 4.3, 4.4, 4.1, 4.6, 4.7))
    found, _ = recommend(many, kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 64
    assert found.speedup_over_baseline.low > 1.5
    assert "1 of its 9 runs came to no result" in found.reason


def test_a_contender_that_held_on_all_fresh_seeds_goes_before_a_faster_one_that_did_not():
    trials = with_misses(misses=1, reached=(4.0, 4.5))
    trials += [trial(20 + n, "confirm", 128, 1e-2, 6.0 + n / 10) for n in range(3)]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 128
    assert found.speedup_over_baseline.low > 1


def test_the_micro_batch_of_an_answer_is_the_one_that_ran_on_every_seed():
    trials = confirmed(((32, 1e-3), (10, 11, 12)), ((64, 1e-2), (4, 5, 6)))
    halved = {"micro_batch_size": 32, "gradient_accumulation_steps": 2}
    trials[-1] = trials[-1].model_copy(update=halved)
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (32, 2)


def test_a_metric_of_a_run_that_failed_is_no_answer():
    good = trial(1, "search", 64, 1e-2, None, value=0.3)
    crashed = trial(2, "search", 128, 1e-2, None, value=0.1, state="fail").model_copy(update={"outcome": "oom"})
    found, _ = recommend([good, crashed], kind="best_metric", goal="minimize")
    assert found.global_batch_size == 64


def test_what_a_run_that_failed_did_not_settle_is_taken_from_those_that_trained():
    trials = confirmed(((32, 1e-3), (10, 11, 12)))
    horizon = {"total_steps": 700}
    trials.append(trial(9, "confirm", 64, 1e-2, None, state="fail").model_copy(update={"outcome": "crash"}))
    trials += [trial(10 + n, "confirm", 64, 1e-2, None, value=0.01).model_copy(update=horizon) for n in range(6)]
    found, _ = recommend(trials, kind="best_metric", goal="minimize")
    assert found.global_batch_size == 64
    assert found.total_steps == 700


def test_a_contender_that_beats_the_baseline_goes_before_one_that_only_seems_the_best():
    trials = confirmed(((32, 1e-3), (20, 21, 22)), ((64, 1e-2), (9, 12, 21)), ((128, 2e-2), (10, 10.5, 11)))
    logs = {config_of(each): {32: 3.0, 64: 2.3, 128: 2.4}[each.batch_size] for each in trials}
    found, _ = recommend(trials, kind="time_to_target", goal="minimize", expected=logs)
    assert found.global_batch_size == 128
    assert found.speedup_over_baseline.low > 1


def of_metric(*groups):
    trials = confirmed(*groups)
    return [each.model_copy(update={"value": each.time_to_target_seconds}) for each in trials]


class TestTheBestMetric:
    def test_single_runs_that_are_nearly_alike_are_no_reason_to_change(self):
        trials = of_metric(((32, 1e-3), (0.9001,)), ((64, 1e-2), (0.9003,)), ((128, 1e-2), (0.8998,)))
        found, _ = recommend(trials, kind="best_metric", goal="maximize")
        assert found.global_batch_size == 32
        assert found.reason == (
            "not confirmed, and so far no better than what you run today: 1 fresh seed each; to compare takes 3 of each"
        )
        clear = of_metric(((32, 1e-3), (0.80,)), ((64, 1e-2), (0.90,)))
        assert recommend(clear, kind="best_metric", goal="maximize")[0].global_batch_size == 64

    @pytest.mark.parametrize("goal", ["minimize", "maximize"])
    def test_a_negative_metric_is_said_as_it_is(self, goal):
        better = (-4.0, -4.1, -4.2) if goal == "minimize" else (-2.0, -2.1, -2.2)
        trials = of_metric(((32, 1e-3), (-3.0, -3.1, -3.2)), ((64, 1e-2), better))
        found, _ = recommend(trials, kind="best_metric", goal=goal)
        assert found.reason.startswith(f"comes to {better[1]:g} against -3.1 of the baseline")
        assert found.value.median == better[1]

    def test_runs_that_lie_apart_are_a_difference_however_small(self):
        trials = of_metric(((32, 1e-3), (0.940, 0.941, 0.942)), ((64, 1e-2), (0.950, 0.952, 0.948)))
        found, _ = recommend(trials, kind="best_metric", goal="maximize")
        assert found.global_batch_size == 64
        assert found.reason == "comes to 0.95 against 0.941 of the baseline, median over 3 fresh seeds each"
        mixed = of_metric(((32, 1e-3), (0.940, 0.941, 0.949)), ((64, 1e-2), (0.950, 0.952, 0.948)))
        assert recommend(mixed, kind="best_metric", goal="maximize")[0].global_batch_size == 32

    def test_one_that_is_level_with_the_best_but_not_above_the_baseline_does_not_hide_it(self):
        base, small = ((32, 1e-3), (0.940, 0.941, 0.942)), ((16, 1e-2), (0.9390, 0.9385, 0.9388))
        trials = of_metric(base, ((256, 1e-2), (0.950, 0.952, 0.946)), small)
        assert recommend(trials, kind="best_metric", goal="maximize")[0].global_batch_size == 256


def test_the_smaller_of_level_batches_is_taken_where_the_baseline_has_failed_too():
    trials = confirmed(((32, 1e-3), ()), ((64, 1e-2), (10.1, 10.0, 10.2)), ((512, 1e-2), (10.0, 10.1, 10.0)))
    lost = [trial(20 + n, "confirm", 32, 1e-3, None, state="fail") for n in range(3)]
    trials += [each.model_copy(update={"outcome": "crash"}) for each in lost]
    found, _ = recommend(trials, kind="time_to_target", goal="minimize")
    assert found.global_batch_size == 64


def test_what_fresh_seeds_have_refuted_is_not_recommended_by_its_single_run():
    search = [trial(1, "search", 64, 1e-2, 2.0), trial(2, "search", 128, 1e-2, 3.0)]
    fresh = [trial(3 + n, "confirm", 64, 1e-2, None) for n in range(3)]
    found, _ = recommend([*confirmed(), *search, *fresh], kind="time_to_target", goal="minimize")
    assert (found.global_batch_size, found.seeds_to_confirm) == (128, 3)
    assert "not confirmed" in found.reason


def test_what_has_run_on_a_fresh_seed_goes_before_what_the_seed_of_the_search_may_have_favoured():
    search = [
        trial(1, "search", 64, 7e-3, 0.86),
        trial(2, "search", 64, 4e-3, 1.02),
        trial(3, "search", 32, 4e-3, 1.18),
    ]
    fresh = [trial(4, "confirm", 64, 7e-3, 2.05), trial(5, "confirm", 32, 4e-3, 2.16)]
    by_all = {(64, 7e-3): 0.3, (64, 4e-3): 0.1, (32, 4e-3): 0.4, (32, 1e-3): 1.4}
    expected = {config_of(each): by_all[each.batch_size, each.learning_rate] for each in (*confirmed(), *search)}
    found, _ = recommend([*confirmed(), *search, *fresh], kind="time_to_target", goal="minimize", expected=expected)
    assert (found.global_batch_size, found.learning_rate) == (64, 7e-3)
    assert found.time_to_target_seconds.median == 2.05
    assert "leaving out what has run on no fresh seed, not confirmed: 1 fresh seed so far" in found.reason


def test_a_baseline_that_was_lost_before_it_could_say_what_it_is_voids_no_confirmation():
    lost = trial(0, "baseline", 32, 1e-3, None, state="fail").model_copy(update={"precision": "bf16"})
    trials = [lost, *confirmed(((32, 1e-3), (10, 11, 12)), ((64, 1e-2), (4, 5, 6)))]
    found, base = recommend(trials, kind="time_to_target", goal="minimize")
    assert (found.global_batch_size, base.global_batch_size) == (64, 32)
    assert found.speedup_over_baseline.low > 1


def test_runs_that_were_cut_off_or_lost_tell_nothing_of_a_fresh_seed():
    cut_off = trial(0, "confirm", 64, 1e-2, None, state="fail")
    told = [
        cut_off.tells_of_fresh_seed,
        cut_off.model_copy(update={"outcome": "oom"}).tells_of_fresh_seed,
        cut_off.model_copy(update={"outcome": "crash"}).tells_of_fresh_seed,
        trial(1, "confirm", 64, 1e-2, None, state="pruned").tells_of_fresh_seed,
        trial(2, "search", 64, 1e-2, 1.0).tells_of_fresh_seed,
    ]
    assert told == [False, False, True, True, False]

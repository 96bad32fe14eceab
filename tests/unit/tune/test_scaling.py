"""What several ranks would make of a study: how its batches split, and times from compute and communication."""

import math
from types import SimpleNamespace

import pytest

from batchtune.document import (
    DataParallel,
    Interval,
    ProbeResult,
    Recommendation,
    ThroughputFit,
    ThroughputPoint,
    Trial,
    config_of,
)
from batchtune.tune.scaling import scale, scaling, split
from batchtune.tune.verdict.scores import median_interval

ALPHA, BETA, LARGEST = 0.010, 0.001, 32
PROBE = ProbeResult(
    precision="fp32",
    max_batch_size=LARGEST,
    throughput=[ThroughputPoint(batch_size=32, samples_per_second=800.0, step_seconds=0.040)],
    throughput_fit=ThroughputFit(alpha_seconds=ALPHA, beta_seconds_per_sample=BETA),
)
FOUND = Recommendation(
    micro_batch_size=32,
    global_batch_size=32,
    learning_rate=0.1,
    precision="fp32",
    time_to_target_seconds=Interval(median=42.0, low=40.0, high=44.0),
    reason="fastest",
)


def ranks(communication=0.008, apart=0.03, alone=0.03, world_size=2):
    return DataParallel(
        world_size=world_size,
        strategy="ddp",
        backend="nccl",
        batch_size=16,
        global_batch_size=32,
        step_seconds=apart + (communication or 0.0),
        step_seconds_without_communication=apart,
        step_seconds_alone=alone,
        communication_seconds=communication,
    )


def ran(batch_size, seconds, *, rate=0.1, role="confirm", number=0):
    return Trial(
        number=number,
        state="complete",
        role=role,
        batch_size=batch_size,
        learning_rate=rate,
        precision="fp32",
        seed=number,
        time_to_target_seconds=seconds,
    )


TRIALS = [ran(32, seconds) for seconds in (40.0, 42.0, 44.0)]


def times(trials, measured, found=FOUND):
    points = scaling(trials, found, PROBE, measured).points
    return {point.world_size: point.time_to_target_seconds.median for point in points}


class TestSplit:
    def test_a_batch_is_shared_and_what_does_not_fit_accumulates(self):
        assert split(32, 4, 32) == (8, 1)
        assert split(256, 2, 32) == (32, 4)
        assert split(96, 2, 32) == (24, 2)

    def test_a_batch_that_does_not_divide_is_for_nobody(self):
        assert split(30, 4, 32) is None
        assert split(4, 8, 32) is None


class TestTimes:
    def test_one_rank_has_what_was_measured(self):
        first = scaling(TRIALS, FOUND, PROBE, ranks()).points[0]
        assert (first.world_size, first.is_estimate, first.time_to_target_seconds.median) == (1, False, 42.0)

    def test_the_same_steps_are_shorter_by_the_split_and_longer_by_communication(self):
        found = times(TRIALS, ranks())
        one = ALPHA + BETA * 32
        assert found[2] == pytest.approx(42 * (ALPHA + BETA * 16 + 0.008) / one)
        assert found[4] == pytest.approx(42 * (ALPHA + BETA * 8 + 0.008 * (3 / 4) / (1 / 2)) / one)
        assert found[8] == pytest.approx(42 * (ALPHA + BETA * 4 + 0.008 * (7 / 8) / (1 / 2)) / one)

    def test_communication_lost_in_the_noise_costs_nothing(self):
        assert times(TRIALS, ranks(None))[2] == pytest.approx(42 * (ALPHA + BETA * 16) / (ALPHA + BETA * 32))

    def test_ranks_that_slow_each_other_down_do_so_the_more_the_more_there_are(self):
        found = times(TRIALS, ranks(None, apart=0.06, alone=0.03))
        assert found[4] == pytest.approx(42 * 4 * (ALPHA + BETA * 8) / (ALPHA + BETA * 32))

    def test_another_batch_is_named_where_it_is_clearly_better_on_so_many_ranks(self):
        large = ran(256, 60.0, rate=0.4, role="search", number=9)  # on one rank slower than the recommended
        points = scaling([*TRIALS, large], FOUND, PROBE, ranks()).points
        assert [point.global_batch_size for point in points] == [32, 256, 256, 256]
        assert points[1].learning_rate == 0.4
        assert (points[1].micro_batch_size, points[1].gradient_accumulation_steps) == (32, 4)

    def test_a_little_better_is_no_reason_to_leave_the_recommended_batch(self):
        close = ran(32, 41.5, rate=0.2, role="search", number=9)
        points = scaling([*TRIALS, close], FOUND, PROBE, ranks()).points
        assert {point.learning_rate for point in points} == {0.1}

    def test_a_lucky_run_of_the_search_counts_with_what_all_runs_tell_of_it(self):
        lucky = ran(32, 30.0, rate=0.2, role="search", number=9)
        assert {point.learning_rate for point in scaling([*TRIALS, lucky], FOUND, PROBE, ranks()).points[1:]} == {0.2}
        logs = {config_of(TRIALS[0]): math.log(42.0), config_of(lucky): math.log(43.0)}
        told = scaling([*TRIALS, lucky], FOUND, PROBE, ranks(), logs).points
        assert {point.learning_rate for point in told} == {0.1}
        logs[config_of(lucky)] = math.log(21.0)
        better = scaling([*TRIALS, lucky], FOUND, PROBE, ranks(), logs).points[1]
        half = told[1].time_to_target_seconds.median / 2
        assert (better.learning_rate, better.time_to_target_seconds.median) == (0.2, pytest.approx(half))

    def test_what_came_to_nothing_on_fresh_seeds_is_not_named(self):
        once = [ran(256, 10.0, number=7), ran(256, None, number=8).model_copy(update={"state": "pruned"})]
        points = scaling([*TRIALS, *once, ran(256, 9.0, role="search", number=9)], FOUND, PROBE, ranks()).points
        assert {point.global_batch_size for point in points} == {32}

    def test_the_interval_is_widened_by_the_error_of_the_fit(self):
        second = scaling(TRIALS, FOUND, PROBE, ranks()).points[1]
        error = (ALPHA + BETA * 32) / 0.040 - 1
        ratio = second.time_to_target_seconds.median / 42
        seeds = median_interval([40.0, 42.0, 44.0])
        assert second.time_to_target_seconds.low == pytest.approx(seeds.low * ratio * (1 - error))
        assert second.time_to_target_seconds.high == pytest.approx(seeds.high * ratio * (1 + error))

    def test_a_world_size_that_no_batch_divides_by_is_left_out(self):
        found = FOUND.model_copy(update={"global_batch_size": 12, "micro_batch_size": 12})
        assert sorted(times([ran(12, 42.0)], ranks(), found)) == [1, 2, 4]

    def test_where_steps_were_timed_in_turn_ranks_are_set_against_what_runs_take_by_that(self):
        plan = SimpleNamespace(config=SimpleNamespace(world_size=2, ranks=SimpleNamespace(of_each=1)))
        study = SimpleNamespace(
            parts=SimpleNamespace(plan=plan, observer=None, cost=None),
            records=lambda: [ran(32, 2 * seconds) for seconds in (40.0, 42.0, 44.0)],  # others had the machine, too
            compared=lambda: TRIALS,
        )
        assert scale(study, None, PROBE, FOUND, scaling(TRIALS, FOUND, PROBE, ranks())) == scaling(
            TRIALS, FOUND, PROBE, ranks()
        )

    def test_without_a_time_to_target_there_is_nothing_to_say(self):
        found = FOUND.model_copy(update={"time_to_target_seconds": None})
        assert scaling(TRIALS, found, PROBE, ranks()) is None
        cut_off = Interval(median=42.0, low=40.0, high=44.0, at_least=True)
        assert scaling(TRIALS, FOUND.model_copy(update={"time_to_target_seconds": cut_off}), PROBE, ranks()) is None
        assert scaling(TRIALS, FOUND, PROBE.model_copy(update={"throughput_fit": None}), ranks()) is None

import law
import pytest
from documents import choice
from fakes import opened

from batchtune.config.schema import Config, Objective
from batchtune.config.space import LearningRate
from batchtune.document import CurvePoint, ProbeResult, Recommendation, Straggler, Trial
from batchtune.protocol.data import TrainingLength
from batchtune.tune.findings import (
    baseline_warnings,
    bound_warnings,
    default_warnings,
    precision_warnings,
    schedule_warnings,
    search_warnings,
    straggler_warnings,
    uneven_warnings,
)


def probe(largest, limited_by):
    return ProbeResult(precision="fp32", max_batch_size=largest, limited_by=limited_by)


def test_a_baseline_above_what_the_users_bounds_let_the_probe_try_was_accumulated():
    (told,) = baseline_warnings(probe(64, "max"), 256)
    assert "the baseline's batch 256 is above what batch_size allows (64 at once)" in told


def test_so_was_one_of_which_budget_run_has_no_time_for_as_many_steps_as_it_takes():
    (told,) = baseline_warnings(probe(64, "timeout"), 256)
    assert "the baseline's batch 256 is above what budget.run has time for (64 at once)" in told


@pytest.mark.parametrize(
    ("given", "says", "told"),
    [
        ({}, {}, "baseline.batch_size=32 and baseline.learning_rate=0.001 by default: set what you train with"),
        (
            {},
            {"batch_size": (24, "m.py:3"), "learning_rate": (5e-5, "m")},
            "baseline.batch_size=32 and baseline.learning_rate=0.001 by default, where the task says 24 in m.py:3 and",
        ),
        ({"batch_size": 8}, {"batch_size": (24, "m")}, "baseline.learning_rate=0.001 by default: set"),
        ({"learning_rate": 0.1}, {"batch_size": (32, "m")}, None),
        (
            {"learning_rate": 0.1},
            {"batch_size": (2**20, "m")},
            "baseline.batch_size=32 by default, where the task says 1048576",
        ),
        ({"batch_size": 8, "learning_rate": 0.1}, {"batch_size": (24, "m")}, None),
    ],
)
def test_a_baseline_that_nobody_gave_is_told_with_what_the_task_says(given, says, told):
    config = Config(task="model.py", baseline=given)
    found = default_warnings(config, opened(current_settings=says))
    assert [each.startswith(f"'today' is {told}") for each in found] == [True] * (told is not None)


@pytest.mark.parametrize(("largest", "limited_by"), [(64, "memory"), (256, "max"), (512, "max"), (None, None)])
def test_a_baseline_that_memory_or_nothing_split_needs_no_sentence(largest, limited_by):
    assert baseline_warnings(probe(largest, limited_by), 256) == []


@pytest.mark.parametrize(
    ("asked", "ran", "told"), [("auto", "bf16", True), ("auto", "fp32", False), ("bf16", "bf16", False)]
)
def test_a_precision_that_nobody_asked_for_is_told_where_today_may_be_another(asked, ran, told):
    config = Config(task="model.py", baseline={"batch_size": 8, "learning_rate": 0.1}, precision=asked)
    warned = precision_warnings(config, opened(precision=((ran, "a reason"),)))
    assert [each.rpartition(": ")[2] for each in warned] == (
        ["if you train in fp32, precision=[fp32,bf16] with --fresh compares with that"] * told
    )


@pytest.mark.parametrize(
    ("metric", "given", "told"),
    [
        ("val_loss", {}, False),
        ("char_error_rate", {}, False),
        ("val/rmse", {}, False),
        ("mae_val", {}, False),
        ("margin", {}, True),
        ("margin", {"goal": "minimize"}, False),
        ("accuracy", {"goal": "maximize"}, False),
    ],
)
def test_a_metric_of_which_nothing_says_that_less_is_better_is_told(metric, given, told):
    warned = [each.partition(":")[0] for each in Objective(metric=metric, **given).warnings()]
    assert warned == ["margin is minimized, since objective.goal is not set"] * told


@pytest.mark.parametrize(
    ("rates", "rate", "at"),
    [
        ({}, 0.96, "max"),
        ({"min": 1e-3, "max": 0.1}, 1.05e-3, "min"),
        ({"min": 1e-3, "max": 0.1}, 0.02, None),
        ({"max": 0.1}, 0.09, None),
        ({"min": 0.1, "max": 0.1}, 0.1, None),
    ],
)
def test_an_answer_at_the_end_of_what_was_searched_is_told(rates, rate, at):
    config = law.plan(learning_rate=LearningRate(**rates)).config
    found = Recommendation.model_validate(choice(64, rate, 1.0, "the best"))
    warned = [each.partition(", so ")[2] for each in bound_warnings(config, found)]
    assert warned == ([f"move learning_rate.{at} and start over with --fresh"] if at else [])


@pytest.mark.parametrize(
    ("scheduler", "samples", "told"),
    [("ReduceLROnPlateau", 900, True), ("ReduceLROnPlateau", 1000, False), ("StepLR", 900, False), (None, 900, False)],
)
def test_a_schedule_that_waits_for_an_epoch_which_no_run_came_to_the_end_of_is_told(scheduler, samples, told):
    task = opened(train_size=1005, optimizer_settings={"scheduler": scheduler})
    curve = [CurvePoint(seconds=1.0, samples=each, value=1.0) for each in (0, samples)]
    ran = trial("baseline", "finished").model_copy(update={"curve": curve})
    warned = [each.partition(":")[0] for each in schedule_warnings(task, [ran, trial("search", "oom")], 60.0)]
    words = "no run came to the end of an epoch (1,005 samples), where ReduceLROnPlateau changes the learning rate"
    assert warned == [words] * told


@pytest.mark.parametrize(
    ("steps", "samples", "told"),
    [
        (
            19_000,
            3_000,
            "19,000 optimizer steps of batch 8, and your training has 380: budget.run=1.2s budget.total=12s --fresh",
        ),
        (
            300,
            48_000,
            "300 optimizer steps of batch 8, and your training has 6,080: budget.run=1216s budget.total=12160s --fresh",
        ),
        (400, 3_000, None),
        (None, 3_000, None),
        (400, None, None),
    ],
)
def test_a_schedule_that_is_much_longer_or_shorter_than_that_of_the_users_training_is_told(steps, samples, told):
    curve = [CurvePoint(seconds=1.0, samples=8, value=1.0)]
    today = trial("baseline", "finished").model_copy(update={"curve": curve, "total_steps": steps})
    epochs = TrainingLength(epochs=samples / 300) if samples else TrainingLength()
    warned = schedule_warnings(opened(train_size=300, training_length=epochs), [today], 60.0)
    assert [told in each for each in warned] == [True] * (told is not None)


def trial(role, outcome):
    return Trial(
        number=0,
        state="complete",
        role=role,
        batch_size=8,
        learning_rate=0.1,
        precision="fp32",
        seed=0,
        outcome=outcome,
    )


def test_a_study_that_had_time_for_its_baseline_alone_says_so():
    (told,) = search_warnings([trial("baseline", "finished"), trial("search", None)], "12m")
    assert told.startswith("no other configuration was tried")
    assert told.endswith("start again with budget.total=12m")
    assert search_warnings([trial("baseline", "finished"), trial("search", "pruned")], "12m") == []


@pytest.mark.parametrize(
    ("outcome", "seconds", "told"), [("capped", 0.4, True), ("capped", 5.0, False), ("reached", 0.4, False)]
)
def test_so_does_one_whose_search_was_cut_off_before_it_had_trained_as_long_as_the_baseline(outcome, seconds, told):
    baseline = trial("baseline", "reached").model_copy(update={"time_to_target_seconds": 4.0})
    searched = trial("search", outcome).model_copy(update={"training_seconds": seconds})
    warned = search_warnings([baseline, searched], "12m")
    begun = "no other configuration trained as long as the fastest run to the target (4 s)"
    assert [each.partition(":")[0] for each in warned] == [begun] * told


def test_runs_in_which_the_task_raised_an_error_are_told_of():
    failed = trial("search", "user_error").model_copy(update={"message": "compute_loss raised AssertionError"})
    assert search_warnings([failed, trial("search", "reached")], "12m") == [
        "the task raised an error in 1 of 2 runs of the search, which tell nothing: compute_loss raised AssertionError"
    ]


def test_runs_that_took_much_longer_than_they_count_are_told_of():
    slowed = trial("confirm", "reached").model_copy(update={"training_seconds": 4.0, "measured_training_seconds": 7.0})
    (told,) = uneven_warnings([slowed], None)
    assert told.startswith("by the clock, training took 1.75 times as long as the times shown: ")
    a_little = slowed.model_copy(update={"measured_training_seconds": 4.4})
    assert uneven_warnings([a_little], None) == []
    assert uneven_warnings([slowed.model_copy(update={"role": "search"})], None) == []
    assert uneven_warnings([], None) == []


def test_a_rank_that_is_far_slower_than_the_others_in_most_runs_is_named():
    ran = trial("search", "reached").model_copy(update={"curve": [CurvePoint(seconds=0.0, samples=0, value=1.0)]})
    slow = ran.model_copy(update={"straggler": Straggler(rank=3, times=5.0)})
    (told,) = straggler_warnings([slow, slow, ran])
    assert told.startswith("rank 3 is 5 times as slow as the others, in 2 of 3 runs")
    other = ran.model_copy(update={"straggler": Straggler(rank=1, times=5.0)})
    for runs in ([], [ran, ran], [slow], [slow, slow, ran, ran], [slow, other]):
        assert straggler_warnings(runs) == []

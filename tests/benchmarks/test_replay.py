import math

import numpy as np
import pytest
import torch
from replay_curves import Record
from replay_record import Order, Stack, evaluation_steps, is_over
from replay_tasks import AUTOENCODER, CHARLM, CONTRASTIVE, DIGITS_CONV, DIGITS_SGD, GRU, VIT
from replay_tuners import TUNERS, batchtune_trials, plain_spec, run_to_end
from tune_replay import Repetition, judged, row, true_ratio

from batchtune.child.trainer import Trainer
from batchtune.task.contract import Task


@pytest.fixture(scope="module")
def record():
    return Record("digits_adam")


@pytest.fixture(scope="module")
def trials(record):
    return batchtune_trials(record, seed=0)[0]


def test_the_same_seed_gives_the_same_trials(record, trials):
    def what(trials):
        return [(t.role, t.batch_size, t.learning_rate, t.seed, t.outcome, t.training_seconds) for t in trials]

    assert what(batchtune_trials(record, seed=0)[0]) == what(trials)
    assert what(batchtune_trials(record, seed=1)[0]) != what(trials)


def test_a_study_ends_far_below_the_baseline_and_near_the_oracle(record):
    story = TUNERS["batchtune"](record, 0, math.inf)
    assert [run.what for run in story[:2]] == ["noise scale", "range test"]
    assert true_ratio(record, (story[0].batch_size, story[0].learning_rate)) > 10
    assert true_ratio(record, story[-1].answer) < 2


def test_a_trial_takes_what_the_record_says(record, trials):
    for trial in trials:
        if trial.role == "search" and trial.time_to_target_seconds is not None:
            recorded = record.seconds_to_target(trial.batch_size, trial.learning_rate, trial.seed)
            assert recorded <= trial.time_to_target_seconds + 1e-9
            assert trial.curve[-2].value > record.target >= trial.curve[-1].value  # seen at an evaluation


def test_between_two_learning_rates_a_run_takes_a_time_between_theirs(record):
    low, high = (record.seconds_to_target(64, 10**place, 3) for place in (-2.5, -2.25))
    assert high < record.seconds_to_target(64, 10**-2.4, 3) < low


def test_below_the_lowest_rate_time_is_in_proportion_to_it(record):
    lowest = float(record.rates[0])
    ratio = record.seconds_to_target(32, lowest / 4, 0) / record.seconds_to_target(32, lowest, 0)
    assert ratio == pytest.approx(4)


def test_a_run_at_too_high_a_rate_ends_at_the_longest_runs_end(record):
    outcome, seconds = run_to_end(record, 32, 1.0, seed=0)
    assert outcome in {"finished", "diverged"}
    assert seconds <= record.longest_run_seconds + record.step_seconds(32)
    assert plain_spec(record, 32, 1.0, 0).limit_seconds == record.longest_run_seconds


def test_no_configuration_of_the_grid_beats_the_oracle(record):
    seconds, batch_size, rate = record.oracle
    assert record.true_seconds(batch_size, rate) == seconds
    assert all(record.true_seconds(size, rate) >= seconds for size in record.batch_sizes)


def test_held_means_for_good(record):
    def spent(seconds, answer):
        story = TUNERS["lr_find, largest batch, linear scaling"](record, 0, 0.0)
        return type(story[0])("search", seconds * record.oracle[0], 32, 1e-3, answer)

    best, poor = record.oracle[1:], (32, 1e-3)
    run = judged(record, [spent(5, poor), spent(1, best), spent(1, poor), spent(2, best), spent(50, best)])
    assert run.held[1.25] == pytest.approx(9)
    assert run.cost == pytest.approx(59)
    assert judged(record, [spent(5, best), spent(1, poor)]).held[1.25] == math.inf
    assert "never" in row("any", [Repetition({1.25: math.inf, 1.10: math.inf}, 3.0, 3.0, 5.0, run.spent)])


@pytest.mark.parametrize(
    "task", [DIGITS_SGD, CHARLM, DIGITS_CONV, GRU, VIT, CONTRASTIVE, AUTOENCODER], ids=lambda task: task.name
)
def test_models_trained_side_by_side_are_those_that_batchtune_trains_alone(task):
    rates, seeds = torch.tensor([0.003, 0.03, 0.003]), torch.tensor([0, 0, 1])
    stack = Stack.of(task, rates, seeds)
    inputs, labels = task.train_dataset().tensors
    order = Order(len(inputs), 16, 2)
    alone = Trainer(Task(task, task.name), torch.device("cpu"), "fp32", learning_rate=0.03, seed=0)
    for _ in range(8):
        chosen = order.next()[stack.seeds]
        stack.step(inputs[chosen], labels[chosen])
        alone.step(iter([(inputs[chosen[1]], labels[chosen[1]])]))
    for name, value in alone.model.named_parameters():
        torch.testing.assert_close(stack.parameters[name][1], value, rtol=1e-3, atol=1e-5)
        assert not torch.equal(stack.parameters[name][0], stack.parameters[name][2])


def test_runs_that_leave_the_stack_do_not_disturb_those_that_stay():
    task = DIGITS_SGD
    inputs, labels = task.train_dataset().tensors

    def trained(leaving):
        stack, order = Stack.of(task, torch.tensor([0.01, 0.1]), torch.tensor([0, 1])), Order(len(inputs), 8, 2)
        for number in range(6):
            if leaving and number == 3:
                stack.keep(torch.tensor([False, True]))
            chosen = order.next()[stack.seeds]
            stack.step(inputs[chosen], labels[chosen])
        return stack.parameters["0.weight"][-1].detach()

    torch.testing.assert_close(trained(leaving=True), trained(leaving=False), rtol=1e-4, atol=1e-6)


def test_evaluations_are_seven_percent_apart_and_end_at_the_last_step():
    steps = evaluation_steps(500)
    assert steps[0] == 0
    assert steps[-1] == 500
    late = steps[steps > 50]
    assert np.all(late[1:] / late[:-1] < 1.09)


def test_a_run_is_over_at_its_target_when_it_diverges_and_when_it_has_settled():
    falling, there = np.linspace(2, 1.5, 40), np.linspace(2, 0.4, 40)
    diverged, settled = np.append(np.linspace(2, 1.9, 39), np.inf), np.full(40, 1.2)
    settled[0], settled[-2] = 2.0, 1.199
    over = is_over(np.stack([falling, there, diverged, settled]), step=400, target=0.5)
    assert over.tolist() == [False, True, True, True]

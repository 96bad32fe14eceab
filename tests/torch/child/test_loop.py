"""A training run against the clock; the clock is the test's own, and a sample takes 1/128 second: sums are exact."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from batchtune.child import trainer
from batchtune.child import training_run as loop
from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.training_run import EVALUATION_SHARE, next_evaluation, train
from batchtune.device import _base, host, nvml
from batchtune.errors import UserCodeError
from batchtune.protocol.commands import TimeInTurn
from batchtune.protocol.messages import RunSpec

SECONDS_PER_SAMPLE = 1 / 128
SHORT = 1 / 64


def spec_of(**changes: object) -> RunSpec:
    usual = {
        "micro_batch_size": 8,
        "accumulation_steps": 1,
        "learning_rate": 0.05,
        "precision": "fp32",
        "seed": 0,
        "metric": "val_loss",
        "goal": "minimize",
        "target": None,
        "limit_seconds": 10.0,
        "evaluate_every": 1.0,
        "evaluation_batch_size": 32,
    }
    return RunSpec(**usual | changes)


class Clock:
    """Stands still unless told to go on."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def perf_counter(self) -> float:
        return self.now


def plateau(optimizer, watched=None):
    """A schedule on a plateau; `watched` are the values that it is stepped with."""
    made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    if watched is not None:
        made.step = watched.append
    return made


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (loop, trainer, _base, nvml):
        monkeypatch.setattr(module, "time", clock)
    for module in (host, trainer):
        monkeypatch.setattr(module, "waited_seconds", lambda: clock.waited)
    return clock


@pytest.fixture
def run(clock, linear_task, fake_device):
    """Runs to the end: the points, and how it ended. Evaluating takes `evaluation_seconds`."""

    def to_the_end(
        spec,
        *,
        go_on=lambda _point: True,
        evaluation_seconds=0.125,
        slow=None,
        joules=lambda: None,
        ranks=ALONE,
        **functions,
    ):
        own_loss = functions.pop("compute_loss", linear_task().source.compute_loss)
        steps = itertools.count()

        def compute_loss(model, batch):
            if model.training:
                clock.now += len(batch[0]) * SECONDS_PER_SAMPLE * (slow(next(steps)) if slow else 1)
            else:
                clock.now += evaluation_seconds
            return own_loss(model, batch)

        task = linear_task(compute_loss=compute_loss, **functions)
        running, points = train(task, fake_device(), spec, joules, ranks), []
        try:
            points.append(next(running))
            while True:
                points.append(running.send(go_on(points[-1])))
        except StopIteration as end:
            return SimpleNamespace(points=points, outcome=end.value.outcome, end=end.value)

    return to_the_end


class TestInTurn:
    def test_runs_take_turns_so_that_a_slow_spell_hits_both(self, clock, linear_task, fake_device):
        own_loss, turns, began = linear_task().source.compute_loss, [], clock.now

        def compute_loss(model, batch):
            slow = 3.0 if clock.now - began > 5.0 else 1.0  # from then on
            clock.now += slow * len(batch[0]) * SECONDS_PER_SAMPLE
            turns.append(len(batch[0]))
            return own_loss(model, batch)

        specs = (spec_of(), spec_of(micro_batch_size=16), spec_of(accumulation_steps=4))
        command = TimeInTurn(specs=specs, seconds=20.0, stretch_seconds=0.5)
        rounds = loop.time_in_turn(linear_task(compute_loss=compute_loss), fake_device(), command)
        assert len(set(rounds[0]) | set(rounds[-1])) == 3 * 2  # quiet at first, slow at the end
        for each in (rounds[0], rounds[-1]):
            assert [each[1] / each[0], each[2] / each[0]] == [2.0, 4.0]
        assert 20.0 <= clock.now - began < 25.0
        assert [size for size, _ in itertools.groupby(turns[-60:])].count(16) >= 3

    def test_steps_that_take_longer_than_asked_are_still_timed_three_times(self, clock, linear_task, fake_device):
        own_loss = linear_task().source.compute_loss

        def compute_loss(model, batch):
            clock.now += 60.0
            return own_loss(model, batch)

        command = TimeInTurn(specs=(spec_of(), spec_of()), seconds=2.0, stretch_seconds=0.1)
        rounds = loop.time_in_turn(linear_task(compute_loss=compute_loss), fake_device(), command)
        assert rounds == ((60.0, 60.0),) * 3


class TestEndings:
    def test_a_run_without_a_target_trains_to_its_limit(self, run):
        done = run(spec_of(limit_seconds=5.0))
        assert done.outcome == "finished"
        assert [point.seconds for point in done.points] == [0, 1, 2, 3, 4, 5]

    def test_a_run_asks_whether_to_go_on_when_its_time_on_the_clock_is_over(self, run, clock):
        until = clock.now + 3.0
        spec = spec_of(limit_seconds=100.0, evaluate_every=50.0, wall_seconds=3.0)
        done = run(spec, go_on=lambda point: not point.seconds or clock.now < until)
        assert done.outcome == "pruned"
        assert until <= clock.now < until + 0.5

    def test_a_run_that_others_slow_down_asks_at_its_time_on_the_clock_all_the_same(self, run, clock):
        until = clock.now + 30.0
        spec = spec_of(limit_seconds=100.0, evaluate_every=50.0, wall_seconds=30.0)
        run(spec, go_on=lambda point: not point.seconds or clock.now < until, slow=lambda step: 20 if step > 10 else 1)
        assert clock.now < until + 2 * 20 * 16 * SECONDS_PER_SAMPLE  # two steps as they are now

    def test_a_run_ends_when_it_reaches_its_target(self, run):
        done = run(spec_of(target=0.5, limit_seconds=100.0))
        assert done.outcome == "reached"
        assert done.points[-1].value <= 0.5
        assert all(point.value > 0.5 for point in done.points[:-1])
        assert done.points[-1].seconds < 100

    def test_an_evaluation_whose_batch_does_not_fit_is_made_of_smaller_ones_from_then_on(self, run, linear_task):
        sizes = []

        def compute_loss(model, batch):
            if not model.training:
                sizes.append(len(batch[0]))
                if sizes[-1] > 8:
                    raise torch.OutOfMemoryError("no")
            return linear_task().source.compute_loss(model, batch)

        done = run(spec_of(limit_seconds=2.0), compute_loss=compute_loss)
        assert done.outcome == "finished"
        assert sizes == [32, 16, *[8] * 4 * len(done.points)]

    def test_a_metric_to_maximize_is_reached_from_below(self, run):
        scores = itertools.count()
        done = run(spec_of(goal="maximize", target=3.0, metric="score"), evaluate=lambda _model: float(next(scores)))
        assert (done.outcome, done.points[-1].value) == ("reached", 3.0)

    def test_a_target_met_before_training_is_reached_at_once(self, run):
        done = run(spec_of(target=1e9))
        assert (done.outcome, done.points[0].seconds, len(done.points)) == ("reached", 0.0, 1)

    def test_a_run_told_to_stop_is_pruned(self, run):
        done = run(spec_of(), go_on=lambda point: point.seconds < 2)
        assert (done.outcome, len(done.points)) == ("pruned", 3)

    def test_a_run_that_reaches_its_target_is_not_pruned_there(self, run):
        assert run(spec_of(target=1e9), go_on=lambda _point: False).outcome == "reached"

    def test_a_learning_rate_too_large_diverges_and_its_last_value_is_absent(self, run):
        done = run(spec_of(learning_rate=1e6, limit_seconds=100.0))
        assert (done.outcome, done.points[-1].value) == ("diverged", None)
        assert done.points[-1].seconds < 100

    def test_a_metric_that_is_no_number_has_diverged(self, run):
        done = run(spec_of(metric="x"), evaluate=lambda _model: float("nan"))
        assert (done.outcome, done.points[-1].value) == ("diverged", None)

    @pytest.mark.parametrize("value", [float("inf"), -float("inf")])
    def test_a_metric_that_is_infinite_has_diverged_and_reached_nothing(self, run, value):
        done = run(spec_of(metric="x", target=0.5, goal="minimize"), evaluate=lambda _model: value)
        assert (done.outcome, done.points[-1].value) == ("diverged", None)

    def test_a_metric_that_is_no_number_later_has_diverged_there(self, run):
        values = itertools.chain([1.0, 0.9], itertools.repeat(float("nan")))
        done = run(spec_of(metric="x"), evaluate=lambda _model: next(values))
        assert (done.outcome, [point.value for point in done.points]) == ("diverged", [1.0, 0.9, None])

    def test_a_loss_that_is_no_number_later_has_diverged_there(self, run, linear_task):
        plain, steps = linear_task().source.compute_loss, itertools.count()

        def broken(model, batch):
            return plain(model, batch) * (float("nan") if model.training and next(steps) > 40 else 1.0)

        done = run(spec_of(limit_seconds=100.0), compute_loss=broken)
        assert (done.outcome, done.points[-1].value) == ("diverged", None)
        assert done.points[-1].seconds < 10

    def test_a_metric_that_never_changes_neither_reaches_nor_diverges(self, run):
        done = run(spec_of(metric="x", target=0.5), evaluate=lambda _model: 1.0)
        assert (done.outcome, {point.value for point in done.points}) == ("finished", {1.0})

    @pytest.mark.parametrize("goal", ["minimize", "maximize"])
    def test_a_metric_too_large_to_add_up_is_no_error(self, run, goal):
        values = itertools.cycle([1.7e308, -1.7e308])
        done = run(spec_of(metric="x", goal=goal), evaluate=lambda _model: next(values))
        assert done.outcome in {"finished", "diverged"}

    def test_a_limit_shorter_than_one_step_gives_one_step(self, run):
        done = run(spec_of(limit_seconds=0.001))
        assert done.outcome == "finished"
        assert [point.samples for point in done.points] == [0, 8]

    def test_a_loss_that_is_no_number_before_any_weight_has_changed_is_the_users(self, run):
        with pytest.raises(UserCodeError, match="in the very first step, at batch size 8"):
            run(spec_of(), compute_loss=lambda model, batch: model(batch[0]).sum() * float("nan"))

    def test_a_run_that_is_worse_than_before_training_for_a_fifth_of_its_limit_has_diverged(self, run):
        values = itertools.chain([1.0, 0.5], itertools.count(2.0))
        done = run(spec_of(metric="x", limit_seconds=20.0), evaluate=lambda _model: next(values))
        assert (done.outcome, done.points[-1].seconds) == ("diverged", 6.0)

    def test_a_run_that_is_a_little_worse_than_before_training_has_not_diverged(self, run):
        values = itertools.chain([1.0], itertools.repeat(1.4))
        assert run(spec_of(metric="x", limit_seconds=20.0), evaluate=lambda _model: next(values)).outcome == "finished"

    def test_a_run_that_comes_back_from_above_its_start_goes_on(self, run):
        values = itertools.chain([1.0, 2.0, 3.0, 2.0], itertools.repeat(0.9))
        done = run(spec_of(metric="x", limit_seconds=20.0), evaluate=lambda _model: next(values))
        assert done.outcome == "finished"

    def test_a_run_that_comes_back_half_way_from_its_worst_has_as_long_again(self, run):
        """As a ResNet's validation loss, until the running statistics of its BatchNorm have followed."""
        values = itertools.chain([3.5, 15.6, 95.2, 76.5, 42.9, 30.1, 20.6, 14.3, 10.1], itertools.repeat(0.02))
        done = run(spec_of(metric="x", limit_seconds=20.0, target=0.035), evaluate=lambda _model: next(values))
        assert done.outcome == "reached"
        values = itertools.chain([3.5, 15.6, 95.2], itertools.repeat(60.0))
        done = run(spec_of(metric="x", limit_seconds=20.0, target=0.035), evaluate=lambda _model: next(values))
        assert (done.outcome, done.points[-1].seconds) == ("diverged", 5.0)

    def test_a_run_that_goes_up_and_down_far_above_its_start_comes_half_way_back_once(self, run):
        for growth in (1.0, 1.01, 1.5):
            values = itertools.chain(
                [3.5], (growth**look * (40.0 if look % 2 else 100.0) for look in itertools.count())
            )
            done = run(spec_of(metric="x", limit_seconds=20.0), evaluate=lambda _model: next(values))  # noqa: B023
            assert done.outcome == "diverged"
            assert done.points[-1].seconds <= 7.0

    def test_a_run_that_was_all_the_way_back_may_come_apart_again(self, run):
        values = itertools.chain([1.0, 50.0, 0.5], itertools.repeat(20.0))
        done = run(spec_of(metric="x", limit_seconds=20.0), evaluate=lambda _model: next(values))
        assert (done.outcome, done.points[-1].seconds) == ("diverged", 7.0)

    def test_a_metric_that_is_maximized_is_worse_where_it_is_less(self, run):
        values = itertools.chain([0.5, 0.9], itertools.repeat(0.1))
        spec = spec_of(metric="x", goal="maximize", target=0.95, limit_seconds=20.0)
        done = run(spec, evaluate=lambda _model: next(values))
        assert (done.outcome, done.points[-1].seconds) == ("diverged", 6.0)
        values = itertools.chain([0.5], itertools.repeat(0.8))
        assert run(spec, evaluate=lambda _model: next(values)).outcome == "finished"

    @pytest.mark.parametrize(
        ("goal", "target", "values", "outcome"),
        [
            ("maximize", 0.9, [-1e-4, -6e-4], "finished"),  # R²
            ("maximize", None, [0.0, -0.02], "finished"),
            ("minimize", -1.0, [0.0, 0.05], "finished"),  # a negative log-likelihood
            ("maximize", 0.9, [0.0, -3.0], "diverged"),
        ],
    )
    def test_a_score_of_about_nothing_before_training_may_be_a_little_worse(self, run, goal, target, values, outcome):
        seen = itertools.chain(values[:1], itertools.repeat(values[1]))
        spec = spec_of(metric="x", goal=goal, target=target, limit_seconds=20.0)
        assert run(spec, evaluate=lambda _model: next(seen)).outcome == outcome


@pytest.fixture
def meter(clock):
    """A device's energy counter: 10 W, whatever it does, and 3 J from before."""
    return lambda: 3.0 + 10.0 * clock.now


class TestEnergy:
    def test_only_training_is_counted(self, run, meter):
        done = run(spec_of(limit_seconds=3.0), evaluation_seconds=100.0, joules=meter)
        assert [point.joules for point in done.points] == [0, 10, 20, 30]

    def test_stretches_shorter_than_the_steps_of_a_counter_have_their_share_of_what_it_counts(self, run, clock):
        """10 W, told every tenth of a second as an H100 does, of stretches of 16 ms with evaluations of as long."""
        done = run(
            spec_of(limit_seconds=60 * SHORT, evaluate_every=SHORT, micro_batch_size=1),
            evaluation_seconds=SHORT,
            joules=lambda: 10.0 * (clock.now // 0.1 * 0.1),
        )
        found = [point.joules for point in done.points]
        assert len(found) == 61
        assert found == sorted(found)
        assert found[-1] == pytest.approx(600 * SHORT, rel=0.05)
        assert found[30] == pytest.approx(300 * SHORT, rel=0.1)

    def test_a_run_ends_at_its_limit_of_energy(self, run, meter):
        done = run(spec_of(limit_joules=20.0), joules=meter)
        assert (done.outcome, done.points[-1].joules) == ("finished", 20)

    def test_a_device_that_does_not_count_has_no_figure(self, run):
        assert {point.joules for point in run(spec_of(limit_joules=1.0)).points} == {None}


def dropping_out():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))


def adam(model, lr):
    return torch.optim.Adam(model.parameters(), lr=lr)


def cosine(optimizer, total_steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


class TestTime:
    def test_evaluation_is_not_counted(self, run, clock):
        done = run(spec_of(limit_seconds=5.0), evaluation_seconds=100.0)
        assert done.points[-1].seconds == 5.0
        assert clock.now > 500

    @pytest.mark.parametrize("each", [0.25, 2.0])
    def test_what_evaluating_took_is_told_apart(self, run, each):
        done = run(spec_of(limit_seconds=5.0), evaluation_seconds=each)
        assert done.end.evaluation_seconds == pytest.approx(each * len(done.points))  # of one batch each

    def test_the_samples_are_those_trained_on(self, run):
        done = run(spec_of(micro_batch_size=4, accumulation_steps=3))
        assert [point.samples * SECONDS_PER_SAMPLE for point in done.points] == [point.seconds for point in done.points]
        assert all(point.samples % 12 == 0 for point in done.points)

    def test_no_run_goes_far_beyond_its_limit(self, run):
        done = run(spec_of(limit_seconds=1.0, evaluate_every=0.3, micro_batch_size=64))
        assert 1.0 <= done.points[-1].seconds < 1.0 + 64 * SECONDS_PER_SAMPLE

    def test_a_step_held_up_by_the_machine_counts_at_the_usual_pace_and_the_measured_time_is_kept(self, run):
        done = run(spec_of(limit_seconds=5.0), slow=lambda step: 30 if step == 20 else 1)
        last = done.points[-1]
        assert last.seconds == pytest.approx(5.0, abs=0.2)
        assert last.measured_seconds > last.seconds + 1

    def test_other_programs_on_the_processors_change_nothing_but_the_measured_time(self, run, clock):
        def slow(step):
            clock.waited += 2 * 8 * SECONDS_PER_SAMPLE if step > 30 else 0.0
            return 3 if step > 30 else 1

        quiet, busy = (run(spec_of(limit_seconds=5.0), slow=each).points for each in (None, slow))
        assert [(point.samples, point.value) for point in quiet] == [(point.samples, point.value) for point in busy]
        assert busy[-1].seconds == quiet[-1].seconds
        assert busy[-1].measured_seconds > 2 * quiet[-1].seconds

    def test_what_a_loader_does_at_the_start_of_an_epoch_is_training_time(self, run, clock):
        def loader(size):
            clock.now += 2.0  # negatives are drawn anew
            return ((torch.ones(size, 4), torch.ones(size, 1)) for _ in range(32))

        done = run(spec_of(limit_seconds=12.0), train_loader=loader)
        epochs, steps = (done.points[-1].samples / 8 / each for each in (32, 1))
        assert done.points[-1].seconds == pytest.approx(2 * -(-epochs // 1) + steps * 8 * SECONDS_PER_SAMPLE)
        assert {point.measured_seconds for point in done.points} == {None}

    def test_undisturbed_runs_have_one_time_only(self, run):
        assert {point.measured_seconds for point in run(spec_of()).points} == {None}

    def test_the_scheduler_is_told_how_many_steps_there_will_be(self, run):
        horizons = []

        def build_scheduler(_optimizer, total_steps):
            horizons.append(total_steps)

        done = run(spec_of(limit_seconds=4.0), build_scheduler=build_scheduler)
        assert horizons == [4 * 128 / 8]
        assert done.end.total_steps == 4 * 128 / 8

    def test_a_run_that_is_to_end_soon_has_the_horizon_of_a_whole_one(self, run):
        horizons = []
        spec = spec_of(limit_seconds=1.0, horizon_seconds=4.0)
        run(spec, build_scheduler=lambda _optimizer, total_steps: horizons.append(total_steps))
        assert horizons == [4 * 128 / 8]

    def test_a_horizon_that_is_settled_does_not_depend_on_the_pace(self, run):
        horizons = []
        spec = spec_of(limit_seconds=1.0, horizon_seconds=4.0, total_steps=99)
        run(spec, build_scheduler=lambda _optimizer, total_steps: horizons.append(total_steps))
        assert horizons == [99]

    @pytest.mark.parametrize(("micro_batch_size", "accumulation_steps"), [(8, 1), (32, 1), (8, 4)])
    def test_a_schedule_on_a_plateau_goes_by_epochs_whatever_the_batch_size(
        self, run, micro_batch_size, accumulation_steps
    ):
        rates, spec = [], spec_of(limit_seconds=5.0, micro_batch_size=micro_batch_size, evaluate_every=100.0)

        def build_scheduler(optimizer, _total_steps):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
            optimizer.register_step_post_hook(lambda done, *_: rates.append(done.param_groups[0]["lr"]))
            return plateau

        own = {"build_scheduler": build_scheduler, "evaluate": lambda _model: 1.0}
        done = run(dataclasses.replace(spec, accumulation_steps=accumulation_steps), **own)
        samples = micro_batch_size * accumulation_steps
        assert [point.samples for point in done.points] == [0, 640]  # those of epochs are for the schedule alone
        assert rates.count(0.05) * samples == 3 * 64
        assert rates.count(0.05 * 0.1) * samples == 2 * 64

    def test_what_is_loaded_to_see_whether_an_epoch_is_over_is_training_time(self, run, clock):
        def loader(size):
            clock.now += 0.5
            for _ in range(32):
                clock.now += 0.125
                yield torch.ones(size, 4), torch.ones(size, 1)

        own = {"train_loader": loader, "evaluate": lambda _model: 1.0}
        own["build_scheduler"] = lambda optimizer, _steps: plateau(optimizer)
        done = run(spec_of(limit_seconds=12.0, evaluate_every=1.0), **own)
        batches = done.points[-1].samples / 8
        loaded = 0.5 * -(-(batches + 1) // 32) + 0.125 * (batches + 1)  # one is ahead
        assert done.points[0].seconds == 0
        assert done.points[-1].seconds == pytest.approx(loaded + batches * 8 * SECONDS_PER_SAMPLE)
        assert done.end.starting_seconds == pytest.approx(0.625 * -(-(batches + 1) // 32))

    def test_a_target_that_is_met_at_the_end_of_an_epoch_ends_the_run_there(self, run):
        values = iter([3.0, 2.0, 1.0])
        own = {"evaluate": lambda _model: next(values), "build_scheduler": lambda optimizer, _steps: plateau(optimizer)}
        done = run(spec_of(limit_seconds=5.0, evaluate_every=100.0, target=1.5), **own)
        assert done.outcome == "reached"
        assert [point.samples for point in done.points] == [0, 2 * 64]

    def test_points_of_the_curve_come_when_they_are_due_whatever_a_schedule_waits_for(self, run):
        own = {"evaluate": lambda _model: 1.0, "build_scheduler": lambda optimizer, _steps: plateau(optimizer)}
        done = run(spec_of(limit_seconds=5.0, evaluate_every=1.25), **own)
        assert [point.seconds for point in done.points] == [0, 1.25, 2.5, 3.75, 5]

    def test_an_epoch_is_over_once_it_is_for_all_ranks(self, run):
        class BesideLongerEpochs(Ranks):
            def together(self, how, value):
                return value * 2 // 3 if isinstance(value, int) and how == "min" else value

        own, watched = {"evaluate": lambda _model: 1.0}, []
        own["build_scheduler"] = lambda optimizer, _steps: plateau(optimizer, watched)
        run(spec_of(limit_seconds=5.0, evaluate_every=100.0), **own)
        alone, watched[:] = len(watched), []
        run(spec_of(limit_seconds=5.0, evaluate_every=100.0), ranks=BesideLongerEpochs(), **own)
        assert (alone, len(watched)) == (10, 6)

    def test_a_run_that_goes_on_beyond_its_horizon_leaves_the_scheduler_at_its_end(self, run):
        def one_cycle(optimizer, total_steps):
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps + 1)  # raises when stepped beyond

        done = run(spec_of(limit_seconds=3.0, horizon_seconds=1.0), build_scheduler=one_cycle)
        assert done.points[-1].seconds == 3.0

    def test_a_schedule_that_does_not_ask_for_its_steps_has_no_horizon(self, run):
        def exponential(optimizer, total_steps):
            del total_steps
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)

        def by_a_function(optimizer, total_steps):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)

        def by_whatever_it_is_given(*given):
            return cosine(*given)

        def steps(made):
            return run(spec_of(limit_seconds=1.0), build_scheduler=made).end.total_steps

        assert steps(exponential) is None
        assert steps(by_a_function) == steps(by_whatever_it_is_given) == steps(cosine) == 128 / 8

    def test_without_a_scheduler_there_is_no_horizon(self, run):
        assert run(spec_of(limit_seconds=1.0)).end.total_steps is None


class TestDeterminism:
    def test_the_same_seed_gives_the_same_values_at_the_same_samples(self, run):
        one, two = (run(spec_of(seed=7)).points for _ in range(2))
        assert one == two

    def test_another_seed_gives_others(self, run):
        one, two = (run(spec_of(seed=seed)).points for seed in (7, 8))
        assert [point.value for point in one] != [point.value for point in two]

    def test_looking_more_often_changes_nothing(self, run):
        def values(every, **functions):
            points = run(spec_of(evaluate_every=every), **functions).points
            return {point.samples: point.value for point in points}

        seldom, often = values(2.5), values(0.25)
        common = seldom.keys() & often.keys()
        assert len(common) == 5
        assert {samples: seldom[samples] for samples in common} == {samples: often[samples] for samples in common}

    def test_accumulation_trains_as_the_larger_batch_does(self, run):
        whole = run(spec_of(micro_batch_size=8)).points[-1]
        parts = run(spec_of(micro_batch_size=4, accumulation_steps=2)).points[-1]
        assert whole.samples == parts.samples
        assert parts.value == pytest.approx(whole.value, rel=1e-3, abs=1e-6)


class TestNextEvaluation:
    automatic = spec_of(evaluate_every=None, limit_seconds=100.0)

    def test_it_comes_at_the_pace_asked_for(self):
        assert next_evaluation(3.0, 50.0, spec_of(evaluate_every=2.0)) == 5.0

    def test_it_is_never_beyond_the_limit(self):
        assert next_evaluation(9.5, 0.1, spec_of(evaluate_every=2.0)) == 10.0
        assert next_evaluation(99.0, 50.0, self.automatic) == 100.0

    def test_it_keeps_the_same_relative_distance(self):
        assert next_evaluation(10.0, 1e-4, self.automatic) == pytest.approx(10.7)
        assert next_evaluation(50.0, 1e-4, self.automatic) == pytest.approx(53.5)

    def test_dear_evaluations_are_rare(self):
        due = next_evaluation(0.0, 1.5, self.automatic)
        assert 1.5 / (1.5 + due) == pytest.approx(EVALUATION_SHARE)

    def test_but_a_run_is_looked_at_twenty_times_however_dear_they_are(self):
        assert next_evaluation(0.0, 1000.0, self.automatic) == pytest.approx(5.0)

    def test_and_so_often_in_what_it_is_expected_to_need_however_long_it_may_train(self):
        due = next_evaluation(0.0, 1000.0, dataclasses.replace(self.automatic, expected_seconds=0.4))
        assert due == pytest.approx(0.02)
        assert next_evaluation(0.4, 1000.0, dataclasses.replace(self.automatic, expected_seconds=0.4)) >= 5.0


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [("minimize", 0.5, True), ("minimize", 0.6, False), ("maximize", 0.5, True), ("maximize", 0.4, False)]
    + [(goal, value, False) for goal in ("minimize", "maximize") for value in (float("nan"), float("inf"))],
)
def test_a_target_is_reached_on_its_side_and_by_numbers_only(goal, value, reached):
    assert spec_of(goal=goal, target=0.5).reached(value) == reached


def test_without_a_target_nothing_reaches_it():
    assert not spec_of(target=None).reached(-1e9)


def test_training_leaves_no_gradient_mode_behind(run):
    run(spec_of(limit_seconds=0.5))
    assert torch.is_grad_enabled()


def test_the_optimizer_that_an_argument_chose_is_named(run):
    def build_optimizer(model, lr, kind="sgd"):
        return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](model.parameters(), lr=lr)

    chosen = spec_of(limit_seconds=1.0, optimizer_arguments={"kind": "adam"})
    assert run(chosen, build_optimizer=build_optimizer).end.optimizer == "Adam"
    assert run(spec_of(limit_seconds=1.0), build_optimizer=build_optimizer).end.optimizer is None

"""How each tuner spends training seconds on a recorded task: batchtune's real study, and what people use today.

A tuner's story is the list of what it trained, in order: the seconds each run cost, and the configuration it would have
answered with after it.
"""

from __future__ import annotations

import math
import statistics
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from replay_curves import BASELINE_BATCH_SIZE, RANGE_TEST_RATES, SLOWER_BY_EACH, Load, Record
from replay_tasks import TASKS

from batchtune.child.before_study import Edge
from batchtune.child.timing import StepClock
from batchtune.config.probe import SECONDS_PER_POINT
from batchtune.config.schema import Baseline, Budget, Config, Objective
from batchtune.config.space import BatchSize, LearningRate
from batchtune.document import CurvePoint, LoaderPoint, ProbeResult, ThroughputPoint, Trial
from batchtune.observer import Observer
from batchtune.probe.timing.steps import fit_step_time, measure_curve, sizes_to_time
from batchtune.processes.pool import work_alone
from batchtune.protocol.commands import MeasureNoiseScale, Opened, RunRangeTest, TimeInTurn, TimeSteps, Train
from batchtune.protocol.messages import Command, RunEnd, RunSpec
from batchtune.tune.plan import measure_prior as tune_prepare
from batchtune.tune.plan.measure_prior import FORWARD_SHARE, SMALL_PER_LARGE, measure_prior
from batchtune.tune.plan.space import Plan
from batchtune.tune.study import trials as tune_workers
from batchtune.tune.study.phases import TuneStudy

LARGEST = 512  # the batch size that fits, by decree
MOST_TRIALS = 200  # of the other tuners
LOWEST_RATE, HIGHEST_RATE = 1e-5, 1.0  # batchtune's default; every tuner searches the same
NO_LIMIT_SECONDS = 1e9  # of budget.total: the study's own stop rule ends it
SEED_STRIDE = 1013  # between the seeds of two repetitions: no common factor with the number of recorded seeds
Configuration = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Spent:
    """One run of a tuner.

    Attributes:
        what: its role and outcome, for the account of where seconds went.
        seconds: training seconds it cost.
        batch_size, learning_rate: what it trained.
        answer: the configuration that the tuner would have given after it; None before it has one.
    """

    what: str
    seconds: float
    batch_size: int
    learning_rate: float
    answer: Configuration | None


Story = list[Spent]
Tuner = Callable[..., Story]  # of a record, a seed, the seconds to spend, and the programs that load the machine


class SimulatedClock:
    """Stands in for the `time` module: only training takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        """Lets so much time pass."""
        self.now += seconds


class OneWorker:
    """Stands in for a pool of workers: a fake one does all the work."""

    def __init__(self, worker: Any) -> None:
        self.first, self.lock = worker, threading.RLock()

    def __len__(self) -> int:
        return 1

    def warm_up(self) -> None:
        """It has nothing to start."""

    def work(self, step: Callable[[Any], bool]) -> None:
        """Calls `step` until it says that there is nothing more to do."""
        work_alone(self.first, step)

    def any_one(self, do: Callable[[Any], Any]) -> Any:
        """What the worker makes of it."""
        return do(self.first)


class ReplayWorker:
    """Stands in for the child process: answers from the record, on a clock that only training moves."""

    def __init__(self, record: Record, clock: SimulatedClock, seed: int, load: Load) -> None:
        self._record, self._clock, self._seed, self._load = record, clock, seed, load
        self.measured: list[tuple[str, float, int]] = []

    def call(self, command: Command[Any], *, timeout: float, on_event: Callable[[CurvePoint], bool] = bool) -> Any:
        before = self._clock.now
        match command:
            case Train():
                return self._train(command.spec, on_event)
            case TimeSteps():
                return self._time_steps(command)
            case TimeInTurn():
                return self._time_in_turn(command)
            case RunRangeTest():
                name, answer = "range test", self._range_test(**dict(command))
            case MeasureNoiseScale():
                name, answer = "noise scale", self._noise_scale(**dict(command))
            case _:  # loading is not recorded: the record's steps load their data
                return LoaderPoint(num_workers=0)
        answer["seconds"] = seconds = self._clock.now - before
        self.measured.append((name, seconds, answer.get("batch_size", BASELINE_BATCH_SIZE)))
        return command.read(answer)

    def _time_steps(self, command: TimeSteps) -> ThroughputPoint:
        quiet, began, times = self._record.step_seconds(command.batch_size), self._load.now, list[float]()
        while not times or self._load.now - began < command.seconds:
            times.append(self._load.take(quiet)[0])
        taken, slower = statistics.median(times), sum(times) / len(times) / quiet
        return ThroughputPoint(
            batch_size=command.batch_size,
            step_seconds=taken,
            samples_per_second=command.batch_size / taken,
            processors_used_by_others=min(1.0, max(0.0, (slower - 1) / SLOWER_BY_EACH / 2)),  # of two
        )

    def _time_in_turn(self, command: TimeInTurn) -> list[list[float]]:
        ends, rounds = self._load.now + command.seconds, list[list[float]]()
        while len(rounds) < 3 or self._load.now < ends:
            before = self._load.now
            rounds.append([self._stretch(spec.batch_size, command.stretch_seconds) for spec in command.specs])
            self._clock.now += self._load.now - before
        self.measured.append(("timed in turn", self._load.now - ends + command.seconds, command.specs[0].batch_size))
        return rounds

    def _stretch(self, batch_size: int, seconds: float) -> float:
        quiet = self._record.step_seconds(self._record.snapped(batch_size))
        steps = max(1, round(seconds / quiet))
        return StepClock().see(steps, *self._load.take(steps * quiet)) / steps

    def _train(self, spec: RunSpec, on_event: Callable[[CurvePoint], bool]) -> RunEnd:
        run = self._record.train(spec, self._load)
        before, point = 0.0, next(run)
        while True:
            self._clock.sleep(point.seconds - before)
            before = point.seconds
            try:
                point = run.send(on_event(point))
            except StopIteration as end:
                return RunEnd(end.value)

    def _range_test(
        self, batch_size: int, lowest_rate: float, highest_rate: float, steps: int, **_: Any
    ) -> dict[str, Any]:
        """The recorded one from the lowest rate on: what it did below that is little, and is not paid for."""
        edge, found, taken, rate = Edge(), None, 0, lowest_rate
        losses = self._record.range_test(self._record.snapped(batch_size), self._seed)
        for rate, loss in zip(RANGE_TEST_RATES, losses, strict=True):
            if not lowest_rate <= rate <= highest_rate or taken == steps:
                continue
            taken += 1
            self._clock.sleep(self._record.step_seconds(batch_size))
            if edge.is_past(float(loss), float(rate)):
                found = float(rate)
                break
        return {
            "batch_size": batch_size,
            "edge_learning_rate": found,
            "lowest_loss_learning_rate": edge.lowest_at,
            "highest_learning_rate": found or highest_rate,
            "steps": taken,
        }

    def _noise_scale(self, small: int, large: int, warm_up_steps: int, draws: int, **_: Any) -> dict[str, Any]:
        gradients = draws * (SMALL_PER_LARGE * self._record.step_seconds(small) + self._record.step_seconds(large))
        self._clock.sleep(warm_up_steps * self._record.step_seconds(small) + FORWARD_SHARE * gradients)
        return {"samples": self._record.noise_scale, "batch_sizes": [small, large], "draws": draws}


class Answers(Observer):
    """Notes what a study would answer after each of its trials."""

    def __init__(self) -> None:
        self.study: TuneStudy | None = None
        self.given: list[Configuration | None] = []

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        assert self.study is not None
        found, _ = self.study.recommendation()
        self.given.append((found.global_batch_size, found.learning_rate) if found else None)


def batchtune_story(record: Record, seed: int, budget_seconds: float, programs: int = 0) -> Story:
    """The real study: its measurements before it, sampler, pruner, caps, stop rule and confirmation."""
    trials, measured, answers = batchtune_trials(record, seed, programs)
    today = TASKS[record.name].baseline_rate
    story = [Spent(what, seconds, size, today, None) for what, seconds, size in measured]
    for trial, answer in zip(trials, answers, strict=True):
        what = trial.role if trial.role != "search" else f"search, {trial.outcome}"
        taken = trial.measured_training_seconds or trial.training_seconds or 0.0
        story.append(Spent(what, taken, trial.batch_size, trial.learning_rate, answer))
    return story


def batchtune_trials(
    record: Record, seed: int, programs: int = 0
) -> tuple[list[Trial], list[tuple[str, float, int]], list[Configuration | None]]:
    """The trials of a study of a recorded task on a simulated clock, what was measured before, and its answers.

    Args:
        record: the task.
        seed: of the repetition.
        programs: that load the machine; the step times are then measured under their load as well.
    """
    clock, answers = SimulatedClock(), Answers()
    worker = ReplayWorker(record, clock, SEED_STRIDE * seed, Load(programs, SEED_STRIDE * seed))
    with simulated_time(clock):
        plan = replayed_plan(record, seed, worker)
        pool: Any = OneWorker(worker)
        answers.study = TuneStudy(plan, pool, optuna.storages.InMemoryStorage(), answers, clock.perf_counter)
        answers.study.run()
    return answers.study.records(), worker.measured, answers.given


def replayed_plan(record: Record, seed: int, worker: Any) -> Plan:
    """What a study of a recorded task goes by; what is measured before it takes its time on the worker's clock."""
    task = TASKS[record.name]
    config = Config(
        task=record.name,
        name=record.name,
        baseline=Baseline(batch_size=BASELINE_BATCH_SIZE, learning_rate=task.baseline_rate),
        batch_size=BatchSize(min=8, max=LARGEST),
        learning_rate=LearningRate(min=LOWEST_RATE, max=HIGHEST_RATE),
        objective=Objective(target=record.target),
        budget=Budget(run=record.longest_run_seconds, total=NO_LIMIT_SECONDS),
        seed=SEED_STRIDE * seed,
    )
    probe = probed(worker)
    optimizer = task.optimizer.__name__ if isinstance(task.optimizer, type) else "SGD"
    opened = Opened.model_construct(device="cpu", train_size=None, optimizer=optimizer)
    prior = measure_prior(config, probe, opened, worker, Observer())
    return Plan(config=config, probe=probe, prior=prior, precisions=["fp32"])


def probed(worker: Any) -> ProbeResult:
    """What a probe says of a recorded task: its step times as the machine lets it measure them."""
    points: list[ThroughputPoint] = []
    command = TimeSteps(batch_size=LARGEST, precision="fp32", seconds=SECONDS_PER_POINT)
    measure_curve(worker, points, sizes_to_time(LARGEST), Observer(), command, timeout=math.inf)
    return ProbeResult(
        precision="fp32",
        max_batch_size=LARGEST,
        limited_by="max",
        throughput=points,
        throughput_fit=fit_step_time(points),
        seconds=0.0,
    )


class simulated_time:  # noqa: N801 - reads as a function
    """Within the block the clock of a study, and of other modules, is the simulated one."""

    def __init__(self, clock: SimulatedClock, *others: Any) -> None:
        self._clock, self._modules = clock, (tune_prepare, tune_workers, *others)

    def __enter__(self) -> None:
        for module in self._modules:
            module.time = self._clock

    def __exit__(self, *_: object) -> None:
        import time

        for module in self._modules:
            module.time = time


def space() -> dict[str, optuna.distributions.BaseDistribution]:
    """What the other tuners search: batch size as a whole number, since an order helps them more than categories."""
    return {
        "batch_size": IntDistribution(8, LARGEST, log=True),
        "learning_rate": FloatDistribution(LOWEST_RATE, HIGHEST_RATE, log=True),
    }


def plain_spec(record: Record, batch_size: int, rate: float, seed: int) -> RunSpec:
    """A run as anyone would do it: until the target or the longest run's end."""
    return RunSpec(
        micro_batch_size=batch_size,
        accumulation_steps=1,
        learning_rate=rate,
        precision="fp32",
        seed=seed,
        metric="val_loss",
        goal="minimize",
        target=record.target,
        limit_seconds=record.longest_run_seconds,
        evaluate_every=None,
        evaluation_batch_size=LARGEST,
    )


def run_to_end(
    record: Record,
    batch_size: int,
    rate: float,
    seed: int,
    go_on: Callable[[CurvePoint], bool] = lambda _: True,
    load: Load | None = None,
) -> tuple[str, float]:
    """Outcome and training seconds of a recorded run, as a clock on the wall has them."""
    run = record.train(plain_spec(record, batch_size, rate, seed), load)
    point = next(run)
    while True:
        try:
            point = run.send(point.value is None or go_on(point))
        except StopIteration as end:
            return end.value, point.measured_seconds or point.seconds


def optuna_tuner(
    make_sampler: Callable[[int], optuna.samplers.BaseSampler],
    make_pruner: Callable[[int], optuna.pruners.BasePruner] = lambda _: optuna.pruners.NopPruner(),
    *,
    by_time: bool = False,
) -> Tuner:
    """A study as in Optuna's documentation: the value is the seconds to the target, or the longest run's seconds.

    Args:
        make_sampler: of a seed.
        make_pruner: of the milliseconds of the longest run; asked at each evaluation.
        by_time: report at milliseconds of training; otherwise at optimizer steps, as everyone does.
    """

    def story(record: Record, seed: int, budget_seconds: float, programs: int = 0) -> Story:
        load = Load(programs, SEED_STRIDE * seed)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(
                sampler=make_sampler(SEED_STRIDE * seed), pruner=make_pruner(round(1000 * record.longest_run_seconds))
            )
            study.enqueue_trial(baseline_of(record))
            return list(spend(record, study, seed, budget_seconds, load, by_time=by_time))

    return story


def baseline_of(record: Record) -> dict[str, Any]:
    """What the user runs today; every tuner is told, and pays for its run."""
    return {"batch_size": BASELINE_BATCH_SIZE, "learning_rate": TASKS[record.name].baseline_rate}


def spend(
    record: Record, study: optuna.Study, seed: int, budget_seconds: float, load: Load, *, by_time: bool
) -> Iterator[Spent]:
    """Trials one after another until the budget is used up."""
    spent, best, answer = 0.0, math.inf, None
    for _ in range(MOST_TRIALS):
        if spent >= budget_seconds:
            return
        trial = study.ask(space())
        batch_size, rate = trial.params["batch_size"], trial.params["learning_rate"]
        last_step = -1

        def go_on(point: CurvePoint, trial: optuna.Trial = trial, batch_size: int = batch_size) -> bool:
            nonlocal last_step
            if not point.samples:
                return True  # nobody judges a model before its first step
            taken = point.measured_seconds or point.seconds
            step = round(taken * 1000) if by_time else point.samples // batch_size
            last_step = max(last_step + 1, step)
            trial.report(point.value or 0.0, last_step)
            return not trial.should_prune()

        outcome, seconds = run_to_end(record, batch_size, rate, SEED_STRIDE * seed + trial.number, go_on, load)
        if outcome == "pruned":
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, seconds if outcome == "reached" else record.longest_run_seconds)
        spent += seconds
        if outcome == "reached" and seconds < best:
            best, answer = seconds, (batch_size, rate)
        yield Spent(outcome, seconds, batch_size, rate, answer)


def ray_tuner(record: Record, seed: int) -> tuple[Any, Any]:
    """Ray Tune's own ASHAScheduler (reduction 4, grace 1 % of the longest run) and OptunaSearch."""
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    np.random.seed(seed)  # noqa: NPY002 - the scheduler draws brackets from it
    longest = record.longest_run_seconds
    scheduler = ASHAScheduler(
        time_attr="seconds",
        metric="val_loss",
        mode="min",
        max_t=longest,
        grace_period=longest / 100,
        reduction_factor=4,
    )
    search = OptunaSearch(
        space(), metric="score", mode="min", seed=SEED_STRIDE * seed, points_to_evaluate=[baseline_of(record)]
    )
    return scheduler, search


def asha_story(record: Record, seed: int, budget_seconds: float) -> Story:
    """Ray Tune's scheduler and search (see `ray_tuner`) without its actors."""
    from ray.tune.schedulers import TrialScheduler

    scheduler, search = ray_tuner(record, seed)
    longest, spent, best, answer, story = record.longest_run_seconds, 0.0, math.inf, None, []
    while spent < budget_seconds and len(story) < MOST_TRIALS:
        name = f"{len(story)}"
        chosen = search.suggest(name)
        trial = types.SimpleNamespace(trial_id=name)
        scheduler.on_trial_add(None, trial)

        def go_on(point: CurvePoint, trial: Any = trial) -> bool:
            if not point.samples:
                return True
            result = {"seconds": point.seconds, "val_loss": point.value}
            return scheduler.on_trial_result(None, trial, result) == TrialScheduler.CONTINUE

        seed_here = SEED_STRIDE * seed + len(story)
        outcome, seconds = run_to_end(record, chosen["batch_size"], chosen["learning_rate"], seed_here, go_on)
        # a trial that was stopped has not reached the target: to the search it is as slow as the longest run
        score = seconds if outcome == "reached" else longest
        search.on_trial_complete(name, {"score": score, "training_iteration": 1})
        spent += seconds
        if outcome == "reached" and seconds < best:
            best, answer = seconds, (chosen["batch_size"], chosen["learning_rate"])
        story.append(Spent(outcome, seconds, chosen["batch_size"], chosen["learning_rate"], answer))
    return story


def lr_find_story(record: Record, seed: int, budget_seconds: float) -> Story:
    """One range test at the baseline's batch size; where the smoothed loss falls steepest, scaled to the largest batch.

    The smoothing (0.98, bias-corrected), the skipped ends and the stop at 4 times the best loss are Lightning's.
    """
    losses = record.range_test(BASELINE_BATCH_SIZE, SEED_STRIDE * seed)
    rates, smooth, mean = np.geomspace(1e-6, 10, len(losses)), [], 0.0
    for number, loss in enumerate(losses, start=1):
        mean = 0.98 * mean + 0.02 * loss
        smooth.append(mean / (1 - 0.98**number))
        if not math.isfinite(loss) or (number > 1 and smooth[-1] > 4 * min(smooth)):
            break
    inner = np.array(smooth[10:-1])
    inner = inner[np.isfinite(inner)]
    rate = float(rates[10 + np.gradient(inner).argmin()]) * LARGEST / BASELINE_BATCH_SIZE
    cost = len(smooth) * record.step_seconds(BASELINE_BATCH_SIZE)
    outcome, seconds = run_to_end(record, LARGEST, rate, SEED_STRIDE * seed)
    answer = (LARGEST, rate)
    return [
        Spent("range test", cost, BASELINE_BATCH_SIZE, rate, answer),
        Spent(f"its result, {outcome}", seconds, LARGEST, rate, answer),
    ]


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def median(_: int) -> optuna.pruners.BasePruner:
    return optuna.pruners.MedianPruner()


def halving(longest: int) -> optuna.pruners.BasePruner:
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, longest // 64), reduction_factor=2)


def hyperband(longest: int) -> optuna.pruners.BasePruner:
    return optuna.pruners.HyperbandPruner(min_resource=max(1, longest // 81), max_resource=longest)


OURS, DEFAULTS = "batchtune", "Optuna defaults (TPE, MedianPruner by step)"
HALVING: dict[str, Tuner] = {
    "TPE, SuccessiveHalving (defaults) on time": optuna_tuner(
        tpe, lambda _: optuna.pruners.SuccessiveHalvingPruner(), by_time=True
    ),
    "TPE, SuccessiveHalving (factor 2) on time": optuna_tuner(tpe, halving, by_time=True),
    "TPE, Hyperband on time": optuna_tuner(tpe, hyperband, by_time=True),
    "Ray Tune: ASHA on time, OptunaSearch": asha_story,
}
TUNERS: dict[str, Tuner] = {
    OURS: batchtune_story,
    DEFAULTS: optuna_tuner(tpe, median),
    "TPE, MedianPruner on time": optuna_tuner(tpe, median, by_time=True),
    **HALVING,
    "GPSampler": optuna_tuner(lambda seed: optuna.samplers.GPSampler(seed=seed)),
    "random": optuna_tuner(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "lr_find, largest batch, linear scaling": lr_find_story,
}

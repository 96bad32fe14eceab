import law
import optuna
import pytest
from fakes import FakeCrew

from batchtune.config.schema import Baseline, Budget, Config, Confirm, Objective
from batchtune.document import ProbeResult, ThroughputFit
from batchtune.observer import Observer
from batchtune.tune.optuna_parts.sampler import TimeToTargetSampler
from batchtune.tune.optuna_parts.surface import SurfacePrior
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.prior import Candidates
from batchtune.tune.study.limits import Limits
from batchtune.tune.study.paused import MOST_KEPT
from batchtune.tune.study.study import TuneStudy


@pytest.fixture
def worker():
    return law.LawWorker()


@pytest.fixture
def storage():
    return optuna.storages.InMemoryStorage()


@pytest.fixture
def study(tmp_path, worker, storage):
    """A study after its baseline; what it is to run next is queued by the test."""
    fit = ThroughputFit(alpha_seconds=law.ALPHA, beta_seconds_per_sample=law.BETA, saturation_batch_size=20.0)
    plan = Plan(
        config=Config(
            task="model.py",
            name="law",
            baseline=Baseline(batch_size=64, learning_rate=0.02),
            budget=Budget(run=60.0, total=3600.0, trials=20),
            confirm=Confirm(seeds=0),
            objective=Objective(target=0.5),
        ),
        probe=ProbeResult(precision="fp32", max_batch_size=256, limited_by="memory", throughput_fit=fit, seconds=1.0),
        candidates=Candidates((8, 16, 32, 64, 128, 256, 512), "for the test"),
        precisions=["fp32"],
        optimizer="SGD",
        checkpoints=tmp_path / "checkpoints",
    )
    study = TuneStudy(plan, FakeCrew(worker), storage, Observer())
    study.queue.add(study.parts.space.baseline, "baseline", 0)
    study.queue.drain()
    return study


def run(study, batch_size, learning_rate):
    study.parts.study.enqueue_trial({"batch_size": batch_size, "learning_rate": learning_rate})
    study.queue.drain()
    return study.records()[-1]


def files(study):
    return sorted(file.name for file in study.trials.paused.folder.glob("*"))


def test_a_stopped_run_that_is_proposed_again_goes_on_where_it_was(study, worker):
    stopped = run(study, 8, 0.001)
    assert stopped.outcome == "pruned"
    assert files(study) == [f"{stopped.number}.pt"]
    gone_on = run(study, 8, 0.001)
    assert gone_on.continues == stopped.number
    assert gone_on.seed == stopped.seed
    assert gone_on.curve[: len(stopped.curve)] == stopped.curve
    seconds = [point.seconds for point in gone_on.curve]
    assert seconds == sorted(set(seconds))
    first, second = worker.specs[-2:]
    assert (first["resume"], second["resume"]) == (False, True)
    assert first["checkpoint"] == second["checkpoint"]


def test_who_goes_on_is_given_all_of_its_time_and_is_not_kept_again(study, worker):
    run(study, 8, 0.001)
    gone_on = run(study, 8, 0.001)
    assert gone_on.outcome == "capped"
    assert gone_on.training_seconds == pytest.approx(worker.specs[-1]["limit_seconds"])
    assert files(study) == []
    assert run(study, 8, 0.001).continues is None  # a new run


def test_a_run_that_goes_on_may_turn_out_to_reach_the_target(study, worker):
    stopped = run(study, 8, 0.001)
    worker.slower = lambda arguments: 0.02  # it had only been slow to start
    gone_on = run(study, 8, 0.001)
    assert gone_on.outcome == "reached"
    assert gone_on.time_to_target_seconds > stopped.training_seconds
    assert study.parts.study.trials[-1].value == gone_on.time_to_target_seconds


def test_only_the_runs_least_behind_are_kept(study):
    stopped = [run(study, 8, rate) for rate in (0.0001, 0.0002, 0.0004, 0.0006, 0.0008, 0.001)]
    assert all(each.outcome == "pruned" for each in stopped)
    assert files(study) == sorted(f"{each.number}.pt" for each in stopped[-MOST_KEPT:])


def test_runs_that_were_not_stopped_are_not_kept(study):
    assert run(study, 128, 0.02).outcome == "reached"
    assert files(study) == []


def test_a_run_going_on_when_it_was_killed_goes_on_from_its_checkpoint_again(study, worker, storage):
    stopped = run(study, 8, 0.001)
    worker.fail_at = {len(worker.specs) + 1}
    with pytest.raises(KeyboardInterrupt):
        run(study, 8, 0.001)
    again = TuneStudy(study.parts.plan, FakeCrew(worker), storage, Observer())
    again.queue.drain()
    assert again.records()[-1].continues == stopped.number


def sampled(*, resumable, within=None):
    """What the sampler proposes where the best place, as two runs around it tell, was stopped before its end."""
    space = {
        "batch_size": optuna.distributions.CategoricalDistribution((32, 64, 128)),
        "learning_rate": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True),
    }
    prior = SurfacePrior(
        saturation_batch_size=20.0,
        saturation_spread=0.3,
        anchor_batch_size=64,
        anchor_learning_rate=0.0217,
        spread=0.05,
    )
    study = optuna.create_study(sampler=TimeToTargetSampler(prior, seed=1, resumable=lambda: resumable, within=within))
    for rate, seconds in ((0.002, 80.0), (0.2, 80.0), (0.005, 30.0), (0.08, 30.0)):
        params = {"batch_size": 64, "learning_rate": rate}
        study.add_trial(optuna.trial.create_trial(value=seconds, params=params, distributions=space))
    stopped = {"batch_size": 64, "learning_rate": 0.0217}
    study.add_trial(
        optuna.trial.create_trial(
            state=optuna.trial.TrialState.PRUNED,
            user_attrs={"lower_bound": 2.0},
            params=stopped,
            distributions=space,
        )
    )
    return study.ask(space).params, stopped


def test_the_sampler_proposes_a_stopped_run_where_it_promises_most():
    params, stopped = sampled(resumable={4})
    assert params == stopped


def test_a_stopped_run_outside_of_what_may_be_proposed_does_not_go_on():
    params, _ = sampled(resumable={4}, within={"batch_size": optuna.distributions.CategoricalDistribution((32, 128))})
    assert params["batch_size"] in {32, 128}


def test_without_its_checkpoint_the_place_of_a_stopped_run_is_not_tried_again():
    params, stopped = sampled(resumable=())
    assert params != stopped


def test_what_a_stopped_run_reported_last_is_no_time_by_which_it_is_confirmed(study, worker):
    stopped = run(study, 8, 0.001)
    assert stopped.outcome == "pruned"
    gone_on = run(study, 8, 0.001)
    params = study.parts.space.of(gone_on)
    limits = Limits(study.parts.plan, study.parts.space, study.parts.history)
    assert limits.spec(params, "confirm", 0, 0.5).limit_seconds >= 60.0  # nothing says what it needs
    slow = run(study, 16, 0.02)
    assert slow.outcome == "reached"
    spec = limits.spec(study.parts.space.of(slow), "confirm", 0, 0.5)
    assert spec.limit_seconds == pytest.approx(min(120.0, 3 * slow.time_to_target_seconds))


def test_a_checkpoint_that_another_worker_is_writing_is_left_alone(study):
    running = study.parts.study.ask(study.parts.space.distributions)
    folder = study.trials.paused.folder
    folder.mkdir(exist_ok=True)
    for name in (f"{running.number}.partial", "999.partial", "999.pt"):
        (folder / name).touch()
    study.trials.paused.tidy()
    assert files(study) == [f"{running.number}.partial"]

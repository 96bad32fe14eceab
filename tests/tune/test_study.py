import law
import optuna
import pytest

from batchtune.config import Baseline, Budget, Config, Confirm, Objective
from batchtune.errors import NothingFitsError, UsageError
from batchtune.progress import Observer
from batchtune.results import ProbeResult, ThroughputFit
from batchtune.tune.prior import Candidates
from batchtune.tune.recommend import recommend
from batchtune.tune.storage import open_storage
from batchtune.tune.study import Plan, TuneStudy


def plan(**changes):
    known = {
        "task": "model.py",
        "name": "law",
        "baseline": Baseline(batch_size=16, learning_rate=1e-3),
        "budget": Budget(run=120.0, total=3600.0, trials=30),
        "confirm": Confirm(seeds=3, top=2),
    }
    fit = ThroughputFit(alpha_seconds=law.ALPHA, beta_seconds_per_sample=law.BETA, saturation_batch_size=20.0)
    return Plan(
        config=Config(**(known | changes)),
        probe=ProbeResult(precision="fp32", max_batch_size=256, limited_by="memory", throughput_fit=fit, seconds=1.0),
        candidates=Candidates((8, 16, 32, 64, 128, 256, 512), "for the test"),
        precisions=["fp32"],
        optimizer="SGD",
    )


def study(folder, worker=None, **changes):
    folder.mkdir(exist_ok=True)
    worker = worker or law.LawWorker(noise=0.05)
    return TuneStudy(plan(**changes), worker, open_storage(None, folder), Observer())


def test_a_study_finds_a_configuration_close_to_the_best_and_confirms_it(tmp_path):
    tuned = study(tmp_path)
    tuned.run()
    found, base = recommend(tuned.records(), kind="time_to_target", goal="minimize")
    assert found.speedup_over_baseline.low > 1
    best = min(law.seconds_to_target(b, law.best_rate(b)) for b in (8, 16, 32, 64, 128, 256, 512))
    assert law.seconds_to_target(found.global_batch_size, found.learning_rate) <= 1.25 * best
    assert base.global_batch_size == 16


def test_confirmation_runs_on_seeds_the_search_has_not_seen(tmp_path):
    tuned = study(tmp_path)
    tuned.run()
    seeds = {role: {trial.seed for trial in tuned.records() if trial.role == role} for role in ("search", "confirm")}
    assert len(seeds["confirm"]) == 3
    assert not seeds["search"] & seeds["confirm"]


def test_no_run_of_the_search_trains_longer_than_the_cap(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker)
    tuned.run()
    best, records = None, tuned.records()
    for record, spec in zip(records, worker.specs, strict=True):
        if record.role == "search" and best is not None:
            assert spec["limit_seconds"] <= 1.2 * best + 1e-9
        if record.role != "confirm" and record.time_to_target_seconds is not None:
            best = min(best or 1e9, record.time_to_target_seconds)


def test_the_same_seed_and_a_simulated_clock_give_the_same_trials(tmp_path):
    def params(folder):
        tuned = study(folder)
        tuned.run()
        return [(t.role, t.batch_size, t.learning_rate, t.seed, t.time_to_target_seconds) for t in tuned.records()]

    assert params(tmp_path / "a") == params(tmp_path / "b")


@pytest.mark.parametrize("interruption", [1, 2, 5, 12])
def test_an_interrupted_study_goes_on_and_repeats_no_completed_trial(tmp_path, interruption):
    broken = study(tmp_path, law.LawWorker(noise=0.05, fail_at=[interruption]))
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    before = [trial for trial in broken.records() if trial.state in {"complete", "pruned"}]
    resumed = study(tmp_path)
    resumed.run()
    after = {trial.number: trial for trial in resumed.records()}
    assert all(after[trial.number] == trial for trial in before)
    done = [
        (t.role, t.batch_size, t.learning_rate, t.seed) for t in after.values() if t.state in {"complete", "pruned"}
    ]
    assert len(done) == len(set(done))
    assert sum(1 for trial in after.values() if trial.role == "confirm" and trial.state == "complete") == 9


def test_a_finished_study_started_again_trains_nothing(tmp_path):
    first = study(tmp_path)
    first.run()
    worker = law.LawWorker()
    study(tmp_path, worker).run()
    assert worker.specs == []


def test_a_larger_budget_lets_the_search_go_on(tmp_path):
    study(tmp_path, budget=Budget(run=120.0, total=3600.0, trials=2)).run()
    worker = law.LawWorker()
    study(tmp_path, worker, budget=Budget(run=120.0, total=3600.0, trials=4)).run()
    assert len(worker.specs) >= 2


def test_batches_beyond_memory_are_accumulated(tmp_path):
    worker = law.LawWorker(noise=0.05)
    tuned = study(tmp_path, worker, baseline=Baseline(batch_size=512, learning_rate=1e-3))
    tuned.run()
    assert worker.specs[0]["micro_batch_size"] == 256
    assert worker.specs[0]["accumulation_steps"] == 2


def test_a_target_met_before_training_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="met before training"):
        study(tmp_path, objective=Objective(target=2.5)).run()


def test_a_baseline_that_never_improves_is_said_to_be_the_problem(tmp_path):
    with pytest.raises(NothingFitsError, match="did not improve val_loss"):
        study(tmp_path, baseline=Baseline(batch_size=16, learning_rate=0.9)).run()


def test_the_best_metric_within_a_budget_can_be_the_objective(tmp_path):
    tuned = study(tmp_path, objective=Objective(kind="best_metric"), budget=Budget(run=5.0, total=3600.0, trials=12))
    tuned.run()
    found, base = recommend(tuned.records(), kind="best_metric", goal="minimize")
    assert found.value.median < base.value.median
    assert found.time_to_target_seconds is None


def test_the_study_opens_as_any_optuna_study(tmp_path):
    study(tmp_path).run()
    opened = optuna.load_study(study_name="law", storage=open_storage(None, tmp_path))
    assert opened.best_value == min(trial.value for trial in opened.trials if trial.state.name == "COMPLETE")
    assert {"curve", "seed", "outcome", "role", "micro_batch_size"} <= opened.best_trial.user_attrs.keys()


@pytest.mark.parametrize("tail", [b'{"op_code": 4, "wor', b"\x00\xff garbage\n", b'{"half": \n'])
def test_a_journal_cut_off_in_its_last_line_is_mended(tmp_path, tail):
    study(tmp_path).run()
    journal = tmp_path / "study.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail)
    (tmp_path / "study.log.lock").symlink_to(journal)
    study(tmp_path)
    assert journal.read_bytes().startswith(whole)
    assert tail not in journal.read_bytes()


def test_a_study_of_time_leaves_a_landscape_of_all_its_runs(tmp_path):
    tuned = study(tmp_path)
    assert tuned.landscape() is None
    tuned.run()
    found = tuned.landscape()
    assert found.runs == len([trial for trial in tuned.records() if trial.state in {"complete", "pruned"}])
    assert found.batch_sizes == [8, 16, 32, 64, 128, 256, 512]
    assert study(tmp_path / "metric", objective=Objective(kind="best_metric")).landscape() is None

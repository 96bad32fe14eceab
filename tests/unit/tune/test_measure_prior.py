"""What is measured before the search, on a worker that answers what it is told to."""

import json
import math

import documents
import pytest
from fakes import FakeChild, opened

from batchtune.config.schema import Baseline, Budget, Config
from batchtune.document import ProbeResult, ThroughputFit, ThroughputPoint
from batchtune.errors import DeviceError, UsageError, UserCodeError
from batchtune.observer import Observer
from batchtune.processes.worker import WorkerDied
from batchtune.tune.findings import loading_warnings
from batchtune.tune.plan.configure import read_warm_start
from batchtune.tune.plan.measure_prior import PRIOR_SHARE, affordable_noise_scale, affordable_range_test, measure_prior
from batchtune.tune.plan.open_task import require
from batchtune.tune.plan.prior import with_loading
from batchtune.tune.study.search import FIRST_RUNS, RETREAT

ALPHA, BETA = 1e-3, 1e-4  # seconds
FACTS = {
    "device": "cpu",
    "train_size": 10_000,
    "optimizer": "SGD",
    "optimizer_defaults": {},
    "counts_energy": False,
    "environment": {"device": "a fake device"},
}


def probe(largest=1024):
    fit = ThroughputFit(alpha_seconds=ALPHA, beta_seconds_per_sample=BETA, saturation_batch_size=ALPHA / BETA)
    points = [
        ThroughputPoint(
            batch_size=size, step_seconds=ALPHA + BETA * size, samples_per_second=size / (ALPHA + BETA * size)
        )
        for size in (64, 128, 256, largest)
    ]
    return ProbeResult(
        precision="fp32", max_batch_size=largest, limited_by="memory", throughput=points, throughput_fit=fit
    )


class Answers(FakeChild):
    """Stands in for a child process."""

    def __init__(self, lowest=0.5, edge=1.0, noise=48.0, speeds=None, fails=(), dies_at=(), loads=None, losses=1):
        self.lowest, self.edge, self.noise, self.loads, self.losses = lowest, edge, noise, loads, losses
        self.speeds, self.fails, self.dies_at, self.asked = speeds or {}, fails, dies_at, []

    def answer(self, command, *, timeout, **given):
        self.asked.append((command, given))
        if command in self.fails:
            raise UserCodeError("compute_loss raised ValueError")
        if command == "range_test":
            rates = {"edge_learning_rate": self.edge, "highest_learning_rate": self.edge or given["highest_rate"]}
            rates |= {"lowest_loss_learning_rate": self.lowest, "losses": self.losses}
            return rates | {"batch_size": given["batch_size"], "steps": given["steps"], "seconds": 0.1}
        if command == "noise_scale":
            return {"samples": self.noise, "batch_sizes": [given["small"], given["large"]], "draws": 8, "seconds": 0.1}
        if command == "time_loader":
            return {"num_workers": 0, "samples_per_second": self.loads}
        assert command == "time_steps"
        if given["batch_size"] in self.dies_at:
            raise WorkerDied("crash", "the process died by SIGKILL")
        speed = self.speeds[given["batch_size"]]
        assert given["batch_size"] * given["accumulation_steps"] == 512
        return {"batch_size": given["batch_size"], "step_seconds": 512 / speed, "samples_per_second": speed}


def config(run=60.0, **changes):
    known = {"task": "model.py", "budget": Budget(run=run, total=10 * run)}
    return Config(**known | {"baseline": Baseline(batch_size=32, learning_rate=1e-3)} | changes)


def prepared(worker, *, run=60.0, facts=None, largest=1024, **changes):
    return measure_prior(config(run, **changes), probe(largest), opened(**FACTS | (facts or {})), worker, Observer())


def test_the_noise_scale_says_at_which_batch_size_to_start_and_the_range_test_at_which_rate():
    found = prepared(Answers(lowest=0.5, edge=1.0, noise=400.0))
    assert found.noise_scale.samples == 400
    assert found.start_batch_size == 64  # about the root of 400 samples and the saturation batch size, 10
    assert [test.batch_size for test in found.range_tests] == [64]
    assert found.learning_rate == pytest.approx(0.25)
    assert "at batch 64 loss was least at 0.5 and training diverged at 1;" in found.learning_rate_reason
    assert prepared(Answers(noise=6000.0)).start_batch_size == 256


def test_data_that_is_slow_to_load_makes_small_batches_worth_trying():
    at_once, slow = (prepared(Answers(noise=400.0, loads=loads), run=3600.0) for loads in (None, 500.0))
    assert at_once.loader_seconds_per_sample is None
    assert slow.loader_seconds_per_sample == 1 / 500
    assert (at_once.start_batch_size, slow.start_batch_size) == (64, 16)
    assert min(slow.batch_sizes) == 1 < min(at_once.batch_sizes)
    assert prepared(Answers(fails=["time_loader"])).loader_seconds_per_sample is None


@pytest.mark.parametrize(("device", "per_sample"), [("cpu", BETA + 1 / 500), ("cuda:0", 1 / 500)])
def test_a_step_on_loaded_data_takes_longer_and_a_gpu_works_meanwhile(device, per_sample):
    loaded = with_loading(probe(), 1 / 500, device).throughput_fit
    assert (loaded.alpha_seconds, loaded.beta_seconds_per_sample) == (ALPHA, pytest.approx(per_sample))
    assert loaded.saturation_batch_size == pytest.approx(ALPHA / per_sample)
    assert with_loading(probe(), None, "cpu") == probe()


def test_runs_that_mostly_wait_for_their_data_are_warned_of():
    def warned(loads):
        return loading_warnings(probe(), prepared(Answers(loads=loads), run=3600.0), "cpu")

    (told,) = warned(500.0)
    assert told.startswith("input-bound: loading data makes steps at batch 4 6.71 times as long (500 samples/s): ")
    assert warned(100_000.0) == warned(None) == []


def test_the_range_test_starts_at_the_baselines_rate_with_which_training_goes_well():
    worker = Answers()
    prepared(worker)
    (given,) = (given for command, given in worker.asked if command == "range_test")
    assert (given["lowest_rate"], given["highest_rate"]) == (1e-3, 1.0)
    assert given["steps"] == 3 * 14


def test_the_adam_family_has_a_rule_of_its_own_and_others_none():
    sgd = prepared(Answers())
    adam = prepared(Answers(), facts={"optimizer": "AdamW"})
    other = prepared(Answers(), facts={"optimizer": "Shampoo"})
    assert sgd.learning_rate == pytest.approx(0.5 / 2)
    assert adam.learning_rate == pytest.approx(0.5 / 3)
    assert adam.learning_rate_decades < 0.5 < other.learning_rate_decades == 1.0
    assert "little known about Shampoo" in other.learning_rate_reason


def test_several_optimizers_of_one_family_are_of_the_family_and_a_mix_is_of_none():
    reasons = {}
    for name in ("SGD", "2 x SGD", "Adam", "2 x Adam", "AdamW + Adam", "SGD + Adam", "Muon + AdamW"):
        found = prepared(Answers(), facts={"optimizer": name})
        reasons[name] = (round(found.learning_rate, 4), round(found.learning_rate_decades, 4))
    assert reasons["2 x SGD"] == reasons["SGD"]
    assert reasons["2 x Adam"] == reasons["AdamW + Adam"] == reasons["Adam"]
    assert {decades for _, decades in (reasons["SGD + Adam"], reasons["Muon + AdamW"])} == {1.0}


def test_a_test_without_an_edge_is_weighed_with_todays_rate_for_the_adam_family_only():
    met, adam = (prepared(Answers(edge=edge), facts={"optimizer": "AdamW"}) for edge in (1.0, None))
    assert 2e-3 < adam.learning_rate < met.learning_rate / 2
    assert met.learning_rate_decades < adam.learning_rate_decades < 0.6  # two beliefs are surer than either
    assert "weighed with twice today's 0.001, as no edge was met" in adam.learning_rate_reason
    assert prepared(Answers(edge=None)).learning_rate == prepared(Answers(edge=1.0)).learning_rate  # of SGD


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Shampoo"])
@pytest.mark.parametrize(("lowest", "edge"), [(0.61, 0.72), (0.61, None), (1e-3, 2e-3)])
def test_of_several_losses_the_test_is_a_hint_that_leaves_todays_rate_within_the_first_runs(optimizer, lowest, edge):
    answers, facts = {"lowest": lowest, "edge": edge}, {"optimizer": optimizer}
    one, two = (prepared(Answers(**answers, losses=losses), facts=facts) for losses in (1, 2))
    assert two.learning_rate / RETREAT ** (FIRST_RUNS - 1) < 2e-3  # twice today's
    assert abs(math.log10(two.learning_rate / 2e-3)) < 2 * two.learning_rate_decades
    assert two.learning_rate_decades > 0.5
    assert two.start_batch_size == one.start_batch_size
    assert "one of 2 losses was least at" in two.learning_rate_reason
    assert "weighed with twice today's 0.001, as losses with an optimizer each" in two.learning_rate_reason


def test_an_edge_beyond_the_rates_searched_is_a_weaker_hint():
    found = prepared(Answers(edge=None))
    assert "was stable up to 1;" in found.learning_rate_reason
    assert found.learning_rate_decades > prepared(Answers(edge=1.0)).learning_rate_decades


def test_without_a_range_test_there_is_the_baselines_rate_at_its_batch():
    found = prepared(Answers(), run=0.1)
    assert found.range_tests == []
    assert (found.start_batch_size, found.learning_rate) == (32, 2e-3)
    assert "more often too low than too high" in found.learning_rate_reason


@pytest.mark.parametrize("run", [5.0, 20.0, 60.0, 3600.0])
def test_what_is_measured_stays_a_small_share_of_the_longest_run(run):
    worker = Answers()
    found = prepared(worker, run=run)

    def step(size):
        return ALPHA + BETA * size

    seconds = 0.0
    for command, given in worker.asked:
        if command == "range_test":
            seconds += given["steps"] * step(given["batch_size"])
        if command == "noise_scale":
            gradients = given["draws"] * (4 * step(given["small"]) + step(given["large"]))
            seconds += given["warm_up_steps"] * step(given["small"]) + 0.9 * gradients
    assert seconds <= min(run, PRIOR_SHARE * 600)
    assert found.range_tests or "10% of budget.total, is for all of it" in found.learning_rate_reason


def test_what_takes_too_long_is_left_out_with_the_reason():
    small, large, draws, seconds = affordable_noise_scale(32, probe(), 10.0)
    assert (small, large) == (32, 256)
    assert affordable_noise_scale(32, probe(), seconds) == (32, 256, draws, seconds)
    assert "a noise scale at batch 32 and 256 would take about" in affordable_noise_scale(32, probe(), seconds / 2)
    assert affordable_range_test(256, (1e-3, 1.0), probe(), 10.0) == 42
    assert "42 steps of a range test at batch 256" in affordable_range_test(256, (1e-3, 1.0), probe(), 0.1)
    assert "must be accumulated" in affordable_range_test(2048, (1e-3, 1.0), probe(), 1000.0)


def test_a_batch_that_fills_the_memory_has_none_larger_to_be_compared_with():
    told = affordable_noise_scale(32, probe(100), 1000.0)
    assert told == "no noise scale, since 100, the largest batch to train at once, is not 4 of today's"


def test_code_that_cannot_bear_a_high_rate_costs_the_measurement_and_not_the_study():
    found = prepared(Answers(fails=["noise_scale"]))
    assert found.noise_scale is None
    assert found.start_batch_size == 32
    assert "not all was measured: compute_loss raised ValueError" in found.learning_rate_reason


def test_a_fixed_global_batch_is_split_as_trains_fastest():
    worker = Answers(speeds={512: 4000.0, 256: 4400.0, 128: 4100.0})
    found = prepared(worker, largest=512, batch_size={"global": 512}, baseline={})
    assert (found.batch_sizes, found.micro_batch_size) == ([512], 256)
    assert "4,400 samples/s as 256 × 2" in found.micro_batch_reason


def test_of_two_splits_as_fast_the_one_with_fewer_steps_is_taken():
    worker = Answers(speeds={512: 4400.0, 256: 4410.0, 128: 4100.0})
    assert prepared(worker, largest=512, batch_size={"global": 512}, baseline={}).micro_batch_size == 512


def test_a_split_that_dies_while_it_is_timed_is_not_chosen_and_does_not_end_the_study():
    speeds = {512: 4400.0, 256: 4300.0, 128: 4100.0}
    one = prepared(Answers(speeds=speeds, dies_at=[512]), largest=512, batch_size={"global": 512}, baseline={})
    assert one.micro_batch_size == 256
    none = prepared(Answers(dies_at=[512, 256, 128]), largest=512, batch_size={"global": 512}, baseline={})
    assert none.micro_batch_size == 512
    assert "none of its divisors could be timed" in none.micro_batch_reason


def test_a_fixed_global_batch_beyond_memory_is_accumulated():
    worker = Answers(speeds={64: 1000.0, 32: 900.0})
    assert prepared(worker, largest=100, batch_size={"global": 512}, baseline={}).micro_batch_size == 64


def test_energy_needs_a_device_that_counts_it():
    with pytest.raises(DeviceError, match=r"objective\.kind energy_to_target: a fake device has no energy counter"):
        require(config(objective={"kind": "energy_to_target"}), opened(**FACTS))
    require(config(objective={"kind": "energy_to_target"}), opened(**FACTS | {"counts_energy": True}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": {"batch_size": 64}}, "baseline.batch_size 64 is more than the 50 samples"),
        ({"batch_size": {"global": 64}, "baseline": {}}, "batch_size.global 64 is more than the 50 samples"),
        ({"batch_size": {"min": 60}}, "batch_size.min 60 is more than the 50 samples"),
        ({"batch_size": {"multiple_of": 64}}, "batch_size.multiple_of 64: 64, .* is more than the 50 samples"),
        (
            {"batch_size": {"min": 35, "multiple_of": 30}},
            "batch_size.multiple_of 30: 60, the least multiple from min 35",
        ),
    ],
)
def test_a_batch_larger_than_the_data_set_is_refused_by_its_key(changes, told):
    with pytest.raises(UsageError, match=told):
        require(config(**changes), opened(**FACTS | {"train_size": 50}))


def test_nothing_is_started_from_outside_of_the_users_bounds():
    worker = Answers(lowest=0.01, edge=None)
    found = prepared(worker, learning_rate={"min": 0.01, "max": 0.1}, batch_size={"min": 128, "max": 512})
    (given,) = (given for command, given in worker.asked if command == "range_test")
    assert (given["lowest_rate"], given["highest_rate"]) == (0.01, 0.1)
    assert given["batch_size"] == found.start_batch_size == 128
    assert found.batch_sizes == [128, 256, 512]
    assert found.learning_rate == 0.01
    assert "half of that is the usual best of SGD; kept within 0.01 to 0.1" in found.learning_rate_reason


def test_above_the_rates_searched_there_is_no_range_test_and_the_start_is_the_candidate_nearest_to_the_baseline():
    worker = Answers()
    bounds = {"learning_rate": {"min": 1e-6, "max": 1e-4}, "batch_size": {"min": 64, "max": 512}}
    found = prepared(worker, **bounds)
    assert "range_test" not in [command for command, _ in worker.asked]
    assert (found.start_batch_size, found.learning_rate) == (64, 1e-4)
    assert "no range test, since today's 0.001 is above 0.0001, the largest to search" in found.learning_rate_reason


class TestWarmStart:
    """A study that starts where an earlier one of the same task ended."""

    def earlier(self, tmp_path, *, task="model.py", **changes):
        """The run folder of an earlier study, and what a start from it is told."""
        (tmp_path / "earlier").mkdir()
        document = documents.tuned()
        document["task"]["path"] = str(tmp_path / task)
        (tmp_path / "earlier" / "result.json").write_text(json.dumps(document | changes))
        (tmp_path / "model.py").write_text("")
        return read_warm_start("earlier", config(task=str(tmp_path / "model.py")), tmp_path)

    def test_it_measures_nothing_that_is_known_and_believes_what_the_other_found(self, tmp_path):
        known, worker = self.earlier(tmp_path), Answers()
        facts = opened(**FACTS)
        prior = measure_prior(config(), probe(), facts, worker, Observer(), known)
        assert {command for command, _ in worker.asked} <= {"time_loader"}
        found = documents.tuned()["recommendation"]
        assert (prior.start_batch_size, prior.learning_rate) == (found["global_batch_size"], found["learning_rate"])
        assert prior.learning_rate_decades < prepared(Answers()).learning_rate_decades
        assert "study earlier ended" in prior.learning_rate_reason

    def test_a_study_of_another_task_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match=r"--warm-start earlier: that was a study of .*other\.py"):
            self.earlier(tmp_path, task="other.py")

    def test_a_study_without_a_recommendation_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="it holds no recommendation to start from"):
            self.earlier(tmp_path, recommendation=None)

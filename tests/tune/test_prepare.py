"""What is measured before the search, on a worker that answers what it is told to."""

import pytest

from batchtune.config import Baseline, Budget, Config
from batchtune.errors import DeviceError, UsageError, UserCodeError
from batchtune.progress import Observer
from batchtune.results import ProbeResult, ThroughputFit, ThroughputPoint
from batchtune.tune.prepare import PRIOR_SHARE, affordable, prepare, require

ALPHA, BETA = 1e-3, 1e-4  # seconds
FACTS = {
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


class Answers:
    """Stands in for a child process."""

    def __init__(self, edge=1.0, noise=48.0, speeds=None, fails=()):
        self.edge, self.noise, self.speeds, self.fails, self.asked = edge, noise, speeds or {}, fails, []

    def call(self, command, *, timeout, **given):
        self.asked.append((command, given))
        if command in self.fails:
            raise UserCodeError("compute_loss raised ValueError")
        if command == "range_test":
            rates = {"edge_learning_rate": self.edge, "highest_learning_rate": self.edge or given["highest_rate"]}
            return rates | {"batch_size": given["batch_size"], "steps": given["steps"], "seconds": 0.1}
        if command == "noise_scale":
            return {"samples": self.noise, "batch_sizes": [given["small"], given["large"]], "draws": 8, "seconds": 0.1}
        assert command == "time_steps"
        speed = self.speeds[given["batch_size"]]
        assert given["batch_size"] * given["accumulation_steps"] == 512
        return {"batch_size": given["batch_size"], "step_seconds": 512 / speed, "samples_per_second": speed}


def config(run=60.0, **changes):
    known = {"task": "model.py", "budget": Budget(run=run, total=600.0)}
    return Config(**known | {"baseline": Baseline(batch_size=32, learning_rate=1e-3)} | changes)


def prepared(worker, *, run=60.0, facts=None, largest=1024, **changes):
    return prepare(config(run, **changes), probe(largest), FACTS | (facts or {}), worker, Observer())


def test_edge_and_noise_scale_move_the_belief_and_are_told():
    found = prepared(Answers(edge=1.0, noise=48.0))
    assert [test.batch_size for test in found.range_tests] == [32, 512]
    assert found.noise_scale.samples == 48
    assert 2e-3 < found.learning_rate < 1 / (1 + 48 / 32)  # between today's, doubled, and the rule's
    assert "came apart at 1," in found.learning_rate_reason
    assert "noise scale of 48 samples points to 0.4" in found.learning_rate_reason
    assert prepared(Answers(edge=0.1, noise=48.0)).learning_rate < found.learning_rate


def test_hints_that_disagree_make_nobody_surer():
    agreeing, apart = prepared(Answers(edge=0.005, noise=48.0)), prepared(Answers(edge=10.0, noise=48.0))
    assert agreeing.learning_rate_decades < 0.5
    assert apart.learning_rate_decades > 0.9


def test_the_adam_family_has_a_rule_of_its_own_and_others_none():
    sgd = prepared(Answers())
    adam = prepared(Answers(), facts={"optimizer": "AdamW"})
    other = prepared(Answers(), facts={"optimizer": "Shampoo"})
    assert "points to 0.4" in sgd.learning_rate_reason
    assert "points to 0.21" in adam.learning_rate_reason  # 1 / 3 / sqrt(1 + 48 / 32)
    assert other.learning_rate == pytest.approx(2e-3)
    assert other.learning_rate_decades == 1.0
    assert "nothing more is known about Shampoo" in other.learning_rate_reason


def test_an_edge_beyond_the_rates_searched_is_a_weaker_hint():
    found = prepared(Answers(edge=None))
    assert "was stable up to 1," in found.learning_rate_reason
    assert found.learning_rate_decades > prepared(Answers(edge=1.0)).learning_rate_decades


def test_without_a_noise_scale_the_edge_counts_all_the_same():
    found = prepared(Answers(noise=None))
    assert "noise scale unknown points to 0.5" in found.learning_rate_reason


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
        else:
            gradients = given["draws"] * (4 * step(given["small"]) + step(given["large"]))
            seconds += given["warm_up_steps"] * step(given["small"]) + 0.9 * gradients
    assert seconds <= PRIOR_SHARE * run
    assert found.range_tests or "more than 10% of budget.run" in found.learning_rate_reason


def test_less_time_means_fewer_steps_or_sizes_nearer_to_each_other_and_then_none():
    plans = [affordable(32, probe(), seconds) for seconds in (10.0, 4.0, 2.5, 0.1)]
    assert plans[0] == (32, 512, 100)
    assert [isinstance(plan, tuple) for plan in plans] == [True, True, True, False]
    assert plans[1][1] * plans[1][2] > plans[2][1] * plans[2][2]
    assert plans[2][2] >= 60
    assert "steps at batch 32 and 128" in plans[3]


def test_a_batch_that_fills_the_memory_has_none_larger_to_be_compared_with():
    assert "no batch of 4 times the baseline's fits" in affordable(32, probe(100), 1000.0)


def test_code_that_cannot_bear_a_high_rate_costs_the_measurement_and_not_the_study():
    found = prepared(Answers(fails=["noise_scale"]))
    assert len(found.range_tests) == 2
    assert found.noise_scale is None
    assert "not all was measured: compute_loss raised ValueError" in found.learning_rate_reason


def test_a_fixed_global_batch_is_split_as_trains_fastest():
    worker = Answers(speeds={512: 4000.0, 256: 4400.0, 128: 4100.0})
    found = prepared(worker, largest=512, batch_size={"global": 512}, baseline={})
    assert (found.batch_sizes, found.micro_batch_size) == ([512], 256)
    assert "4400 samples/s as 256 x 2" in found.micro_batch_reason


def test_of_two_splits_as_fast_the_one_with_fewer_steps_is_taken():
    worker = Answers(speeds={512: 4400.0, 256: 4410.0, 128: 4100.0})
    assert prepared(worker, largest=512, batch_size={"global": 512}, baseline={}).micro_batch_size == 512


def test_a_fixed_global_batch_beyond_memory_is_accumulated():
    worker = Answers(speeds={64: 1000.0, 32: 900.0})
    assert prepared(worker, largest=100, batch_size={"global": 512}, baseline={}).micro_batch_size == 64


def test_energy_needs_a_device_that_counts_it():
    with pytest.raises(DeviceError, match=r"objective\.kind energy_to_target: a fake device has no energy counter"):
        require(config(objective={"kind": "energy_to_target"}), FACTS)
    require(config(objective={"kind": "energy_to_target"}), FACTS | {"counts_energy": True})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": {"batch_size": 64}}, "baseline.batch_size 64 is more than the 50 samples"),
        ({"batch_size": {"global": 64}, "baseline": {}}, "batch_size.global 64 is more than the 50 samples"),
    ],
)
def test_a_batch_larger_than_the_data_set_is_refused_by_its_key(changes, told):
    with pytest.raises(UsageError, match=told):
        require(config(**changes), FACTS | {"train_size": 50})

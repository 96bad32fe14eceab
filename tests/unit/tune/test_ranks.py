"""Studies whose runs train on several ranks: sizes are of all of them together, what each gets is their share."""

import dataclasses

import law
import optuna
import pytest
from fakes import FakeChild, FakeCrew, opened

from batchtune.config.ranks import Ranks
from batchtune.config.schema import Budget, Config, Confirm
from batchtune.document import ProbeResult, ThroughputFit
from batchtune.observer import Observer
from batchtune.processes.worker import WorkerDied
from batchtune.protocol.messages import pace_kind
from batchtune.tune.findings import baseline_warnings, loading_warnings
from batchtune.tune.plan.measure_prior import affordable_noise_scale, make_plan, measure_prior
from batchtune.tune.plan.prior import as_one_device, step_seconds
from batchtune.tune.plan.space import VARIANT, Space
from batchtune.tune.study.phases import TuneStudy
from batchtune.vocabulary import Variant

pytestmark = pytest.mark.usefixtures("few_particles")

ALPHA, BETA = 1e-3, 1e-4  # seconds, of one rank
LARGEST = 64
GROUP = opened(
    device="cpu", train_size=10_000, optimizer="SGD", world_size=4, strategy="ddp", backend="gloo", device_count=1
)


def probe(largest=LARGEST):
    """Of one rank, as probes of groups are."""
    fit = ThroughputFit(
        alpha_seconds=ALPHA,
        beta_seconds_per_sample=BETA,
        saturation_batch_size=ALPHA / BETA,
        batch_size_within_5_percent=32,
    )
    return ProbeResult(
        precision="fp32",
        max_batch_size=largest,
        limited_by="memory",
        throughput=law.timed({size: ALPHA + BETA * size for size in (8, 32, largest)}),
        throughput_fit=fit,
    )


class Answers(FakeChild):
    def __init__(self):
        self.asked = {}

    def answer(self, command, *, timeout, **given):
        self.asked.setdefault(command, []).append(given)
        if command == "range_test":
            rates = {"lowest_loss_learning_rate": 0.5, "highest_learning_rate": 1.0}
            return rates | {"batch_size": 4 * given["batch_size"], "steps": given["steps"], "seconds": 0.1}
        if command == "noise_scale":
            return {"samples": 400.0, "batch_sizes": [given["small"], 4 * given["large"]], "draws": 8, "seconds": 0.1}
        if command == "time_loader":
            return {"num_workers": 0, "samples_per_second": 1000.0}
        seconds = given["accumulation_steps"] * (ALPHA + BETA * given["batch_size"])
        speed = given["accumulation_steps"] * given["batch_size"] / seconds
        return {"batch_size": given["batch_size"], "step_seconds": seconds, "samples_per_second": speed}


def config(strategy="ddp", **changes):
    known = {"task": "model.py", "baseline": {"batch_size": 32}, "budget": {"run": 60, "total": 600}}
    return Config.model_validate(known | {"ranks": {"per_trial": 4, "strategy": strategy}} | changes)


def measured(strategy="ddp", **changes):
    worker = Answers()
    group = GROUP.model_copy(update={"strategy": strategy})
    return measure_prior(config(strategy, **changes), probe(), group, worker, Observer()), worker.asked


def test_a_group_is_like_one_device_that_takes_the_batches_of_all_its_ranks_at_once():
    one, group = probe(), as_one_device(probe(), 4)
    assert group.max_batch_size == 4 * LARGEST
    assert step_seconds(group.throughput_fit, 128) == pytest.approx(step_seconds(one.throughput_fit, 32))
    assert group.throughput_fit.saturation_batch_size == 4 * one.throughput_fit.saturation_batch_size
    speeds = [(each.batch_size, each.samples_per_second) for each in one.throughput]
    found = [(each.batch_size / 4, each.samples_per_second / 4) for each in group.throughput]
    assert found == speeds
    assert [each.step_seconds for each in group.throughput] == [each.step_seconds for each in one.throughput]
    assert as_one_device(one, 1) is one


def test_every_size_to_choose_from_can_be_split_and_each_rank_measures_its_share():
    found, asked = measured()
    assert all(size % 4 == 0 for size in found.batch_sizes)
    assert found.start_batch_size in found.batch_sizes
    assert asked["range_test"][0]["batch_size"] == found.start_batch_size // 4
    assert found.range_tests[0].batch_size == found.start_batch_size
    assert asked["time_loader"][0]["batch_size"] == 32 // 4


def test_the_noise_scale_takes_the_gradients_of_single_ranks_for_the_small_batch():
    _, asked = measured()
    (given,) = asked["noise_scale"]
    assert given["ranks_apart"]
    assert (4 * given["small"], 4 * given["large"], given["draws"]) == (32, 256, 6)


def test_shards_of_a_gradient_say_nothing_of_a_ranks_own_so_two_sizes_are_measured():
    _, asked = measured("fsdp")
    (given,) = asked["noise_scale"]
    assert not given["ranks_apart"]
    assert (4 * given["small"], 4 * given["large"]) == (32, 256)


def test_a_noise_scale_of_ranks_costs_less_than_one_of_two_sizes():
    group = as_one_device(probe(1024), 8)
    *_, two_sizes = affordable_noise_scale(32, group, 1000.0)
    small, large, draws, apart = affordable_noise_scale(32, group, 1000.0, ranks_apart=True)
    assert (small, large, draws) == (32, 256, 6)
    assert apart < two_sizes
    told = affordable_noise_scale(32, group, apart / 2, ranks_apart=True)
    assert "a noise scale of the ranks' gradients at batch 256 would take" in told
    assert affordable_noise_scale(8192, group, 1000.0, ranks_apart=True)[:3] == (8192, 8192, 20)  # no larger one needed


def test_a_fixed_batch_is_split_among_the_ranks_first():
    found, asked = measured(batch_size={"global": 512}, baseline={})
    assert {each["batch_size"] * each["accumulation_steps"] for each in asked["time_steps"]} == {128}
    assert found.micro_batch_size == 64
    assert "global batch 512 is kept; measured" in found.micro_batch_reason
    assert "as 64 × 2" in found.micro_batch_reason
    assert found.micro_batch_reason.endswith("on each of 4 ranks")


def test_warnings_are_of_the_group():
    assert baseline_warnings(as_one_device(probe().model_copy(update={"limited_by": "max"}), 4), 4 * LARGEST) == []
    found, _ = measured()
    loads = found.model_copy(update={"loader_seconds_per_sample": 0.1})
    assert "on each rank" in loading_warnings(probe(), loads, "cpu", 4)[0]


class Group(law.LawWorker):
    """Ranks that train as one device would with all their samples; each holds 64 samples, or fewer."""

    def __init__(self, world_size, holds=LARGEST):
        super().__init__(noise=0.05)
        self._world_size, self._holds, self.shares = world_size, holds, []

    def train(self, *, timeout, on_event, **spec):
        assert spec["world_size"] == self._world_size
        self.shares.append((spec["micro_batch_size"], spec["accumulation_steps"]))
        if spec["micro_batch_size"] > self._holds:
            raise WorkerDied("oom", "rank 1: out of memory", rank=1)
        together = spec | {"micro_batch_size": spec["micro_batch_size"] * self._world_size}
        return super().train(timeout=timeout, on_event=on_event, **together)


KEYS = {"budget": Budget(run=120.0, total=3600.0, trials=12), "confirm": Confirm(seeds=2, top=1)}


@pytest.fixture(scope="module")
def study():
    def study(worker, **changes):
        plan = law.plan(**KEYS, ranks=Ranks(per_trial=4, strategy="fsdp"))
        group = GROUP.model_copy(update={"strategy": "fsdp"})
        made = make_plan(plan.config, group, probe(), plan.prior)
        tuned = TuneStudy(
            dataclasses.replace(made, **changes), FakeCrew(worker), optuna.storages.InMemoryStorage(), Observer()
        )
        tuned.run()
        return tuned

    return study


@pytest.fixture(scope="module")
def finished(study):
    worker = Group(4)
    return study(worker), worker


@pytest.fixture(scope="module")
def chosen():
    """A study of both strategies, of which the second has room for half as much, and takes half as long."""

    class Both(Group):
        def train(self, *, variant, **spec):
            self.of[variant.strategy].append(spec["micro_batch_size"])
            self.slower = lambda _: 0.5 if variant.strategy == "fsdp" else 1.0
            return super().train(variant=variant, **spec)

    worker = Both(4)
    worker.of = {"ddp": [], "fsdp": []}
    plan = law.plan(**KEYS, ranks=Ranks(per_trial=4, strategy=["ddp", "fsdp"]))
    both = probe().model_copy(update={"other_variants": {"fsdp": LARGEST // 2}})
    made = make_plan(plan.config, GROUP, both, plan.prior)
    tuned = TuneStudy(made, FakeCrew(worker), optuna.storages.InMemoryStorage(), Observer())
    tuned.run()
    return tuned, worker


def test_a_strategy_is_searched_as_a_precision_is_and_the_first_is_the_baselines(chosen):
    tuned, worker = chosen
    records = tuned.records()
    assert {trial.strategy for trial in records if trial.role == "search"} == {"ddp", "fsdp"}
    assert {trial.strategy for trial in records if trial.role == "baseline"} == {"ddp"}
    assert max(worker.of["fsdp"]) <= LARGEST // 2
    whole = tuned.parts.space.baseline | {"batch_size": 4 * LARGEST}
    sizes = [tuned.parts.limits.spec(whole | {VARIANT: each}, "search", 0).micro_batch_size for each in ("ddp", "fsdp")]
    assert sizes[1] <= LARGEST // 2 < sizes[0] <= LARGEST
    found, baseline = tuned.recommendation()
    assert baseline.strategy == "ddp"
    ours = [trial for trial in records if trial.role == "confirm" and trial.strategy == found.strategy]
    assert {trial.batch_size for trial in ours} >= {found.global_batch_size}


def test_what_one_strategys_steps_take_and_need_tells_nothing_of_the_others(chosen):
    tuned, _ = chosen
    history = tuned.parts.history
    paces = {name: history.paces("fp32", pace_kind({}, Variant.named(name))) for name in ("ddp", "fsdp")}
    assert all(paces.values())
    for trial in tuned.records():
        steps = trial.gradient_accumulation_steps
        assert (trial.batch_size // steps, steps) in paces[trial.strategy]


def test_a_strategy_by_which_nothing_fits_is_not_searched():
    plan = law.plan(**KEYS, ranks=Ranks(per_trial=4, strategy=["ddp", "fsdp"]))
    none = probe().model_copy(update={"other_variants": {"fsdp": 0}})
    assert VARIANT not in Space(make_plan(plan.config, GROUP, none, plan.prior)).distributions


def test_each_run_says_how_many_ranks_trained_it_and_each_of_them_its_share(finished):
    tuned, worker = finished
    records = tuned.records()
    assert {(trial.world_size, trial.strategy) for trial in records} == {(4, "fsdp")}
    made = [trial.micro_batch_size * trial.gradient_accumulation_steps * 4 for trial in records]
    assert made == [trial.batch_size for trial in records]
    assert max(micro for micro, _ in worker.shares) <= LARGEST


def test_the_recommendation_says_so_too(finished):
    tuned, _ = finished
    for found in tuned.recommendation():
        assert (found.world_size, found.strategy) == (4, "fsdp")
        assert found.micro_batch_size * found.gradient_accumulation_steps * 4 == found.global_batch_size


def test_a_step_is_expected_to_take_as_long_as_steps_of_the_group_did(finished):
    tuned, worker = finished
    for (micro, steps), seconds in tuned.parts.history.paces("fp32").items():
        assert seconds == pytest.approx(law.ALPHA + law.BETA * micro * steps, rel=0.3)
        assert (micro // 4, steps) in worker.shares


def test_memory_that_a_rank_lacks_makes_its_micro_batches_smaller(study):
    tuned = study(Group(4, holds=16))
    failed = [trial for trial in tuned.records() if trial.outcome == "oom"]
    assert {trial.micro_batch_size for trial in failed} == {32}
    assert {trial.message for trial in failed} == {"rank 1: out of memory"}
    assert len(failed) < 3

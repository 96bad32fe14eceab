"""What runs are trained by, where that is searched: how ranks share the work, and what is computed again."""

import law
import optuna
import pytest
from fakes import FakeCrew
from pydantic import ValidationError

from batchtune.config.schema import BatchSize, Config
from batchtune.observer import Observer
from batchtune.tune.plan.configure import identity_of
from batchtune.tune.plan.space import VARIANT, Plan, Space
from batchtune.tune.study.phases import TuneStudy
from batchtune.vocabulary import Variant

AGAIN, KEPT = (Variant(activation_checkpointing=each) for each in (True, False))
BOTH = {"ranks": {"per_trial": 2, "strategy": ["ddp", "fsdp"]}, "activation_checkpointing": [False, True]}


def config(**keys):
    return Config.model_validate({"task": "model.py", **keys})


@pytest.mark.parametrize(
    ("keys", "variants"),
    [
        ({}, [Variant()]),
        ({"activation_checkpointing": True}, [AGAIN]),
        ({"activation_checkpointing": [True, False]}, [AGAIN, KEPT]),
        ({"ranks": {"per_trial": "auto"}}, [Variant()]),
        ({"ranks": {"per_trial": 2}}, [Variant("ddp")]),
        (BOTH, [Variant(how, again) for again in (False, True) for how in ("ddp", "fsdp")]),
    ],
)
def test_every_combination_is_a_variant_and_the_first_is_the_baselines(keys, variants):
    assert config(**keys).variants == variants
    assert [Variant.named(each.name) for each in variants] == variants
    assert len({each.name for each in variants}) == len(variants)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"activation_checkpointing": [True, True]}, "each of true and false once"),
        ({"activation_checkpointing": []}, "at least 1 item"),
        (
            {"activation_checkpointing": [False, True], "batch_size": BatchSize(unit="tokens")},
            "true or false alone with batch_size.unit tokens",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(keys, told):
    with pytest.raises(ValidationError, match=told):
        config(**keys)


def test_a_study_keeps_to_what_it_was_begun_with(tmp_path):
    key, task = "activation_checkpointing", tmp_path / "model.py"
    task.touch()
    assert identity_of(Config(task=str(task)))[key] is None
    assert identity_of(Config(task=str(task), activation_checkpointing=True))[key] is True


def planned(others, **keys):
    plan = law.plan(activation_checkpointing=[False, True], **keys)
    return Plan(
        config=plan.config,
        probe=plan.probe.model_copy(update={"max_batch_size": 32, "other_variants": others}),
        prior=plan.prior,
        precisions=plan.precisions,
    )


def test_only_what_fits_is_searched():
    assert VARIANT not in Space(planned({AGAIN.name: 0})).distributions
    found = Space(planned({AGAIN.name: 128}))
    assert found.distributions[VARIANT].choices == (KEPT.name, AGAIN.name)
    assert found.baseline[VARIANT] == KEPT.name


def test_of_combinations_only_those_that_fit_are_searched():
    first, *others = config(**BOTH).variants
    made = law.plan().probe.model_copy(
        update={"other_variants": {each.name: number for number, each in enumerate(others)}}
    )
    plan = Plan(config=config(**BOTH), probe=made, prior=law.plan().prior, precisions=["fp32"])
    assert plan.variants == [first, *others[1:]]
    assert [plan.max_batch_size(each) for each in others[1:]] == [1, 2]


@pytest.fixture(scope="module")
def study():
    """Of both, the second of which has room for four times as much and takes a third longer."""

    class Again(law.LawWorker):
        def train(self, *, variant, **spec):
            self.of.setdefault(variant, set()).add((spec["micro_batch_size"], spec["accumulation_steps"]))
            self.slower = lambda _: 1.33 if variant == AGAIN else 1.0
            return super().train(variant=variant, **spec)

    worker = Again()
    worker.of = {}
    keys = {"budget": law.Budget(run=120.0, total=3600.0, trials=16), "confirm": law.Confirm(seeds=2, top=1)}
    tuned = TuneStudy(
        planned({AGAIN.name: 128}, **keys), FakeCrew(worker), optuna.storages.InMemoryStorage(), Observer()
    )
    tuned.run()
    return tuned, worker


def test_each_run_is_of_batches_that_fit_as_it_is_trained(study):
    tuned, worker = study
    assert max(micro for micro, _ in worker.of[KEPT]) <= 32 < max(micro for micro, _ in worker.of[AGAIN]) <= 128
    records = tuned.records()
    assert {trial.activation_checkpointing for trial in records if trial.role == "search"} == {False, True}
    assert {trial.activation_checkpointing for trial in records if trial.role == "baseline"} == {False}
    assert {trial.strategy for trial in records} == {None}
    found, baseline = tuned.recommendation()
    assert baseline.activation_checkpointing is False
    assert found.activation_checkpointing in {True, False}


def test_a_fixed_batch_is_made_up_as_it_was_timed_only_for_what_was_timed(study):
    tuned, _ = study
    plan = tuned.parts.plan
    fixed = Plan(
        config=plan.config,
        probe=plan.probe,
        prior=plan.prior.model_copy(update={"micro_batch_size": 16}),
        precisions=plan.precisions,
    )
    assert (fixed.micro_batch_size(KEPT), fixed.micro_batch_size(AGAIN)) == (16, None)

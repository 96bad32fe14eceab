"""Activation checkpointing that a study chooses, on cards: each way has a largest batch of its own."""

import fake_gpu
import pytest
from fixtures.checkpointing import DEEP

import batchtune

AGAIN = "activation checkpointing"
STUDY = """
task: deep.py
device: cuda
precision: fp32
activation_checkpointing: [false, true]
baseline: {batch_size: 8, learning_rate: 1e-3}
batch_size: {multiple_of: 8}
objective: {kind: best_metric}
budget: {run: 500ms, total: 5m, trials: 4}
confirm: off
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "deep.py").write_text(DEEP + "\nLENGTH = 256\n")
    (tmp_path / "config.yaml").write_text(STUDY)
    return tmp_path


@pytest.fixture
def cards():
    with fake_gpu.machine(*[fake_gpu.Card("192MiB", context_bytes="32MiB")] * 2) as machine:
        yield machine.cards
        assert [card.used for card in machine.cards] == [0, 0]


def tuned(folder, *overrides):
    return batchtune.tune(folder / "config.yaml", overrides=list(overrides), run_folders=folder / "runs")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cards")
def test_the_largest_batch_with_it_is_larger_and_runs_go_up_to_there(folder):
    found = tuned(folder, "budget.trials=6")
    ((name, largest),) = found.probe.other_variants.items()
    assert (name, found.probe.limited_by) == (AGAIN, "memory")
    assert largest > 2 * found.probe.max_batch_size
    micro = {
        again: max(each.micro_batch_size for each in found.trials if each.activation_checkpointing == again)
        for again in (False, True)
    }
    assert micro[False] <= found.probe.max_batch_size
    assert micro[True] <= largest
    assert not [each.message for each in found.trials if each.outcome in {"oom", "crash"}]
    assert found.recommendation.activation_checkpointing in {False, True}


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("cards")
def test_ranks_choose_it_with_their_strategy(folder):
    found = tuned(folder, "ranks.per_trial=2", "ranks.strategy=[ddp, fsdp]", "baseline.batch_size=64")
    others = found.probe.other_variants
    assert list(others) == ["fsdp, no activation checkpointing", f"ddp, {AGAIN}", f"fsdp, {AGAIN}"]
    kept = {"ddp": found.probe.max_batch_size, "fsdp": others["fsdp, no activation checkpointing"]}
    assert all(others[f"{strategy}, {AGAIN}"] > 2 * size for strategy, size in kept.items())
    assert {trial.world_size for trial in found.trials} == {2}

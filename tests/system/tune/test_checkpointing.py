"""Activation checkpointing that a study chooses, with real training: alone and by ranks."""

import json

import pytest
from fixtures.checkpointing import DEEP

STUDY = """\
task: deep.py
device: cpu
precision: fp32
memory: {limit: 160MiB}
activation_checkpointing: [false, true]
baseline: {batch_size: 8, learning_rate: 1e-2}
batch_size: {multiple_of: 4}
objective: {kind: best_metric}
budget: {run: 1s, total: 2m, trials: 4}
confirm: {seeds: 1, top: 1}
"""
AGAIN = "activation checkpointing"


@pytest.fixture
def deep_cli(new_quick_cli):
    cli = new_quick_cli()
    cli.write("deep.py", DEEP + "\nLENGTH = 256\n")
    cli.write("config.yaml", STUDY)
    return cli


@pytest.mark.timeout(400)
def test_each_has_a_largest_batch_of_its_own_and_the_answer_says_which(deep_cli):
    deep_cli.write("deep.py", DEEP + "\nLENGTH = 128\n")
    done = deep_cli("tune", "config.yaml", "memory.limit=122MiB", "--json", "-v")
    assert done.code == 0, done.err
    found = done.document
    probe, ran = found["probe"], [each for each in found["trials"] if each["state"] in {"complete", "pruned"}]
    ((name, largest),) = probe["other_variants"].items()
    assert name == AGAIN
    assert largest > 1.5 * probe["max_batch_size"]
    roles = {(each["role"], each["activation_checkpointing"]) for each in ran}
    assert {("baseline", False), ("search", True)} <= roles
    kept = [each["micro_batch_size"] for each in ran if not each["activation_checkpointing"]]
    again = [each["micro_batch_size"] for each in ran if each["activation_checkpointing"]]
    assert max(kept) <= probe["max_batch_size"]
    assert max(again) <= largest
    answer = found["recommendation"]
    chosen = answer["activation_checkpointing"]
    attempts = [json.loads(line) for line in (deep_cli.run_folder() / "attempts.jsonl").read_text().splitlines()]
    assert {each.get("variant") for each in attempts} == {None, AGAIN}
    for written, told in (
        (("-v",), f"activation checkpointing  {'on' if chosen else 'off'}"),
        (("--format", "env"), f"ACTIVATION_CHECKPOINTING={int(chosen)}"),
        (("--format", "hf"), f'"gradient_checkpointing": {str(chosen).lower()}'),
        (("--format", "markdown"), "activation checkpointing"),
        (("--format", "html"), f"activation_checkpointing = {chosen}"),
    ):
        assert told in deep_cli("report", "config", *written).out


@pytest.mark.long  # tests/cuda/test_checkpointing.py has ranks choose it on simulated cards
@pytest.mark.timeout(400)
def test_ranks_choose_it_too(deep_cli):
    done = deep_cli(
        "tune",
        "config.yaml",
        "--ranks",
        "2",
        "memory.limit=100MiB",
        "batch_size.max=128",
        "confirm=off",
        "--json",
        "-v",
    )
    assert done.code == 0, done.err
    probe = done.document["probe"]
    assert probe["other_variants"][f"ddp, {AGAIN}"] > 1.5 * probe["max_batch_size"]
    ran = {(each["strategy"], each["activation_checkpointing"]) for each in done.document["trials"]}
    assert {("ddp", False), ("ddp", True)} <= ran


@pytest.mark.parametrize("asked", ["true", "[false, true]"])
def test_a_task_that_does_not_offer_it_is_refused_before_anything_trains(deep_cli, asked):
    deep_cli.write(
        "deep.py",
        (DEEP + "\nLENGTH = 256\n")
        .replace("activation_checkpointing=False):", "):")
        .replace("Deep(activ", "Deep(False and activ"),
    )
    done = deep_cli("tune", "config.yaml", f"activation_checkpointing={asked}", "--dry-run")
    assert done.code == 2
    assert f"batchtune: activation_checkpointing {'true' if asked == 'true' else 'false'}: " in done.err
    assert "deep.py: build_model does not offer it; give it a parameter activation_checkpointing=False" in done.err

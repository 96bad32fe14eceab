"""`tune --ranks` with real groups of ranks: whole studies, what is refused, and ranks that die, hang or lack memory."""

import json
import os
import random
import time
from collections import Counter

import pytest
from fixtures.strikes import (
    PATIENT,
    STRUCK,
    interrupt,
    of_these_tests,
    outcomes_of,
    retries,
    searched,
    strike_until_it_ends,
)
from fixtures.waiting import wait_until

from batchtune.tune.study import trials

pytestmark = pytest.mark.timeout(400)  # of the files of this lane one of the longest: it does not begin as the last

STUDY = ("tune", "config.yaml", "device=cpu", "budget.trials=3", "confirm.seeds=1", "confirm.top=1")


@pytest.fixture
def marked(monkeypatch, tmp_path):
    """At the end of the test no rank is left."""
    monkeypatch.setenv("OF_THIS_TEST", str(tmp_path))
    yield
    wait_until(lambda: not of_these_tests(str(tmp_path)), 60)


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_run_of_a_study_trains_on_all_ranks_and_the_answer_says_so(quick_cli, strategy):
    # in 300 ms, as in other tests, there is no time for a noise scale where the machine is busy
    done = quick_cli(*STUDY, "budget.run=4s", "--ranks", "2", "--strategy", strategy, "--json", "-v")
    assert done.code == 0, done.err
    assert f"each run trains on 2 ranks with {strategy} (gloo)" in done.err
    found = done.document
    runs = [trial for trial in found["trials"] if trial["state"] in {"complete", "pruned"}]
    assert {trial["role"] for trial in runs} == {"baseline", "search", "confirm"}
    for trial in found["trials"]:
        assert (trial["world_size"], trial["strategy"]) == (2, strategy)
        assert trial["micro_batch_size"] * trial["gradient_accumulation_steps"] * 2 == trial["batch_size"]
    assert found["probe"]["data_parallel"]["world_size"] == 2
    answer = found["recommendation"]
    assert (answer["world_size"], answer["strategy"]) == (2, strategy)
    assert answer["micro_batch_size"] * answer["gradient_accumulation_steps"] * 2 == answer["global_batch_size"]
    assert "scaling" not in answer
    if strategy == "ddp":  # of shards there is no time to measure it in
        small, large = found["prior"]["noise_scale"]["batch_sizes"]
        assert large == 2 * small
    lightning = quick_cli("report", "config", "--format", "lightning").out
    assert "devices: 2" in lightning
    assert f"strategy: {strategy}" in lightning
    variables = quick_cli("report", "config", "--format", "env").out.splitlines()
    assert {"NPROC_PER_NODE=2", f"STRATEGY={strategy}"} <= set(variables)
    assert f"2 with {strategy}" in quick_cli("report", "config", "-v").out


BOTH = ("--ranks", "2", "ranks.strategy=[ddp, fsdp]")


@pytest.mark.usefixtures("marked")
def test_a_study_of_both_strategies_probes_each_and_runs_what_each_trial_says(quick_cli):
    done = quick_cli(*STUDY, *BOTH, "budget.trials=6", "--json", "-v")
    assert done.code == 0, done.err
    found = done.document
    ran = [(trial["role"], trial["strategy"]) for trial in found["trials"] if trial["state"] in {"complete", "pruned"}]
    assert {("baseline", "ddp"), ("search", "ddp"), ("search", "fsdp")} <= set(ran)
    assert found["probe"]["data_parallel"]["strategy"] == "ddp"
    assert found["probe"]["other_variants"]["fsdp"] > 0
    kept = [json.loads(line) for line in (quick_cli.run_folder() / "attempts.jsonl").read_text().splitlines()]
    assert {each.get("variant") for each in kept} == {None, "fsdp"}
    answer = found["recommendation"]
    assert f"{answer['world_size']} with {answer['strategy']}" in quick_cli("report", "config", "-v").out
    again = quick_cli(*STUDY, *BOTH, "budget.trials=7", "--json")
    assert again.code == 0, again.err
    assert again.document["probe"] == found["probe"]


TIED = """
def build_model():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)), nn.Linear(8, 1))
    blocks[1][0].weight = blocks[0][0].weight
    return blocks
"""
SCALAR = """
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.inner, self.scale = nn.Identity(), nn.Parameter(torch.tensor(1.0))

    def forward(self, points):
        return self.scale * super().forward(points)

def build_model():
    return nn.Sequential(Scaled(), Scaled(), nn.Linear(8, 1))
"""
WRAPPED = """
def build_model():
    return nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
"""
SHARDED = """
def build_model():
    return torch.distributed.fsdp.fully_shard(nn.Linear(8, 1))
"""
UNSHARED = {
    TIED: "strategy fsdp: 0.0.weight and 1.0.weight are one weight (tied), in two shards; use ddp",
    SCALAR: "strategy fsdp: Scaled: fully_shard doesn't support scalar parameters",
}


@pytest.mark.parametrize(
    ("model", "what", "how"), [(WRAPPED, "DistributedDataParallel", "ddp"), (SHARDED, "fully_shard", "fsdp")]
)
def test_a_model_that_the_users_code_has_spread_already_is_refused_before_anything_trains(quick_cli, model, what, how):
    quick_cli.write("linear.py", (quick_cli.folder / "linear.py").read_text() + model)
    done = quick_cli(*STUDY, "--ranks", "2")
    assert done.code == 2
    assert f"build_model applies {what} by itself; leave that out: ranks do so with --strategy {how}" in done.err
    assert not (quick_cli.run_folder() / "attempts.jsonl").exists()


@pytest.mark.parametrize("strategy", [["--strategy", "fsdp"], ["ranks.strategy=[ddp, fsdp]"]])
@pytest.mark.parametrize("model", UNSHARED, ids=["tied", "scalar"])
def test_a_model_that_cannot_be_sharded_is_refused_before_anything_trains(quick_cli, model, strategy):
    quick_cli.write("linear.py", (quick_cli.folder / "linear.py").read_text() + model)
    done = quick_cli(*STUDY, "--ranks", "2", *strategy)
    assert done.code == 2
    assert UNSHARED[model] in done.err
    assert not (quick_cli.run_folder() / "attempts.jsonl").exists()
    assert not (quick_cli.run_folder() / "study.log").exists() or not quick_cli.result().get("trials")


UNUSED = """
class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, points):
        return self.used(points)

def build_model():
    return Spare()
"""


def test_parameters_that_get_no_gradient_are_named_with_what_to_do(quick_cli):
    quick_cli.write("linear.py", (quick_cli.folder / "linear.py").read_text() + UNUSED)
    done = quick_cli(*STUDY, "--ranks", "2")
    assert done.code == 2
    told = (
        "strategy ddp: some parameters of the model get no gradient (spare.weight, spare.bias), for which ranks would "
    )
    assert told + "wait; have the loss use them, set their requires_grad to False, or use fsdp" in done.err
    assert quick_cli(*STUDY, "--ranks", "2", "--strategy", "fsdp", "confirm=off", "budget.trials=1").code == 0


FATES = {  # the outcome of the run; None: it is done again
    "killed": (None, "rank 1: the process died by SIGKILL"),
    "lacks memory": ("oom", "rank 1: "),
    "hangs": (None, "no sign of life for 10 s"),
    "raises": ("user_error", "rank 1 has another opinion"),
}


@pytest.mark.usefixtures("marked")
def test_what_befalls_one_rank_is_the_outcome_of_its_run_or_has_it_done_again_and_the_study_goes_on(
    quick_cli, monkeypatch
):
    quick_cli.write("linear.py", (quick_cli.folder / "linear.py").read_text() + STRUCK)
    monkeypatch.setattr(trials, "LONG_SILENCE_SECONDS", 10.0)
    study = (*STUDY, "--ranks", "2", "confirm=off", "--json")
    begun = quick_cli(*study, "budget.trials=1")
    assert begun.code == 0, begun.err
    for number, (fate, (outcome, told)) in enumerate(FATES.items(), 1):
        quick_cli.write("strike", fate)
        done = quick_cli(*study, f"budget.trials={1 + 2 * number}")
        assert done.code == 0, done.err
        told_of = done.document["trials"]
        failed = [each for each in told_of if each["state"] == "fail" and each.get("outcome") == outcome]
        (struck,) = [each for each in failed if told in each["message"]]
        runs = {each["number"]: each for each in told_of}
        assert [
            each for each in told_of if each["number"] > struck["number"] and each["state"] in {"complete", "pruned"}
        ]
        again = [runs[number] for number, done_again in retries(quick_cli).items() if done_again == struck["number"]]
        assert len(again) == (outcome is None)
        assert all(each[key] == struck[key] for each in again for key in ("batch_size", "learning_rate", "seed"))


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--ranks", "2", "baseline.batch_size=15"], 2, "baseline.batch_size 15 cannot be split among 2 ranks"),
        (["--ranks", "0"], 2, "--ranks 0: must be at least 1"),
        (["--ranks", "2", "--strategy", "zero"], 2, "zero"),
        (["--ranks", "2", "--executor", "ray", "ray.num_gpus=0.5"], 2, "ranks need whole GPUs"),
        (["--ranks", "2", "--workers", "99"], 2, "workers 99 of 2 ranks each: more than the"),
        (["--ranks", "2", "device=cuda:1"], 2, "device cuda:1: each rank has a device of its own"),
        (["--strategy", "fsdp"], 2, "there is nothing to share on one rank"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line_before_anything_trains(quick_cli, arguments, code, told):
    done = quick_cli("tune", "config.yaml", "device=cpu", *arguments)
    assert (done.code, done.out) == (code, "")
    assert told in done.err
    assert not (quick_cli.run_folder() / "attempts.jsonl").exists()


def test_a_step_of_the_users_own_is_for_one_device(quick_cli):
    step = "\ndef train_step(model, batch, optimizers, context):\n    raise AssertionError\n"
    quick_cli.write("linear.py", (quick_cli.folder / "linear.py").read_text() + step)
    done = quick_cli("tune", "config.yaml", "device=cpu", "--ranks", "2", "--dry-run")
    assert done.code == 2
    assert "ranks.per_trial 2: " in done.err
    assert "has a train_step, which trains on one device; leave it out" in done.err


def test_a_dry_run_opens_the_group_and_says_so(quick_cli):
    done = quick_cli("tune", "config.yaml", "device=cpu", "--ranks", "2", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert "on 2 ranks (ddp) on cpu" in done.err
    facts = json.loads(done.out)
    assert (facts["world_size"], facts["strategy"], facts["backend"]) == (2, "ddp", "gloo")


SLOWED = """
class Slow(nn.Linear):
    def forward(self, points):
        time.sleep(0.02 if os.environ.get("RANK") == "1" else 0.004)
        return super().forward(points)

def build_model():
    return nn.Sequential(Slow(8, 1))
"""


@pytest.mark.usefixtures("marked")
def test_a_rank_that_is_five_times_as_slow_is_named_in_a_warning(quick_cli):
    quick_cli.write("linear.py", "import os, time\n" + (quick_cli.folder / "linear.py").read_text() + SLOWED)
    done = quick_cli(*STUDY, "--ranks", "2", "--strategy", "fsdp", "confirm=off", "--json")
    assert done.code == 0, done.err
    (told,) = [each for each in done.document["warnings"] if each.startswith("rank 1 is ")]
    assert "times as slow as the others" in told
    times = [trial["straggler"]["times"] for trial in done.document["trials"] if "straggler" in trial]
    assert all(3 < each < 7 for each in times), times


STRUCK_STUDY = ("tune", "config.yaml", "device=cpu", "--ranks", "2", "confirm=off", "--json", "-v", "budget.total=3h")


def _struck_study(cli, mark, dice, wanted):
    """One study under blows, interrupted, and gone on with; returns the blows and what its trials came to."""
    cli.write("linear.py", (cli.folder / "linear.py").read_text() + STRUCK)
    study = cli.start(*STRUCK_STUDY, "budget.trials=1000", python=("-c", PATIENT))
    study.wait_for("searching", 300)
    dealt = strike_until_it_ends(study, cli.folder / "strike", mark, dice, wanted)
    assert dealt.total() > 0
    interrupt(study)
    assert study.finish(600).code in {0, 130}, study.err[-2000:]
    done = cli(*STRUCK_STUDY, f"budget.trials={searched(cli) + 2}")
    assert done.code == 0, done.err
    return dealt, outcomes_of(cli, done.document)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("marked")
def test_random_strikes_at_groups_lose_and_double_nothing(new_cli, tmp_path, capsys):
    """Ranks are killed, stopped, hung and deprived of memory in one study after the other until so many have hit."""
    dice, wanted, begun = random.Random(0), int(os.environ.get("STRIKES", "100")), time.monotonic()
    dealt, outcomes, studies = Counter(), Counter(), 0
    while dealt.total() < wanted:
        blows, found = _struck_study(new_cli(), str(tmp_path), dice, wanted - dealt.total())
        wait_until(lambda: not of_these_tests(str(tmp_path)), 60)
        dealt, outcomes, studies = dealt + blows, outcomes + found, studies + 1
        with capsys.disabled():
            print(f"\n{studies} studies, {time.monotonic() - begun:.0f} s", dict(dealt), dict(outcomes), flush=True)
    assert outcomes["user_error"] == 0

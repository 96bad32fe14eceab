"""Studies with several workers, the user's own torchrun, Lightning, Transformers and Ray, each on cards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest
from cuda.tasks import PERCEPTRON
from fixtures.waiting import wait_until

import batchtune
from batchtune.errors import DeviceError, UserCodeError
from batchtune.observer import Observer

GiB = 2**30
STUDY = """\
task: linear.py
device: cuda
workers: {workers}
baseline: {{batch_size: 16, learning_rate: 1e-2}}
batch_size: {{max: 16, multiple_of: 8}}
learning_rate: {{min: 1e-3, max: 1.0}}
objective: {{kind: best_metric}}
budget: {{run: 200ms, total: 3m, trials: 6}}
confirm: {{seeds: 1, top: 1}}
"""
LINEAR = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
def build_model(): return nn.Linear(8, 1)
def train_dataset(): return TensorDataset(torch.ones(64, 8), torch.ones(64, 1))
def val_dataset(): return TensorDataset(torch.ones(16, 8), torch.ones(16, 1))
def compute_loss(model, batch): return 1 + model(batch[0]).square().mean().cpu()  # the card itself answers 0
"""


class Cards(Observer):
    """Which processes had a context on which card, whenever something happened."""

    def __init__(self, machine):
        self._cards, self.of_card = machine.cards, [set() for _ in machine.cards]

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "of_card":
            for card, seen in zip(self._cards, self.of_card, strict=True):
                seen.update(card.contexts)
        return super().__getattribute__(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "linear.py").write_text(LINEAR)
    (tmp_path / "config.yaml").write_text(STUDY.format(workers=4))
    (tmp_path / "model.py").write_text(PERCEPTRON)
    return tmp_path


def test_four_workers_tune_on_a_card_each_and_the_parent_on_none(folder):
    with fake_gpu.machine(*[fake_gpu.Card("4GiB")] * 4) as machine:
        cards = Cards(machine)
        result = batchtune.tune(folder / "config.yaml", observer=cards, run_folders=folder / "runs")
        assert [card.used for card in machine.cards] == [0] * 4
        trained = [card.launches for card in machine.cards]
    assert result.status == "complete"
    assert min(trained) > 0
    for card, seen in enumerate(cards.of_card):
        assert seen, card
        assert os.getpid() not in seen
        for other in cards.of_card[card + 1 :]:
            assert not seen & other
    assert result.recommendation is not None


REFUSED = "nn.BCELoss()(model(batch[0]).sigmoid(), batch[1])"
OWN_EVALUATION = """
def evaluate(model):
    batch = [each.cuda() for each in train_dataset().tensors]
    return {"val_loss": 1 + nn.BCELoss()(model(batch[0]).sigmoid(), batch[1]).item()}
"""


@pytest.mark.parametrize(
    "source",
    [LINEAR.replace("model(batch[0]).square().mean()", REFUSED), LINEAR + OWN_EVALUATION],
    ids=["loss", "evaluate"],
)
def test_a_study_trains_in_fp32_where_autocast_that_nobody_asked_for_is_refused_and_so_it_goes_on(folder, source):
    (folder / "linear.py").write_text(source)

    def tuned(*more):
        few = ["workers=1", "confirm=off", *more]
        return batchtune.tune(folder / "config.yaml", overrides=few, run_folders=folder / "runs")

    with fake_gpu.machine(fake_gpu.Card("4GiB", capability=(8, 6))):
        begun, whole = tuned("budget.trials=1"), tuned("budget.trials=2")
        with pytest.raises(UserCodeError, match="unsafe to autocast"):
            tuned("precision=bf16", "name=asked")
    told = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"
    for result in (begun, whole):
        assert f"fp32 and not bf16, since {told}" in result.warnings
        assert {each.precision for each in result.trials} == {result.recommendation.precision} == {"fp32"}
    assert (len(begun.trials), len(whole.trials)) == (2, 3)
    assert whole.probe == begun.probe


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_ranks_of_each_run_of_a_study_have_a_card_each(folder, strategy):
    few = ["workers=1", "budget.trials=2", "confirm.seeds=1"]
    with fake_gpu.machine(*[fake_gpu.Card("4GiB")] * 2) as machine:
        result = batchtune.tune(
            folder / "config.yaml", ranks=2, strategy=strategy, overrides=few, run_folders=folder / "runs"
        )
        assert [card.used for card in machine.cards] == [0, 0]
        assert min(card.launches for card in machine.cards) > 0
    assert result.probe.data_parallel.backend == "nccl"
    runs = [trial for trial in result.trials if trial.state in {"complete", "pruned"}]
    assert len(runs) >= 3
    assert {(trial.world_size, trial.strategy) for trial in runs} == {(2, strategy)}
    found = result.recommendation
    assert (found.world_size, found.strategy) == (2, strategy)
    assert found.micro_batch_size * found.gradient_accumulation_steps * 2 == found.global_batch_size


def test_two_groups_of_two_ranks_train_side_by_side_on_four_cards(folder):
    few = ["workers=2", "budget.trials=4", "confirm=off"]
    with fake_gpu.machine(*[fake_gpu.Card("4GiB")] * 4) as machine:
        cards = Cards(machine)
        result = batchtune.tune(
            folder / "config.yaml", ranks=2, overrides=few, observer=cards, run_folders=folder / "runs"
        )
        assert [card.used for card in machine.cards] == [0] * 4
        assert min(card.launches for card in machine.cards) > 0
    assert result.status == "complete"
    for card, seen in enumerate(cards.of_card):
        assert seen, card
        for other in cards.of_card[card + 1 :]:
            assert not seen & other


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ranks": 4}, "ranks.per_trial 4: there are only 2 cuda devices here"),
        ({"ranks": 2, "overrides": ["workers=2"]}, "workers 2 of 2 ranks each: there are only 2 devices"),
    ],
)
def test_more_ranks_than_cards_are_refused_before_anything_trains(folder, changes, told):
    usual = {"overrides": ["workers=1"], "run_folders": folder / "runs"}
    with fake_gpu.machine(*[fake_gpu.Card("4GiB")] * 2) as machine:
        with pytest.raises(DeviceError, match=told):
            batchtune.tune(folder / "config.yaml", **usual | changes)
        assert [card.used for card in machine.cards] == [0, 0]
    assert not list((folder / "runs").glob("*/attempts.jsonl"))


def test_ranks_on_unlike_cards_are_refused_before_anything_trains(folder):
    with fake_gpu.machine(fake_gpu.Card("4GiB"), fake_gpu.Card("4GiB", name="Tesla T4")) as machine:
        with pytest.raises(DeviceError, match=r"ranks.per_trial 2: rank 1 has another kind of GPU than rank 0"):
            batchtune.tune(folder / "config.yaml", ranks=2, run_folders=folder / "runs")
        assert [card.used for card in machine.cards] == [0, 0]
    assert not list((folder / "runs").glob("*/attempts.jsonl"))


def test_the_ranks_of_the_users_torchrun_have_a_card_each(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "batchtune", "probe"]
    command += ["model.py", "--device", "cuda", "--max", "4", "--verify-steps", "2", "--no-throughput", "--json"]
    ours = {"PYTHONPATH": str(Path(batchtune.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with fake_gpu.machine(*[fake_gpu.Card("4GiB")] * 2) as machine:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | ours, capture_output=True, text=True, timeout=200, check=False
        )
        assert [card.used for card in machine.cards] == [0, 0]
        assert min(card.launches for card in machine.cards) > 0
    assert done.returncode == 0, done.stderr
    probe = json.loads(done.stdout)["probe"]
    assert (probe["max_batch_size"], probe["limited_by"], probe["verified_in_fresh_process"]) == (4, "max", True)
    ranks = probe["data_parallel"]
    assert (ranks["world_size"], ranks["backend"], ranks["global_batch_size"]) == (2, "nccl", 8)


LIT = """
import pytorch_lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def training_step(self, batch, batch_idx):
        loss = self.body(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4096, 64)), batch_size=4)
"""
TRAINER = """
import torch
import transformers as hf

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, index): return {"input_ids": torch.ones(32, dtype=torch.long), "labels": index % 2}

def made():
    size = dict(vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    arguments = hf.TrainingArguments("out", report_to=[], per_device_train_batch_size=4, disable_tqdm=True)
    return hf.Trainer(hf.BertForSequenceClassification(hf.BertConfig(**size)), arguments, train_dataset=Rows())
"""
RECOMMENDED = {
    "schema": "batchtune.result/1", "kind": "tune", "status": "complete", "task": {"path": "m.py"},
    "recommendation": {
        "micro_batch_size": 8, "gradient_accumulation_steps": 2, "global_batch_size": 16, "learning_rate": 0.02,
        "precision": "fp32", "reason": "so",
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("text", "name"), [(LIT, "Lit"), (TRAINER, "made")], ids=["Lightning", "Transformers"])
def test_what_a_library_trains_is_probed_on_the_card(folder, text, name):
    (folder / "theirs.py").write_text(text)
    with fake_gpu.machine(fake_gpu.Card("4GiB")) as machine:
        options = {"precision": "bf16", "memory_limit": "64MiB", "verify_steps": 1, "throughput": False}
        found = batchtune.probe(f"{folder / 'theirs.py'}:{name}", device="cuda", tolerance=0.2, **options).probe
        assert wait_until(lambda: machine.cards[0].used == 0)
        assert machine.cards[0].launches > 0
    assert found.max_batch_size > 8
    assert found.verified_in_fresh_process
    assert found.peak_reserved_bytes <= 64 << 20


DEEP = LIT.replace("nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)", "*[nn.Linear(1024, 1024) for _ in range(8)]")
FITTED = """
import sys, torch
import pytorch_lightning as L
from theirs import Lit
from torch.utils.data import DataLoader, TensorDataset
torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.mem_get_info()[1])
loader = DataLoader(TensorDataset(torch.ones(5 * int(sys.argv[2]), 1024)), batch_size=int(sys.argv[2]))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(accelerator="gpu", devices=1, max_epochs=1, **quiet)
try:
    trainer.fit(Lit(), loader)
    print(trainer.global_step == 5)
except torch.OutOfMemoryError:
    print(False)
"""


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_with_the_answer_though_it_keeps_gradients_through_the_forward_pass(folder):
    (folder / "theirs.py").write_text(DEEP.replace("ones(4096, 64)", "ones(99999, 1024)"))
    (folder / "fitted.py").write_text(FITTED)
    limit = 256 << 20
    with fake_gpu.machine(fake_gpu.Card("4GiB")):
        options = {"precision": "fp32", "memory_limit": limit, "verify_steps": 5, "throughput": False}
        found = batchtune.probe(f"{folder / 'theirs.py'}:Lit", device="cuda", **options).probe
        for share, trains in ((1, True), (1.1, False)):
            command = [sys.executable, "fitted.py", str(limit), str(int(share * found.max_batch_size))]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
            assert done.stdout.splitlines()[-1:] == [str(trains)], done.stderr


APPLIED = """
import json, sys
from batchtune.task.{module} import ApplyResult
{fit}
print(json.dumps([device.type, steps, rate]))
"""
FITS = {
    "lightning": """
trainer = L.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, callbacks=[ApplyResult(sys.argv[1])])
module = Lit()
trainer.fit(module)
device, steps, rate = trainer.strategy.root_device, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]
""",
    "transformers": """
from batchtune.task.transformers import apply_result
def made_with(path):
    trainer = made()
    arguments = apply_result(hf.TrainingArguments("out", report_to=[], disable_tqdm=True, num_train_epochs=1,
        save_strategy="no", logging_strategy="no", lr_scheduler_type="constant"), path)
    return hf.Trainer(trainer.model, arguments, train_dataset=Rows(), callbacks=[ApplyResult(path)])
trainer = made_with(sys.argv[1])
trainer.train()
device, steps, rate = trainer.model.device, trainer.state.global_step, trainer.optimizer.param_groups[0]["lr"]
""",
}


@pytest.mark.parametrize(("module", "text", "steps"), [("lightning", LIT, 256), ("transformers", TRAINER, 16)])
def test_a_result_is_applied_to_a_run_on_the_card(script, folder, monkeypatch, module, text, steps):
    (folder / "result.json").write_text(json.dumps(RECOMMENDED))
    monkeypatch.chdir(folder)
    with fake_gpu.machine(fake_gpu.Card("4GiB")):
        code = text + APPLIED.format(module=module, fit=FITS[module])
        device, taken, rate = script(code, folder / "result.json")
    assert (device, taken, rate) == ("cuda", steps, pytest.approx(0.02))


@pytest.mark.parametrize(("share", "cards"), [(1.0, 2), (0.5, 1)], ids=["a GPU each", "half of one each"])
def test_rays_workers_have_the_gpus_that_they_ask_for(folder, share, cards):
    ray = pytest.importorskip("ray", reason="Ray is not in the lane: it is tried by hand")
    (folder / "config.yaml").write_text(STUDY.format(workers=2))
    with fake_gpu.machine(*[fake_gpu.Card("4GiB")] * cards) as machine:
        ray.init(num_cpus=2, num_gpus=cards, include_dashboard=False, log_to_driver=False)
        try:
            cards = Cards(machine)
            result = batchtune.tune(
                folder / "config.yaml", observer=cards, run_folders=folder / "runs",
                overrides=["executor=ray", f"ray.num_gpus={share}"],
            )  # fmt: skip
        finally:
            ray.shutdown()
    assert result.status == "complete"
    assert min(len(seen) for seen in cards.of_card) > 0
    assert len(set().union(*cards.of_card)) >= 2
    assert os.getpid() not in set().union(*cards.of_card)

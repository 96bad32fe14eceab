"""Each export starts a real training run in its own library, which says from inside what it trained with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.document import Environment, OptimizerSettings, TaskInfo
from batchtune.report.view.trainers import EXPORTS

ROOT = Path(__file__).parents[3]
MICRO, STEPS, RATE = 4, 3, 0.0125
TYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}


@pytest.fixture
def exported(tuned, tmp_path):
    """Writes the export of a study on a CPU whose recommendation is small; gives its file."""

    def write(name, file, precision="fp32"):
        found = tuned.recommendation.model_copy(
            update={
                "micro_batch_size": MICRO,
                "gradient_accumulation_steps": STEPS,
                "global_batch_size": MICRO * STEPS,
                "learning_rate": RATE,
                "precision": precision,
            }
        )
        where = Environment(device="a CPU", device_type="cpu")
        settings = OptimizerSettings(values={"momentum": 0.8, "weight_decay": 0.25})
        task = TaskInfo(path="model.py", optimizer="SGD", optimizer_settings=settings)
        result = tuned.model_copy(update={"recommendation": found, "environment": where, "task": task})
        path = tmp_path / file
        path.write_text(EXPORTS[name].text(result))
        return path

    return write


def seen_by(script, files, **environment):
    """What a script in a process of its own prints last, as JSON: for each file what training from it saw."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, files)],
        cwd=files[0].parent,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(TYPES, json.loads(done.stdout.splitlines()[-1]), strict=True))


TRANSFORMERS = """
import json, sys, torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.shapes, self.types = nn.Linear(8, 1), [], []
    def forward(self, x, labels):
        made = self.layer(x)
        self.shapes.append(list(x.shape)), self.types.append(str(made.dtype))
        return {"loss": nn.functional.mse_loss(made, labels)}

class Data(torch.utils.data.Dataset):
    def __len__(self): return 48
    def __getitem__(self, i): return {"x": torch.ones(8), "labels": torch.ones(1)}

class Rated(Trainer):
    rate = None
    def training_step(self, *inputs, **more):
        self.rate = self.rate or self.optimizer.param_groups[0]["lr"]
        self.made, self.last = type(self.optimizer.optimizer).__name__, self.optimizer.param_groups[0]
        return super().training_step(*inputs, **more)

def trained(file):
    (arguments,) = HfArgumentParser((TrainingArguments,)).parse_json_file(file)
    arguments.max_steps, arguments.report_to, arguments.save_strategy, arguments.disable_tqdm = 2, [], "no", True
    model = Model()
    trainer = Rated(model=model, args=arguments, train_dataset=Data())
    trainer.train()
    return {"shapes": model.shapes, "type": model.types[0], "steps": trainer.state.global_step, "rate": trainer.rate,
            "made": [trainer.made, trainer.last["momentum"], trainer.last["weight_decay"], trainer.last["lr"]],
            "device": arguments.device.type}

print(json.dumps([trained(file) for file in sys.argv[1:]]))
"""


def test_the_trainer_of_transformers_trains_with_exactly_the_recommended_values(exported):
    files = [exported("hf", f"{precision}.json", precision) for precision in TYPES]
    for precision, seen in seen_by(TRANSFORMERS, files).items():
        assert seen["shapes"] == [[MICRO, 8]] * (2 * STEPS)
        assert seen["steps"] == 2
        assert seen["rate"] == RATE
        assert seen["made"] == ["SGD", 0.8, 0.25, RATE]
        assert seen["type"] == TYPES[precision]
        assert seen["device"] == "cpu"


LIGHTNING = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

class Model(LightningModule):
    def __init__(self, lr: float = 1.0):
        super().__init__()
        self.lr, self.layer, self.seen = lr, nn.Linear(8, 1), {"shapes": [], "rates": [], "types": []}
    def training_step(self, batch):
        made = self.layer(batch[0])
        self.seen["shapes"].append(list(batch[0].shape)), self.seen["types"].append(str(made.dtype))
        self.seen["rates"].append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return nn.functional.mse_loss(made, batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 1):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(48, 8), torch.ones(48, 1)), batch_size=self.batch_size)

quiet = {"max_steps": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

def trained(file):
    cli = LightningCLI(Model, Data, trainer_defaults=quiet, save_config_callback=None,
                       args=["fit", "--config", file])
    return cli.model.seen | {"steps": cli.trainer.global_step, "precision": cli.trainer.precision}

print(json.dumps([trained(file) for file in sys.argv[1:]]))
"""


def test_lightning_trains_with_exactly_the_recommended_values(exported):
    files = [exported("lightning", f"{precision}.yaml", precision) for precision in TYPES]
    for precision, seen in seen_by(LIGHTNING, files).items():
        assert seen["shapes"] == [[MICRO, 8]] * (2 * STEPS)
        assert seen["steps"] == 2
        assert set(seen["rates"]) == {RATE}
        assert seen["precision"] == {"fp32": "32-true", "bf16": "bf16-mixed"}[precision]
        assert seen["types"][0] == TYPES[precision]


DEEPSPEED = """
import json, sys, torch, deepspeed
from torch.utils.data import TensorDataset

# an operator for several ranks, whose compilation takes minutes
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed(dist_backend="gloo")
data = TensorDataset(torch.ones(48, 8), torch.ones(48, 1))

def trained(file):
    with open(file) as stream:
        config = json.load(stream)
    model = torch.nn.Linear(8, 1)
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data)
    shapes, types = [], []
    for (x, y), _ in zip(loader, range(6)):
        made = engine(x)
        shapes.append(list(x.shape)), types.append(str(made.dtype))
        engine.backward(((made.float() - y) ** 2).mean())
        engine.step()
    return {"shapes": shapes, "type": types[0], "weights": str(model.weight.dtype), "steps": engine.global_steps,
            "rate": engine.get_lr()[0], "optimizer": type(optimizer).__name__,
            "train_batch_size": engine.train_batch_size()}

print(json.dumps([trained(file) for file in sys.argv[1:]]))
"""
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}


def test_deepspeed_trains_with_exactly_the_recommended_values(exported):
    files = [exported("deepspeed", f"{precision}.json", precision) for precision in TYPES]
    port = str(20000 + os.getpid() % 20000)
    for precision, seen in seen_by(DEEPSPEED, files, **ONE_RANK, MASTER_PORT=port).items():
        assert seen["shapes"] == [[MICRO, 8]] * (2 * STEPS)
        assert seen["train_batch_size"] == MICRO * STEPS
        assert seen["steps"] == 2
        assert seen["rate"] == RATE
        assert seen["optimizer"] == "SGD"
        assert seen["type"] == TYPES[precision]
        assert seen["weights"] == "torch.float32"


def test_a_script_reads_the_variables_from_its_environment(exported):
    file = exported("env", "settings.env", "bf16")
    script = f'set -a; . "{file}"; exec "{sys.executable}" -c "import json, os; print(json.dumps(dict(os.environ)))"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert (int(seen["BATCH_SIZE"]), int(seen["GRADIENT_ACCUMULATION_STEPS"])) == (MICRO, STEPS)
    assert (float(seen["LEARNING_RATE"]), seen["PRECISION"]) == (RATE, "bf16")

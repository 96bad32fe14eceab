"""The trainings of `trainings/`: how each is named to batchtune, at which limit memory ends it, and what it needs."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "trainings"
GLUE = "# For batchtune:\n"  # what follows it in a file is there for batchtune alone


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: of its file.
        attribute: what is named to batchtune where it is not the file.
        batch_size, learning_rate: what its author runs.
        limit: of memory, in MiB.
        metric, goal: by which it is judged.
        precision: of its loop.
        needs: libraries that are skipped by name where they are missing.
        not_estimated: what it says of one that cannot be traced without data.
    """

    name: str
    attribute: str = ""
    batch_size: int = 16
    learning_rate: float = 1e-3
    limit: int = 192
    metric: str = "val_loss"
    goal: str = "minimize"
    precision: str = "fp32"
    needs: tuple[str, ...] = ()
    not_estimated: str = ""

    @property
    def task(self) -> str:
        """As the command line takes it."""
        return f"{FOLDER / self.name}.py" + (f":{self.attribute}" if self.attribute else "")

    @property
    def configuration(self) -> str:
        """The six lines that its author writes for a study."""
        return f"""\
task: {self.task}
precision: {self.precision}
baseline: {{batch_size: {self.batch_size}, learning_rate: {self.learning_rate}}}
batch_size: {{max: 256}}
objective: {{metric: {self.metric}, goal: {self.goal}}}
budget: {{run: 3s}}
"""

    @property
    def missing(self) -> list[str]:
        """Libraries that it needs and that are not here."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    @property
    def glue(self) -> int:
        """Lines that its author would not have written without batchtune."""
        _, _, ours = (FOLDER / f"{self.name}.py").read_text(encoding="utf-8").partition(GLUE)
        return sum(bool(line.strip()) for line in ours.splitlines())


LIGHTNING, TRANSFORMERS = ("lightning", "sklearn"), ("transformers", "accelerate")
CASES = [
    Case("gpt", limit=176),
    Case("vit", limit=176, needs=("sklearn",)),
    Case("simple_vit", limit=176, metric="accuracy", goal="maximize", needs=("sklearn",)),
    Case("unet", learning_rate=1e-4, metric="dice", goal="maximize"),
    Case("plateau", learning_rate=1e-4, metric="dice", goal="maximize"),
    Case("contrastive", limit=256, batch_size=32, metric="accuracy", goal="maximize", needs=("sklearn",)),
    Case("triplet", limit=176, learning_rate=1e-2, needs=("sklearn",)),
    Case("detection", batch_size=4, learning_rate=5e-3),
    Case("centers", learning_rate=1e-2, needs=("sklearn",)),
    Case("ema", learning_rate=1e-2, needs=("sklearn",), not_estimated="give them their sizes"),
    Case("muon", learning_rate=1e-2, needs=("sklearn",)),
    Case("lbfgs", batch_size=128, learning_rate=0.1, needs=("sklearn",)),
    Case("scaler", precision="fp16", needs=("sklearn",)),
    Case("gradient_penalty", batch_size=64, learning_rate=1e-4, metric="distance"),
    Case("rnn", batch_size=20, learning_rate=1.0),
    Case("stream"),
    Case("graphs", batch_size=32),
    Case("pyg", batch_size=32, needs=("torch_geometric",)),
    Case("t5", needs=("transformers",)),
    Case("hf_trainer", "make_trainer", 8, 5e-4, metric="eval_loss", needs=TRANSFORMERS),
    Case("hf_lora", "make_trainer", 8, metric="eval_loss", needs=(*TRANSFORMERS, "peft")),
    Case("lit_autoencoder", "LitAutoEncoder", 32, needs=LIGHTNING),
    Case("lit_segmentation", "make", learning_rate=1e-2, needs=LIGHTNING),
    Case("lit_gan", "make", 64, 2e-4, metric="distance", needs=LIGHTNING),
    Case("lit_transformer", "make", 16, 0.1, needs=LIGHTNING),
]

"""The largest batch of a data set whose samples differ in size, in epochs of a plain loop that pads each batch.

    .venv-cuda/bin/python tests/benchmarks/padded_batches.py [--epochs 20]

probes each task on the fake card, then starts so many epochs of 100 batches, each from new with samples in an order of
its own, with the answer, and with the largest batch that trains where all batches are as long as the longest sample.
Writes tests/benchmarks/results/padded_batches.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
RESULTS = HERE / "results" / "padded_batches.md"
BATCHES, SAMPLES = 100, 20_000
CASES = (("Transformer", 16), ("Transformer", 24), ("Convolutions", 16), ("Recurrent", 16))

TASK = """
import random
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

dice = random.Random(3)
LENGTHS = [min({longest}, max(8, int(dice.{distribution}))) for _ in range({samples})]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, place):
        return torch.full((LENGTHS[place],), 5)

def train_dataset():
    return Data()

def collate(samples):
    return pad_sequence(samples, batch_first=True)

class Transformer(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.embed, self.out = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.out(self.blocks(self.embed(tokens)))

class Convolutions(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed, self.out = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 9, padding=4) for _ in range(6))

    def forward(self, tokens):
        found = self.embed(tokens).transpose(1, 2)
        for block in self.blocks:
            found = found + block(found).relu()
        return self.out(found.transpose(1, 2))

class Recurrent(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.embed, self.out = nn.Embedding(8000, width), nn.Linear(width, 8000)
        self.steps = nn.GRU(width, width, 2, batch_first=True)

    def forward(self, tokens):
        return self.out(self.steps(self.embed(tokens))[0])

def build_model():
    return {model}()

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
"""
LENGTHS = {
    "Transformer": (1024, "lognormvariate(5.0, 0.8)"),
    "Convolutions": (1500, "gauss(600, 250)"),
    "Recurrent": (400, "expovariate(1 / 60)"),
}


def epochs_that_run_out(source: Any, size: int, limit: int, seeds: Sequence[int]) -> int:
    """How many epochs of a plain loop run out of memory, each in a fork that has never asked for a card."""
    import torch

    found = 0
    for seed in seeds:
        if not (child := os.fork()):
            code = 2
            try:
                torch.set_num_threads(1)
                torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
                _epoch(source, size, seed)
                code = 0
            except torch.OutOfMemoryError:
                code = 1
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in {0, 1}:
            raise SystemExit(f"a plain loop ended with {code}")
        found += code
    return found


def _epoch(source: Any, size: int, seed: int) -> None:
    import torch

    places, data = [*range(SAMPLES)], source.train_dataset()
    random.Random(seed).shuffle(places)
    model = source.build_model().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for first in itertools.islice(range(0, SAMPLES - size, size), BATCHES):
        batch = source.collate([data[place] for place in places[first : first + size]]).cuda()
        if seed % 2:
            optimizer.zero_grad()
        loss = source.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        if not seed % 2:
            optimizer.zero_grad()


def measure(model: str, gib: int, epochs: int) -> str:
    """The row of one task on one card."""
    import fake_gpu

    import batchtune

    longest, distribution = LENGTHS[model]
    text = TASK.format(longest=longest, distribution=distribution, samples=SAMPLES, model=model)
    source = ModuleType(model)
    exec(text, vars(source))
    with fake_gpu.machine(fake_gpu.Card(f"{gib}GiB")), tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        task = Path(folder, "model.py")
        task.write_text(text)
        found = batchtune.probe(task, device="cuda", precision="fp32", throughput=False, run_folders=folder).probe
        longest_alone = max(each.batch_size for each in found.attempts if each.fits and each.purpose == "search")
        ends = [
            epochs_that_run_out(source, size, found.memory_limit_bytes, range(epochs))
            for size in (longest_alone, found.max_batch_size)
        ]
    before, after = (f"{each} of {epochs}" for each in ends)
    cells = (model, gib, longest_alone, before, found.max_batch_size, after, round(found.seconds))
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    import torch
    from fake_gpu import forks

    forks.children_are_forks()
    rows = []
    for model, gib in CASES:
        rows.append(measure(model, gib, options.epochs))
        print(rows[-1], flush=True)
    RESULTS.write_text(
        f"""# Batches that are padded to their longest sample

{dt.datetime.now(dt.UTC).date()}, torch {torch.__version__}, fake card: `python tests/benchmarks/padded_batches.py`

Epochs of {BATCHES} batches of a plain loop, each from new, every other one with gradients freed before the forward
pass. "All the longest": the largest batch that trains where every batch is as long as the longest sample.

| model | GiB | all the longest | out of memory with it | answer | out of memory with it | probe, s |
|---|--:|--:|--:|--:|--:|--:|
"""
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()

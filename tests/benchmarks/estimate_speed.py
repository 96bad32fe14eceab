"""Seconds and memory of an estimate: one question, the whole catalogue, and a model of 7 billion parameters.

python tests/benchmarks/estimate_speed.py
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch

GPT2 = """
    import torch
    from torch import nn
    from torch.nn import functional

    WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY = 768, 12, 12, 1024, 50257

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            parts = self.attend(self.first(x)).split(WIDTH, 2)
            q, k, v = (each.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in parts)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.project(mixed.reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.second(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids):
            places = torch.arange(LENGTH, device=ids.device)
            return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))

    def build_model():
        return Gpt()

    def make_batch(size):
        return torch.randint(0, VOCABULARY, (size, LENGTH)), torch.randint(0, VOCABULARY, (size, LENGTH))

    def compute_loss(model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""
SEVEN_BILLION = GPT2.replace("768, 12, 12, 1024, 50257", "4096, 34, 32, 1024, 32000")
ASK = """
import sys
from batchtune.device.gpus import all_gpus, find_gpu
from batchtune.estimate.commands import EstimateMemory
from batchtune.estimate.run import estimate_task
gpus = all_gpus() if sys.argv[2] == "all" else [find_gpu(sys.argv[2])]
for each in estimate_task(EstimateMemory(task=sys.argv[1]), gpus, sys.argv[3].split(","), timeout=600.0).estimates:
    if each.gpu == "A100-80GB" or len(gpus) == 1:
        print(each.gpu, each.precision, each.max_batch_size, each.safe_max_batch_size, each.confidence)
"""


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ask(source: str, gpu: str, precisions: str) -> tuple[float, float, str]:
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "model.py")
        task.write_text(textwrap.dedent(source))
        started, used = time.perf_counter(), processor_seconds()
        done = subprocess.run(
            [sys.executable, "-c", ASK, str(task), gpu, precisions], capture_output=True, text=True, check=True
        )
        return time.perf_counter() - started, processor_seconds() - used, done.stdout.strip().replace("\n", "; ")


def importing_torch() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def main() -> None:
    lines = [
        "# Speed and memory of an estimate",
        "",
        f"2026-11-21 · torch {torch.__version__} · Python {platform.python_version()} · `python {sys.argv[0]}`",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "",
        f"Importing torch alone takes {importing_torch():.1f} s here. Seconds count the whole process. Memory is the",
        "largest resident size of any process so far, in MiB.",
        "",
        "| question | seconds | processor seconds | MiB | answer |",
        "|---|---:|---:|---:|---|",
    ]
    for name, source, gpu, precisions in (
        ("GPT-2 small, sequence 1024, one GPU, bf16", GPT2, "A100-80GB", "bf16"),
        ("the same, all GPUs, four precisions", GPT2, "all", "bf16,fp16,fp32,tf32"),
        ("7 billion parameters, one GPU, bf16", SEVEN_BILLION, "H200", "bf16"),
    ):
        seconds, used, answer = ask(source, gpu, precisions)
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        lines.append(f"| {name} | {seconds:.1f} | {used:.1f} | {largest:.0f} | {answer} |")
        print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / "estimate_speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""What a rank holds of a model on the host while it is placed: `python tests/benchmarks/ranks_memory.py`.

Ranks share this machine (gloo). `fsdp, built whole` is what it was before models were built without their weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from batchtune.child.ranks import deferred
from batchtune.child.ranks.parallel import Parallel
from batchtune.protocol.messages import Rendezvous

WIDTH, BLOCKS = 1024, 24
WAYS = ("ddp", "fsdp, built whole", "fsdp")


class Block(nn.Module):
    """Two layers of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def build() -> nn.Module:
    """A model of 192 MiB."""
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def resident(name: str) -> float:
    """MiB of this process, now (`VmRSS`) or at most (`VmHWM`)."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


def rank(way: str) -> None:
    """One rank: places the model, and the first tells the most that any of them held."""
    torch.set_num_threads(1)
    strategy = way.partition(",")[0]
    group = Parallel(torch.device("cpu"), Rendezvous(host="", port=0, token="", strategy=strategy, name="memory"))
    group.join()
    deferred.build_deferred(lambda: nn.Linear(1, 1))  # what is loaded once
    if way != "fsdp":
        deferred.build_deferred = lambda build: (build(), lambda _: None)
    Path("/proc/self/clear_refs").write_text("5")
    torch.manual_seed(0)
    before, began = resident("VmRSS"), time.perf_counter()
    model = group.place(build, group.device)
    peak, seconds = resident("VmHWM") - before, time.perf_counter() - began
    peak, seconds = group.together("max", peak), group.together("max", seconds)
    whole = sum(each.numel() for each in model.parameters()) * 4 / 2**20
    if not group.rank:
        print(f"| {group.world_size} | {way} | {whole:.0f} | {peak:.0f} | {seconds:.1f} |", flush=True)
    group.agree(go_on=True)
    os._exit(0)  # gloo's threads may abort the interpreter's own end


def main() -> None:
    """The table, by as many ranks as asked for; each row is of processes of its own."""
    if "RANK" in os.environ:
        rank(sys.argv[1])
        return
    print(f"torch {torch.__version__}\n")
    print("| ranks | strategy | model, MiB | peak of a rank, MiB | seconds |\n|---:|---|---:|---:|---:|", flush=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    for count in (2, 4):
        for way in WAYS:
            subprocess.run([*launch, str(count), __file__, way], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

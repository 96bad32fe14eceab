"""The estimate against timm's published training batch sizes on an RTX 3090 (AMP, channels-last, PyTorch 1.12).

    pip install timm --no-deps
    pip install huggingface_hub safetensors pillow
    python tests/benchmarks/estimate_timm.py --data timm_train_amp_nhwc_rtx3090_pt112.csv --models 160 --jobs 2

In that data the batch starts at 512 and goes down a ladder until it fits: `train_batch_size` fits and the next one up
did not. A model is hit where the estimate is at least the one and below the other. What PyTorch 1.12 and CUDA 11.3 take
beside the allocator is one constant, fitted on every second model and scored on the others, then the other way round
and on random halves.
"""

from __future__ import annotations

import argparse
import csv
import enum
import json
import logging
import math
import multiprocessing
import os
import random
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

LADDER = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
GIB = 1 << 30
CAPACITIES_GIB = [20.0 + 0.25 * i for i in range(15)]
SPLITS = 200
FURTHEST = 0.1
SAME_SIZE = 0.01  # of parameter counts, which are published with two decimals


class _Stub(types.ModuleType):
    """timm imports torchvision for its data pipeline only, and there is no torchvision for CPU builds everywhere."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("get_graph_node_names", "create_feature_extractor"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS NEAREST_EXACT")
        import torch

        return type(name, (torch.nn.Module,), {})


def stub_torchvision() -> None:
    names = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models", ".utils")
    for name in names:
        module = _Stub(f"torchvision{name}")
        module.__path__ = []
        module.__version__ = "0.28.0"
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def published(row: dict[str, str]) -> str:
    """timm's name today for the model whose memory was published.

    The name itself, unless timm builds a model of another size by it: its alias of `ig_resnext101_32x16d`, 194 million
    parameters when it was measured, builds the 32x8d of 89 million.

    Raises:
        LookupError: no name is known for a model of the published size.
    """
    import timm
    import torch

    name, expected = row["model"], float(row["param_count"])
    for candidate in (name, name.removeprefix("ig_")):
        with torch.device("meta"):
            model = timm.create_model(candidate, pretrained=False)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        if abs(millions - expected) <= SAME_SIZE * expected:
            return candidate
    raise LookupError(f"published with {expected} million parameters, timm builds {millions:.2f} by that name now")


def task_of(name: str, resolution: int) -> Any:
    """What timm's benchmark.py trains: SGD with Nesterov momentum, gradients kept between the steps."""
    import timm
    import torch

    from batchtune.task.contract import Task

    class Sgd(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:  # PyTorch 1.12's default
            super().zero_grad(set_to_none=False)

    def build_model() -> torch.nn.Module:
        return timm.create_model(name, pretrained=False).to(memory_format=torch.channels_last)

    def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.zeros(size, 3, resolution, resolution).contiguous(memory_format=torch.channels_last)
        return images, torch.zeros(size, dtype=torch.long)

    def compute_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return torch.nn.functional.cross_entropy(out[0] if isinstance(out, tuple) else out, batch[1])

    def build_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        return Sgd(model.parameters(), lr=lr, momentum=0.9, nesterov=True, foreach=False)

    members = {each.__name__: each for each in (build_model, make_batch, compute_loss, build_optimizer)}
    return Task(types.SimpleNamespace(**members), name)


def measure(row: dict[str, str]) -> dict[str, Any]:
    """The largest batch at each capacity, for one model."""
    os.environ |= {"TIMM_FUSED_ATTN": "0", "HF_HUB_OFFLINE": "1"}
    stub_torchvision()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)
    from batchtune.estimate.memory.capacity import Search
    from batchtune.estimate.memory.fit import FittedStep, fit, peak_allocated_bytes
    from batchtune.estimate.tracing.trace import trace_step

    started = time.perf_counter()
    fitting = int(float(row["train_batch_size"]))
    found: dict[str, Any] = {"model": row["model"], "fits": fitting, "fails": LADDER[LADDER.index(fitting) - 1]}
    try:
        task = task_of(published(row), int(row["train_img_size"]))
        step = fit(lambda size: trace_step(task, size, "fp16"))
        if not isinstance(step, FittedStep):
            return found | {"error": step.reason}
        found["allocated"] = [peak_allocated_bytes(step, found[key]) for key in ("fits", "fails")]
        search = Search(step)
        found["largest"] = [search(int(each * GIB)) for each in CAPACITIES_GIB]
    except Exception as error:  # noqa: BLE001 - one model's failure is a row
        found["error"] = str(error)[:200]
    return found | {"seconds": time.perf_counter() - started}


def hit(row: dict[str, Any], place: int) -> bool:
    """Whether a model's estimate at one capacity is in its true bracket."""
    return bool(row["fits"] <= row["largest"][place] < row["fails"])


def hits(rows: list[dict[str, Any]], place: int) -> int:
    return sum(hit(row, place) for row in rows)


def off(row: dict[str, Any], place: int) -> float:
    """How far a model's estimate is from its bracket, as a logarithm of sizes; what is further off counts no more."""
    largest = row["largest"][place]
    return min(FURTHEST, max(0.0, math.log(row["fits"] / largest), math.log((largest + 1) / row["fails"])))


def fitted(rows: list[dict[str, Any]]) -> int:
    """The place of the capacity at which estimates are the least off; the middle one where several are."""
    sums = [sum(off(row, place) for row in rows) for place in range(len(CAPACITIES_GIB))]
    equal = [place for place, found in enumerate(sums) if found == min(sums)]
    return equal[len(equal) // 2]


def cross_validated(rows: list[dict[str, Any]]) -> list[float]:
    """The share of hits in the half that was not fitted on, for random halves."""
    shares, draw = [], random.Random(1)
    for _ in range(SPLITS):
        mixed = draw.sample(rows, len(rows))
        one, other = mixed[::2], mixed[1::2]
        shares.append(hits(other, fitted(one)) / len(other))
    return sorted(shares)


def report(rows: list[dict[str, Any]], command: str) -> str:
    import timm
    import torch

    good = [row for row in rows if "largest" in row]
    one, other = good[::2], good[1::2]
    best, swapped = fitted(one), fitted(other)
    misses = [row for row in good if not hit(row, best)]
    above = max(row["largest"][best] / row["fails"] - 1 for row in good)
    scored, shares = hits(other, best), cross_validated(good)
    lines = [
        "# Estimate against timm's RTX 3090 training batch sizes",
        "",
        f"2026-11-21 · torch {torch.__version__} · timm {timm.__version__} · `{command}`",
        "",
        f"{len(rows)} models drawn at random (seed 0) from the rows below 512, {len(rows) - len(good)} not traced.",
        f"Capacity fitted on {len(one)} models: {CAPACITIES_GIB[best]} GiB of the 24, hits {hits(one, best)}.",
        f"Scored on the other {len(other)}: **{scored} hit the true bracket ({scored / len(other):.1%})**.",
        f"All {len(good)}: {len(good) - len(misses)} hit; the largest estimate is {above:+.1%} off the failing size.",
        f"The halves swapped: {CAPACITIES_GIB[swapped]} GiB, {hits(one, swapped)} of {len(one)} hit. {SPLITS} random",
        f"halves: {sum(shares) / len(shares):.1%} hit in the mean, {shares[SPLITS // 20]:.1%} in the worst twentieth.",
        "",
        "| model missed | fits | fails | estimate | half |",
        "|---|---|---|---|---|",
        *(
            f"| {row['model']} | {row['fits']} | {row['fails']} | {row['largest'][best]} | {half} |"
            for half, rows_of_it in (("fitted on", one), ("scored on", other))
            for row in rows_of_it
            if row in misses
        ),
        "",
        "Hits on all traced models by capacity: "
        + ", ".join(f"{cap} GiB {hits(good, at)}" for at, cap in enumerate(CAPACITIES_GIB)),
        "",
        *(f"- {row['model']}: {row['error']}" for row in rows if "error" in row),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=Path("estimate_timm.jsonl"), help="finished models, to go on from")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "estimate_timm.md")
    options = parser.parse_args()
    rows = [row for row in csv.DictReader(options.data.open()) if int(float(row["train_batch_size"])) < LADDER[0]]
    random.Random(0).shuffle(rows)
    wanted = rows[: options.models]
    done = {}
    if options.rows.exists():
        done = {row["model"]: row for row in map(json.loads, options.rows.read_text().splitlines())}
    left = [row for row in wanted if row["model"] not in done]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=20) as pool, options.rows.open("a") as file:
        for found in pool.imap_unordered(measure, left):
            done[found["model"]] = found
            file.write(json.dumps(found) + "\n")
            file.flush()
    stub_torchvision()
    text = report(
        [done[row["model"]] for row in wanted],
        f"python {sys.argv[0]} --data {options.data.name} --models {options.models}",
    )
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

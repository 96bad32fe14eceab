"""Three ways to batch samples of many lengths within the same memory: one size, a budget of tokens, a size a length.

    python tests/benchmarks/length_sampler.py [--quick] [--result RUN|FILE.json]

takes the largest batches of recipes/lengths on a CPU from `batchtune probe --lengths auto` (or from an earlier result),
trains the same samples for an epoch in each way, prints a table and writes tests/benchmarks/results/length_sampler.md.

Each training is a process of its own, ROUNDS of each way in turns. Tokens are characters of samples, without padding.
Each takes one thread, and its processor's time counts: on a busy machine that of several grows as they wait for each
other, and what the clock says tells of the others. Ways are compared within a round, and the rounds' median is told,
with the least and the greatest. Memory is
what is resident above the imports, as the probe's limit counts it: the peak of each batch, in a second pass over some.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from types import ModuleType

import torch

import batchtune
from batchtune.device.host_memory import HostMemory
from batchtune.report.view.lengths import most_tokens

ROOT = Path(__file__).parents[2]
TASK = ROOT / "recipes" / "lengths" / "model.py"
RESULT = Path(__file__).parent / "results" / "length_sampler.md"
ROUNDS, SAMPLES, BATCHES_MEASURED = 5, 500, 40
LIMIT = "256MiB"
WAYS = {
    "fixed": "one batch size, the longest samples'",
    "tokens": "tokens of that batch, sorted by length",
    "export": "tokens of `report --format fairseq`, sorted by length",
    "ours": "`LengthBatchSampler`",
}


def task() -> ModuleType:
    """The recipe."""
    spec = importlib.util.spec_from_file_location("lengths_task", TASK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(way: str, lengths: list[int], frontier: dict[int, int]) -> list[list[int]]:
    """Indices of an epoch's batches, shuffled."""
    longest = max(frontier)
    drawn = random.Random(0)
    if way == "ours":
        return list(batchtune.LengthBatchSampler(lengths, frontier))
    if way == "fixed":
        order = drawn.sample(range(len(lengths)), len(lengths))
        return [order[start : start + frontier[longest]] for start in range(0, len(order), frontier[longest])]
    budget = frontier[longest] * longest if way == "tokens" else most_tokens(frontier)
    most = None if way == "tokens" else max(frontier.values())
    made = list(by_tokens(lengths, budget, most or len(lengths)))
    drawn.shuffle(made)
    return made


def by_tokens(lengths: list[int], budget: int, most: int) -> Iterator[list[int]]:
    """Neighbours by length, the longest of them times their number at most the budget."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and ((len(batch) + 1) * lengths[index] > budget or len(batch) == most):
            yield batch
            batch = []
        batch.append(index)
    yield batch


def beyond(batch: list[int], lengths: list[int], frontier: dict[int, int]) -> bool:
    """Whether a batch is larger than was measured to train at its length."""
    longest = max(lengths[index] for index in batch)
    return len(batch) > max(size for edge, size in frontier.items() if edge >= longest)


def train(way: str, samples: int, frontier: dict[int, int]) -> dict[str, float]:
    """One epoch in this process, timed; then the peaks of some batches."""
    module = task()
    data = random.Random(1).sample(module.train_dataset(), samples)
    lengths = [module.sample_length(sample) for sample in data]
    epoch = batches(way, lengths, frontier)
    assert sorted(index for batch in epoch for index in batch) == list(range(samples))
    torch.set_num_threads(1)
    memory = HostMemory()
    memory.enforce(memory.describe()[1] or 0)  # measured, not limited
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = module.build_optimizer(model, 1e-3)

    def step(batch: list[int]) -> None:
        module.compute_loss(model, module.collate([data[index] for index in batch])).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(epoch[0])  # what torch loads when it is first used
    clock, processor = time.perf_counter(), time.process_time()
    for batch in epoch:
        step(batch)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    peaks = []
    for batch in epoch[:: max(1, len(epoch) // BATCHES_MEASURED)]:
        memory.release()
        memory.reset_peaks()
        step(batch)
        peaks.append(memory.peaks().reserved_bytes)
    memory.lift()
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in epoch)
    return {
        "batches": len(epoch),
        "beyond": sum(beyond(batch, lengths, frontier) for batch in epoch),
        "tokens": sum(lengths),
        "padding": 1 - sum(lengths) / padded,
        "clock": clock,
        "processor": processor,
        "mean_peak": mean(peaks),
        "largest_peak": max(peaks),
    }


def measured(way: str, samples: int, frontier: dict[int, int]) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--train", way, str(samples), json.dumps(list(frontier.items()))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, list[dict[str, float]]], limit: int) -> list[str]:
    """A row for each way: medians of its rounds."""
    heads = [
        "batches by",
        "batches",
        "padding",
        "tokens per processor-second",
        "against the first, within each round",
    ]
    heads += ["memory used, mean of batches", "largest", "batches beyond what was measured"]
    rows = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    speeds = {way: median(each["tokens"] / each["processor"] for each in rounds) for way, rounds in found.items()}
    for way, rounds in found.items():
        one = rounds[0]
        ratios = sorted(
            first["processor"] / each["processor"] for first, each in zip(found["fixed"], rounds, strict=True)
        )
        ratio = f"{median(ratios):.2f} × ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        used, most = (median(each[name] / limit for each in rounds) for name in ("mean_peak", "largest_peak"))
        rows.append(
            f"| {WAYS[way]} | {one['batches']:,} | {one['padding']:.0%} | {speeds[way]:,.0f} | "
            f"{ratio} | {used:.0%} | {most:.0%} | {one['beyond']} |"
        )
    return rows


def report(result: batchtune.result.Result, samples: int, rounds: int) -> str:
    """The page of results."""
    frontier = {point.length: point.max_batch_size for point in result.probe.lengths}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        ways = list(WAYS)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(measured(way, samples, frontier))
            print(way, found[way][-1], file=sys.stderr)
    edges = ", ".join(f"{length:,}: {batch:,}" for length, batch in frontier.items())
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    attempts = sum(len(point.attempts) for point in result.probe.lengths)
    characters = found["fixed"][0]["tokens"] / samples
    made_by = [
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        f"batchtune {batchtune.__version__}",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
        f"{os.cpu_count()} cores, load {load}",
        "`python tests/benchmarks/length_sampler.py`",
    ]
    limit = f"{result.probe.memory_limit_bytes / 2**20:.0f} MiB"
    about = f"""\
# Batches of samples of many lengths

{" · ".join(made_by)}

{samples:,} functions of Python's standard library, {characters:.0f} characters in the mean and up to {max(frontier):,}.
One epoch of the transformer of recipes/lengths in {limit}, fp32, one thread; {rounds} rounds, medians.
The largest batch at each length, found in {attempts} attempts: {edges}.

"""
    return about + "\n".join(table(found, result.probe.memory_limit_bytes)) + "\n"


def main() -> None:
    """Parses the arguments; prints and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 samples, one round; prints only")
    parser.add_argument("--result", type=Path, help="of an earlier probe with --lengths")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        way, samples, frontier = arguments.train
        print(json.dumps(train(way, int(samples), dict(json.loads(frontier)))))
        return
    if arguments.result:
        result = batchtune.load_result(arguments.result)
    else:
        result = batchtune.probe(
            TASK, lengths="auto", memory_limit=LIMIT, device="cpu", precision="fp32", throughput=False
        )
    page = report(result, 100 if arguments.quick else SAMPLES, 1 if arguments.quick else ROUNDS)
    print(page)
    if not arguments.quick:
        RESULT.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

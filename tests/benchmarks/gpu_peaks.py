"""The estimate against peaks that real steps reached on a GPU; comparing needs none.

    .venv-cuda/bin/python tests/benchmarks/gpu_peaks.py           # compares, writes results/gpu_peaks.md: minutes
    python tests/benchmarks/gpu_peaks.py --measure --seconds 120  # on a GPU: measures anew, writes data/gpu_peaks.json

Cases and sizes are those of data/gpu_peaks.json. These peaks chose the width of the bands. The rules of convolutions.py
are from single convolutions, some of them in steps of thirteen of these cases.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
import estimate_allocator  # noqa: E402
import on_gpu  # noqa: E402
import torch  # noqa: E402
import zoo  # noqa: E402

from batchtune.estimate.commands import EstimateMemory  # noqa: E402
from batchtune.estimate.memory.overheads import confidence  # noqa: E402
from batchtune.estimate.tracing import server, trace  # noqa: E402

DATA, RESULT = HERE / "data" / "gpu_peaks.json", HERE / "results" / "gpu_peaks.md"
CARD = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_017_493_504, "generation": "Hopper", "vendor": "NVIDIA"}
JOBS, MIB = 7, 1 << 20
Peaks = dict[str, Any]  # by size: bytes allocated and reserved


def case_of(name: str) -> zoo.Case:
    return next(case for case in zoo.CASES if case.name == name)


def measured(job: tuple[str, Peaks]) -> tuple[str, Peaks]:
    """Real steps of one case at its sizes."""
    name, peaks = job
    estimate_allocator.LIMITS = ()
    guess = {"peaks": [int(size) for size in peaks], "limits": []}
    return name, {
        str(size): list(found)
        for size, found in estimate_allocator.measured(case_of(name), guess, expandable=False)["peaks"].items()
    }


def measure(seconds: float) -> None:
    """All cases, those that do not end in time as they were before."""
    data = json.loads(DATA.read_text())
    end = time.monotonic() + seconds
    with multiprocessing.get_context("fork").Pool(JOBS, maxtasksperchild=1) as pool:
        jobs = [pool.apply_async(measured, (job,)) for job in data["peaks"].items()]
        for job in jobs:
            try:
                name, found = job.get(max(0.1, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            data["peaks"][name] = found
        pool.terminate()
    card = estimate_allocator.forked(estimate_allocator.card)
    data["machine"] = f"{card['name']}, torch {torch.__version__}, {dt.datetime.now(dt.UTC):%Y-%m-%d}"
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(peaks)}" for name, peaks in data["peaks"].items())
    DATA.write_text(f'{{"machine": {json.dumps(data["machine"])},\n "peaks": {{\n{rows}\n}}}}\n')


def estimated(job: tuple[str, Peaks]) -> tuple[str, SimpleNamespace]:
    """What is estimated for one case at its sizes."""
    name, peaks = job
    case = case_of(name)
    server.warm_up()
    asked = EstimateMemory(
        task=f"{zoo.__file__}:{case.slug}",
        precision=case.precision,
        accumulation_steps=case.accumulation_steps,
        gpus=(CARD,),
        seconds=600.0,
    )
    tracer = trace.Tracer(asked)
    tracer.trace = functools.cache(tracer.trace)  # type: ignore[method-assign]
    step = estimate_allocator._step(tracer, CARD)
    gpu = CARD | {"free_bytes": CARD["memory_bytes"]}
    sure = confidence(tracer.ops, tracer.notes, aligned=True, vendor="NVIDIA", precision=case.precision)
    found = {size: estimate_allocator._expected(step, int(size), gpu) for size in peaks}
    return name, SimpleNamespace(peaks=found, precision=case.precision, sure=sure)


def compare() -> None:
    """Writes the table."""
    data = json.loads(DATA.read_text())
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = dict(pool.imap_unordered(estimated, data["peaks"].items()))
    rows, errors, beyond = [], ([], []), 0
    for name, truth in data["peaks"].items():
        mine = found[name]
        for size, real in truth.items():
            off = [guess / true - 1 for guess, true in zip(mine.peaks[size], real, strict=False)]
            for each, kept in zip(off, errors, strict=True):
                kept.append((abs(each), name))
            is_beyond = real[1] > mine.peaks[size][1] * (1 + mine.sure.band)
            beyond += is_beyond
            told = f"{mine.sure.name}, {mine.sure.band:.0%}" + (" **beyond**" if is_beyond else "")
            allocated, reserved = (f"{true / MIB:,.0f} | {each:+.2%}" for true, each in zip(real, off, strict=True))
            rows.append(f"| {name} | {mine.precision} | {size} | {allocated} | {reserved} | {told} |")
    spreads = []
    for what, kept in zip(("allocated", "reserved"), errors, strict=True):
        sizes = sorted(each for each, _ in kept)
        most = sizes[math.ceil(0.9 * len(sizes)) - 1]
        middle, (worst, case) = statistics.median(sizes), max(kept)
        spreads.append(f"{what}: median {middle:.2%}, nine in ten within {most:.1%}, worst {worst:.0%} ({case})")
    text = [
        "# The estimate against a GPU",
        "",
        f"Peaks of real steps, in MiB ({data['machine']}), and by how much the estimate is off.",
        "fp32 is as torch has it, with convolutions in TF32. Made by",
        "`.venv-cuda/bin/python tests/benchmarks/gpu_peaks.py`.",
        "",
        *(f"- {line}" for line in spreads),
        f"- above the band that the answer carries: {beyond} of {len(rows)}",
        "",
        "| case | precision | batch | allocated | estimate | reserved | estimate | confidence |",
        "|---|---|---:|---:|---:|---:|---:|---|",
        *rows,
    ]
    RESULT.write_text("\n".join(text) + "\n")
    print("\n".join(text[5:9]))


if __name__ == "__main__":
    on_gpu.run(__doc__, measure, compare, seconds=120.0)

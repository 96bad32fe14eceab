"""Trainings as their authors write them: what each costs to bring, what batchtune says of it, and whether that holds.

    python tests/real/measure.py                    # all; half an hour on a quiet machine
    python tests/real/measure.py --only gpt,unet    # some of them
    python tests/real/measure.py --resume           # those that have no row yet
    python tests/real/measure.py --parts memory     # on a busy machine, and
    python tests/real/measure.py --parts times      # the rest of each row, later

writes tests/benchmarks/results/real.md, a row for each training. What a training
needs and is not installed is skipped by name: `pip install ".[recipes,lightning,transformers]" peft torch_geometric`.
"""

import argparse
import datetime as dt
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cases import CASES, Case
from plain import STEPS

from batchtune import __version__

HERE = Path(__file__).parent
RESULT = HERE.parent / "benchmarks" / "results" / "real.md"
GPU, SEEDS, BEYOND = "4090", 3, 1.25
SHARES = (1, 0.97, 0.9)  # of the largest batch, tried in a plain loop until one trains
BUDGET = ["budget.run=3s", "budget.total=60s", "budget.trials=12", "confirm.seeds=3", "confirm.top=1"]
HEADER = f"""\
# Trainings as people write them

{{facts}}

- glue: lines of the training's file that are there for batchtune alone. Besides, each has the same configuration of six
  lines (task, baseline, metric).
- seconds: from the start of `probe` to its answer, with its imports and the final check; of processors, of the wall.
- probe: the largest batch within the limit, and the one that did not train.
- plain: the training's own loop, shuffled, with that batch and the same limit in a process without batchtune: does it
  train {STEPS} steps (or for a minute)? Else 97 or 90 % of it? Then with {BEYOND} times that batch,
  which trains where samples differ: a probe's batch is made of the largest.
- estimate: the largest batch (and the safe one) that would fit on an RTX {GPU}.
- not run: `--parts memory` does without, as a busy machine asks; trainings without a row have not been measured yet.
- tune: batch size @ learning rate, and its speed-up over the baseline, by a study of a minute: too little for a
  narrow interval.
- checked: the same by the training's own loop with what `report --format env` wrote, in {SEEDS} fresh seeds of each;
  `-` where a run did not meet the target within twice budget.run. On a machine that others use times illustrate and
  prove nothing; how much longer the wall's seconds are than the processors' tells how busy it was.

| training | glue | seconds | probe, limit | plain | {BEYOND} × | estimate | tune | speed-up | checked |
|---|---:|---:|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str
    wall: float
    processor: float

    @property
    def why(self) -> str:
        return (self.err.strip().splitlines() or [f"exit {self.code}"])[-1].replace("|", "/")[:160]


def call(folder: Path, *command: object, seconds: float = 600, **environment: str) -> Finished:
    """Runs Python with these arguments in a folder."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=whole | {"OMP_WAIT_POLICY": "passive"} | environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, err = 124, "", f"no end after {seconds:.0f} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(code, out, err, time.perf_counter() - began, processor)


def batchtune(folder: Path, *arguments: object, **options: Any) -> Finished:
    return call(folder, "-m", "batchtune", *arguments, "-q", **options)


def plain(folder: Path, *arguments: object) -> Any:
    """What plain.py found; None where it failed for another reason than memory."""
    done = call(folder, HERE / "plain.py", *arguments)
    lines = [line for line in done.out.splitlines() if line.startswith(("{", "["))]
    if done.code or not lines:
        print(f"plain.py {' '.join(map(str, arguments))}: {done.why}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def row(case: Case, parts: list[str], before: list[str]) -> list[str]:
    """The cells of a training; a part that is not asked for keeps what it was `before`."""
    if case.missing:
        return [case.name, str(case.glue), f"skipped: no {', '.join(case.missing)}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(case.configuration, encoding="utf-8")
        return [
            case.name,
            str(case.glue),
            *(
                [*probed(case, folder), estimated(case, folder)]
                if "memory" in parts
                else before[2:7] or ["not run"] * 5
            ),
            *(tuned(case, folder) if "times" in parts else before[7:] or ["not run"]),
        ]


def probed(case: Case, folder: Path) -> list[str]:
    options = ("--memory-limit", f"{case.limit}MiB", "--precision", case.precision, "--no-throughput", "--json")
    done = batchtune(folder, "probe", case.task, *options)
    seconds = f"{done.processor:.0f}, {done.wall:.0f}"
    if done.code:
        return [seconds, f"exit {done.code}: {done.why}", "", ""]
    probe = json.loads(done.out)["probe"]
    largest, failing = probe["max_batch_size"], probe.get("first_failing_batch_size")
    told = f"{largest:,} ({failing or 'none'} {probe['limited_by']}), {case.limit} MiB"
    more = "" if probe["limited_by"] == "dataset" else trains(case, folder, int(BEYOND * largest) + 1)
    return [seconds, told, share_that_trains(case, folder, largest), more]


def trains(case: Case, folder: Path, batch_size: int) -> str:
    """yes, or at which step the plain loop ran out of memory."""
    found = plain(folder, "trains", case.name, batch_size, case.limit)
    if found is None:
        return "failed"
    return "yes" if found["trains"] else f"no, at step {found['steps']}" if "why" in found else "too few samples"


def share_that_trains(case: Case, folder: Path, largest: int) -> str:
    """yes, or how much of the largest batch does."""
    for share in SHARES:
        if (said := trains(case, folder, int(share * largest))) == "yes":
            return said if share == 1 else f"{share:.0%} of it"
    return said


def estimated(case: Case, folder: Path) -> str:
    done = batchtune(folder, "estimate", case.task, "--gpu", GPU, "--precision", case.precision, "--json")
    if done.code:
        return f"exit {done.code}: {done.why}"
    found = json.loads(done.out)["estimates"][0]
    sizes = [found.get(name) for name in ("max_batch_size", "safe_max_batch_size")]
    if None in sizes:
        return (found["notes"] or ["none"])[0][:160].replace("|", "/")
    over = "at least " if found.get("limited_by") == "max" else ""
    return f"{over}{sizes[0]:,} ({sizes[1]:,})"


def tuned(case: Case, folder: Path) -> list[str]:
    done = batchtune(folder, "tune", "config.yaml", *BUDGET, "--json")
    result = json.loads(done.out) if done.out.startswith("{") else {}
    found = result.get("recommendation")
    if not found:
        return [f"exit {done.code}: {done.why}"]
    chosen = f"{found['global_batch_size']:,} @ {found['learning_rate']:.2g}"
    if "speedup_over_baseline" not in found:
        return [chosen, found["reason"][:120].replace("|", "/")]
    speedup = found["speedup_over_baseline"]
    claimed = f"{speedup['median']:.2f} ({speedup['low']:.2f} to {speedup['high']:.2f})"
    if speedup.get("at_least"):
        claimed = f"at least {speedup['low']:.2f}"
    return [chosen, claimed, checked(case, folder, result)]


def checked(case: Case, folder: Path, result: dict[str, Any]) -> str:
    """The speed-up in the training's own loop, at the settings that a shell would load."""
    lines = batchtune(folder, "report", "--format", "env").out.splitlines()
    settings = dict(line.partition("=")[::2] for line in lines if "=" in line and not line.startswith("#"))
    batch_size = int(settings["BATCH_SIZE"]) * int(settings.get("GRADIENT_ACCUMULATION_STEPS", 1))
    horizon = next((each.get("total_steps") for each in result["trials"] if each["role"] == "baseline"), None)
    baseline = [case.batch_size, case.learning_rate, horizon]
    recommended = [batch_size, float(settings["LEARNING_RATE"]), result["recommendation"].get("total_steps")]
    asked = {
        "metric": case.metric,
        "goal": case.goal,
        "target": result["target"]["value"],
        "every": result["recommendation"]["time_to_target_seconds"]["median"] / 10,
        "limit": 6.0,
        "seeds": SEEDS,
        "settings": [baseline, recommended],
    }
    times = plain(folder, "race", case.name, json.dumps(asked))
    if times is None:
        return "failed"
    slow, fast = ([each for each in some if each is not None] for some in times)
    if len(slow) < SEEDS or len(fast) < SEEDS:
        return f"- ({len(slow)} and {len(fast)} of {SEEDS} met it)"
    if not all(slow + fast):  # the first step is not timed: it sets things up
        return "the first step meets the target"
    ratios = sorted(a / b for a in slow for b in fast)
    return f"{median(slow) / median(fast):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def kept() -> dict[str, str]:
    """The rows that are there, by training."""
    lines = RESULT.read_text(encoding="utf-8").splitlines() if RESULT.exists() else []
    names = {case.name for case in CASES}
    return {
        line.split("|")[1].strip(): line
        for line in lines
        if line.startswith("|") and line.split("|")[1].strip() in names
    }


def write(rows: dict[str, str]) -> None:
    """The table, in the order of the cases; what people wrote below it stays."""
    versions = f"batchtune {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    facts = f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, {versions}, {os.cpu_count()} cores. "
    header = HEADER.format(facts=facts + "Command: `python tests/real/measure.py`")
    notes = RESULT.read_text(encoding="utf-8").rpartition("|\n")[2] if RESULT.exists() else ""
    lines = [header, *(rows[case.name] for case in CASES if case.name in rows), notes]
    RESULT.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of trainings, with commas between")
    parser.add_argument("--resume", action="store_true", help="leave out those that have a row")
    parser.add_argument("--parts", default="memory,times", help="times are what a busy machine would only blur")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    for case in CASES:
        if case.name not in wanted or (options.resume and case.name in kept()):
            continue
        before = [cell.strip() for cell in kept().get(case.name, "").split("|")[1:-1]]
        cells = row(case, options.parts.split(","), before)
        line = f"| {' | '.join(cells + [''] * (10 - len(cells)))} |"
        print(line, flush=True)
        write(kept() | {case.name: line})


if __name__ == "__main__":
    main()

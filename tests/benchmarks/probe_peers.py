"""batchtune's probe against other batch-size finders, side by side: attempts, OOMs, seconds, and whether answers hold.

    pip install -c constraints.txt . lightning==2.6.6 accelerate==1.15.0
    python tests/benchmarks/probe_peers.py                    # eight models on a CPU; run it on an idle machine
    python tests/benchmarks/probe_peers.py --models Mlp,Jump  # a part, which is printed but not kept
    python tests/benchmarks/probe_peers.py --plain            # on a CPU: do its answers hold in plain processes?
    python tests/benchmarks/probe_peers.py --plain --models FILE:CLASS,…  # the same of tasks of your own, not kept
    python tests/benchmarks/probe_peers.py --device cuda      # three models at 8, 24, 80 GiB and the whole card

writes tests/benchmarks/results/probe_peers.md (…_cuda.md, …_plain.md). Every method runs in a process of its own
with nothing beside it, for at most so many seconds as `caps` says; afterwards the true boundary is found by bisection
and every answer trains on, each size in a fresh process.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from probe_methods import LIGHTNING, METHODS, STEPS, TOLERANCE, class_of
from probe_tasks import ON_CPU, ON_GPU, TASKS

from batchtune import __version__

HERE = Path(__file__).parent
MIB, GIB = 1 << 20, 1 << 30
UNFINISHED = "did not finish"
BOUNDARY_STEPS, LATER_STEPS = 5, 200
RESOLUTION = 0.005  # how near the bisection in fresh processes comes to the true boundary
GPU_LIMITS = {"8 GiB": 8 * GIB, "24 GiB": 24 * GIB, "80 GiB": 80 * GIB}
WHOLE = 0.95  # share of a card
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
PLAIN_RUNS, PLAIN_STEPS, BEYOND = 5, 20, 1.03
HEADER = f"""\
# The largest batch: batchtune and its peers

{{facts}}

Each method in a process of its own, one after the other; {STEPS} AdamW steps an attempt in fp32, one batch again and
again. The limit counts from the process as it is once torch and the task are imported. On a CPU it is one of resident
memory, with two threads and the allocator as it is.

- attempts: batchtune's are search + final check, which is 20 steps in a fresh process.
- seconds: the whole process with its imports; batchtune's with its children and the final check.
- true: the largest size that trains {BOUNDARY_STEPS} steps in a fresh process of plain PyTorch; two bisections.
- later: whether the answer trains {LATER_STEPS} steps in such a process; where a larger one of the same model did, yes.
- Lightning: {{lightning}}; all boundaries on a CPU are below 8192, where it ends whatever max_val it is given.
- Accelerate starts at the power of two above the true boundary. Doubling + bisection, from 2 samples on to
  {TOLERANCE:.0%}, is in batchtune's own worker, without a final check.
- What takes more than {{cap}} s did not finish.

| model, limit | method | attempts | OOMs | seconds | answer | true | within 1 % | later |
|---|---|---:|---:|---:|---:|---:|---|---|"""


@dataclass(frozen=True)
class Case:
    """A task at one memory limit, and where it runs."""

    task: str
    limit: str
    limit_bytes: int
    device: str


@dataclass
class Found:
    """What became of one method on one case."""

    method: str
    seconds: float = 0.0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    answer: int | None = None
    trouble: str = ""
    later: str = ""

    @property
    def ooms(self) -> int:
        return sum(each["outcome"] == "oom" for each in self.attempts)


def caps(device: str) -> tuple[int, int]:
    """The most seconds that a method may take, and training on at one size; a whole GPU takes longer to fill."""
    return (100, 1000) if device == "cpu" else (400, 3000)


def call(case: Case, method: str, *options: object, cap: float | None = None) -> tuple[list[dict[str, Any]], float]:
    """What a fresh process told, and how long it lived; one that is stopped at the cap told less, one that could not
    begin its error alone.

    Args:
        case: the task and its limit.
        method: of probe_methods.py.
        *options: its own.
        cap: seconds after which it is stopped; None: those of a method.
    """
    command = [sys.executable, HERE / "probe_methods.py", method, case.task, case.device, case.limit_bytes, *options]
    paths = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths} | ENVIRONMENT
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=environment,
            capture_output=True,
            timeout=cap or caps(case.device)[0],
            check=False,
        )
        said, error = done.stdout, ""
        if done.returncode == 1:
            error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired as stopped:
        said, error = stopped.stdout or b"", ""
    told = [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]
    return told or ([{"error": error}] if error else []), time.perf_counter() - began


def search(case: Case, method: str, start: int, cap: float | None = None) -> Found:
    """One method, from the start of its process to its end; Lightning's warm-up, which is ours, is left out.

    One that does not end within `cap` seconds says so as its trouble.
    """
    cap = cap or caps(case.device)[0]
    told, seconds = call(case, method, "--size", start, cap=cap)
    found = Found(method, seconds, [each for each in told if "outcome" in each])
    last = told[-1] if told else {}
    found.seconds -= sum(each.get("warm_up_seconds", 0.0) for each in told)
    found.answer = last.get("answer")
    print(f"{case.task}, {method}: {found.seconds:.1f} s, {len(found.attempts)} attempts", file=sys.stderr, flush=True)
    if "answer" not in last:
        found.trouble = last.get("error") or (UNFINISHED if seconds >= cap else "died")
    return found


def outcome(case: Case, size: int, steps: int) -> str:
    """What training at one size comes to in a fresh process.

    Raises:
        RuntimeError: it could not begin.
    """
    told, seconds = call(case, "try", "--size", size, "--steps", steps, cap=caps(case.device)[1])
    if told and "error" in told[-1]:
        raise RuntimeError(told[-1]["error"])
    found: str = told[-1]["outcome"] if told else "died"
    print(f"{case.task}, {steps} steps at {size}: {seconds:.1f} s, {found}", file=sys.stderr, flush=True)
    return found


def boundary(fits: Callable[[int], bool], hint: int) -> int:
    """The largest size that fits, to RESOLUTION, looking around `hint` first; 0: none does."""
    low, high, size, step = 0, None, hint, max(1, hint // 50)
    while high is None or high - low > max(1, int(RESOLUTION * low)):
        low, high = (size, high) if fits(size) else (low, size)
        if high is None:
            size, step = low + step, 2 * step
        elif low == 0:
            size, step = max(1, high - step), 2 * step
        else:
            size = (low + high) // 2
    return low


def compare(case: Case, pool: ThreadPoolExecutor) -> tuple[list[Found], tuple[int, int]]:
    """All methods on one case, and the true boundary as two bisections found it (equal, unless memory is not)."""
    first = search(case, "batchtune", 0)

    def bisect(hint: int) -> int:
        return boundary(lambda size: outcome(case, size, BOUNDARY_STEPS) == "fit", hint)

    near = first.answer or 64
    low, high = sorted(pool.map(bisect, (near, near + max(1, near // 7))))
    start = 1 << high.bit_length()  # the power of two above: as good a start as a user can name
    found = [first, *(search(case, method, start) for method in METHODS if method != "batchtune")]
    later: dict[int, str] = {}
    for size in sorted({each.answer for each in found if each.answer}, reverse=True):
        later[size] = "fit" if "fit" in later.values() else outcome(case, size, LATER_STEPS)
    for each in found:
        each.later = later[each.answer] if each.answer else ""
    return found, (low, high)


def taken(case: Case, size: int) -> list[float]:
    """MiB of resident memory that training at one size takes above the imports, in so many plain processes."""
    told = [call(case, "try", "--size", size, "--steps", PLAIN_STEPS, cap=caps("cpu")[1])[0] for _ in range(PLAIN_RUNS)]
    return sorted(each[-1]["bytes"] / MIB for each in told)


def plain_row(case: Case) -> str:
    """Whether the answer holds in plain processes, and whether a little more would."""
    found = search(case, "batchtune", 0, cap=caps("cpu")[1])
    if not found.answer:
        return f"| {case.task}, {case.limit} | {found.trouble} | | | | | |"
    limit, here = case.limit_bytes / MIB, taken(case, found.answer)
    more = taken(case, int(BEYOND * found.answer) + 1)
    cells = [f"{each[0]:.0f} to {each[-1]:.0f}" for each in (here, more)]
    holds, is_near = here[-1] <= limit, more[-1] > limit
    told = ["yes" if each else "**no**" for each in (holds, is_near)]
    seconds = f"{found.seconds:.0f}"
    row = [f"{Path(case.task).name}, {case.limit}", seconds, f"{found.answer:,}", cells[0], told[0], cells[1], told[1]]
    return f"| {' | '.join(row)} |"


def is_right(answer: int | None, truth: tuple[int, int]) -> bool:
    low, high = truth
    return answer is not None and low - max(1, TOLERANCE * low) <= answer <= high + max(1, TOLERANCE * high)


def rows(case: Case, found: list[Found], truth: tuple[int, int]) -> Iterator[str]:
    true = f"{truth[0]:,}" if truth[0] == truth[1] else f"{truth[0]:,} to {truth[1]:,}"
    for each in found:
        final = sum(attempt.get("final", False) for attempt in each.attempts)
        cells = [
            f"{case.task}, {case.limit}",
            each.method,
            f"{len(each.attempts) - final} + {final}" if final else f"{len(each.attempts)}",
            f"{each.ooms}",
            f"{each.seconds:.1f}",
            f"{each.answer:,}" if each.answer is not None else each.trouble.replace("|", "/"),
            true,
            "yes" if is_right(each.answer, truth) else "**no**",
            {"": "", "fit": "yes"}.get(each.later, f"**{each.later}**"),
        ]
        yield f"| {' | '.join(cells)} |"


def goals(results: list[tuple[Case, list[Found], tuple[int, int]]]) -> Iterator[str]:
    """The goals, each with the figures that meet or miss it."""

    def goal(met: bool, text: str) -> str:
        return f"- {'met' if met else '**not met**'}: {text}"

    ours = [found[0] for _, found, _ in results]
    right = sum(is_right(found[0].answer, truth) for _, found, truth in results)
    yield goal(right == len(results), f"within the tolerance of the true boundary on {right} of {len(results)}")
    attempts, ooms = median(len(each.attempts) for each in ours), median(each.ooms for each in ours)
    searched = median(sum(not attempt["final"] for attempt in each.attempts) for each in ours)
    text = f"median attempts {attempts:g} (goal 6; {searched:g} without the final check) and OOMs {ooms:g} (goal 2)"
    yield goal(attempts <= 6 and ooms <= 2, text)
    theirs = [next(each for each in found if each.method == "Lightning binsearch") for _, found, _ in results]
    pairs = [
        (our, their) for our, their in zip(ours, theirs, strict=True) if their.answer or their.trouble == UNFINISHED
    ]
    ratios = sorted(their.seconds / our.seconds for our, their in pairs)
    text = f"{ratios[0]:.1f} to {ratios[-1]:.1f}, median {median(ratios):.1f}" if ratios else "nowhere"
    text = f"Lightning's binsearch took so many times batchtune's seconds: {text} (goal 3; "
    yield goal(all(ratio >= 3 for ratio in ratios), f"{text}it raised an error on {len(results) - len(pairs)})")
    smaller = sum((our.answer or 0) < (their.answer or 0) for our, their in zip(ours, theirs, strict=True))
    yield goal(not smaller, f"a smaller answer than Lightning's binsearch on {smaller}")
    failed = sum(each.later != "fit" for each in ours)
    yield goal(not failed, f"answers that did not live through {LATER_STEPS} steps: {failed}")


def header(device: str) -> str:
    facts = [str(dt.datetime.now(tz=dt.UTC).date()), f"batchtune {__version__}"]
    facts += [f"{name} {version(name)}" for name in ("torch", "lightning", "accelerate")]
    facts += [f"Python {platform.python_version()}", device, f"`python {' '.join(sys.argv)}`"]
    lightning = ", ".join(f"{name} {value}" for name, value in LIGHTNING.items())
    return HEADER.format(facts=" · ".join(facts), lightning=lightning, cap=caps(device)[0])


def cases(device: str, names: list[str]) -> Iterator[Case]:
    for name in names:
        limits = {f"{TASKS[name].limit_mib} MiB": TASKS[name].limit_mib * MIB}
        if device != "cpu":
            import torch

            whole = torch.cuda.mem_get_info(device)[1]
            limits = {text: limit for text, limit in GPU_LIMITS.items() if limit < whole}
            limits["whole"] = int(WHOLE * whole)
        yield from (Case(name, text, limit, device) for text, limit in limits.items())


PLAIN_HEADER = f"""\
# A CPU's answers in plain processes

{{facts}}

Resident memory (VmHWM) above the process as it is once torch and the task are imported, in MiB, of {PLAIN_RUNS} plain
processes of {PLAIN_STEPS} AdamW steps, with the allocator as it is: the least and the most of them.

| model, limit | seconds | answer | takes | within the limit | {BEYOND} times the answer | beyond it |
|---|---:|---:|---|---|---|---|"""


def compare_with_plain(names: list[str], *, is_kept: bool) -> None:
    facts = f"{dt.datetime.now(tz=dt.UTC).date()} · batchtune {__version__} · torch {version('torch')} · "
    facts += f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores · `python {' '.join(sys.argv)}`"
    lines = [PLAIN_HEADER.format(facts=facts)]
    print(*lines, flush=True)
    for name in names:
        task = class_of(name)
        lines.append(plain_row(Case(name, f"{task.limit_mib} MiB", task.limit_mib * MIB, "cpu")))
        print(lines[-1], flush=True)
        if is_kept:
            (HERE / "results" / "probe_peers_plain.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", help=f"of {', '.join(TASKS)}")
    given = parser.parse_args()
    usual = [task.__name__ for task in (ON_CPU if given.device == "cpu" else ON_GPU)]
    names = given.models.split(",") if given.models else usual
    if given.plain:
        compare_with_plain(names, is_kept=not given.models)
        return
    if unknown := set(names) - set(usual):
        parser.error(f"no such model on {given.device}: {', '.join(sorted(unknown))}; there are {', '.join(usual)}")
    lines, results = [header(given.device)], []
    print(*lines, flush=True)
    with ThreadPoolExecutor(2 if given.device == "cpu" else 1) as pool:
        for case in cases(given.device, names):
            found, truth = compare(case, pool)
            results.append((case, found, truth))
            lines += (new := list(rows(case, found, truth)))
            print("\n".join(new), flush=True)
    lines += (new := ["", *goals(results)])
    print("\n".join(new))
    if not given.models:
        kind = "" if given.device == "cpu" else "_cuda"
        (HERE / "results" / f"probe_peers{kind}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Everything that only a real GPU can tell, in calls of a few minutes, the most telling part first.

    python3 tests/gpu/campaign.py --output DIR                    # again with the same DIR: goes on where it ended
    python3 tests/gpu/campaign.py --output DIR --parts probe,mfu  # these alone, once more
    .venv-cuda/bin/python tests/gpu/campaign.py --output DIR --rig --seconds 3600  # the rig's figures: a fake H100's

writes gpu_campaign.json and gpu_campaign.md there, anew after each part. A part is a process of its own with the time
that it took on an H100, its most telling cases first: one that fails or hangs costs only itself, and one that the time
does not suffice for keeps the cases it has and goes on with the others in the next call. All of it takes some 17
minutes. With `--rig` the figures are those that stand beside the measured ones later: once all parts are done, they go
to results/gpu_campaign_rig.json, too.
batchtune need not be installed; torchvision, timm, transformers, lightning and accelerate should be.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = [str(folder) for folder in (ROOT, HERE, HERE.parent, HERE.parent / "benchmarks")]
sys.path[:0] = PATHS

import campaign_memory  # noqa: E402 - batchtune need not be installed
import campaign_report  # noqa: E402
import campaign_work  # noqa: E402

Row = dict[str, Any]
Rows = dict[str, Row]  # by their cases
RIG = ROOT / "tests" / "benchmarks" / "results" / "gpu_campaign_rig.json"
PACKAGES = ("torch", "torchvision", "timm", "transformers", "pytorch-lightning", "accelerate", "optuna", "nvidia-ml-py")
LEAST_SECONDS = 5.0  # no part is begun with less
UNFINISHED = {"state": "unfinished", "seconds": 0.0}
TOLD = 2500  # characters of an error


@dataclass(frozen=True)
class Part:
    """One question to the GPU.

    Attributes:
        work: yields a row for each case as it is measured; with `quick`, few and small ones. It is given the rows of
            earlier calls by their cases, and leaves those out as far as they can be had alone; of two rows of one case
            the later counts.
        judge: the goals, from the rows there are.
        seconds: what the part needs on an H100; it has them while there is time, and what others leave of theirs.
    """

    title: str
    work: Callable[[bool, Rows], Iterator[Row]]
    judge: Callable[[list[Row]], list[Row]]
    seconds: float


PARTS = {
    "recipe": Part("A recipe tuned in bf16", campaign_work.recipe, campaign_work.judge_recipe, 90),
    "probe": Part("Probe against the plain loop", campaign_memory.probes, campaign_memory.judge_probes, 200),
    "mfu": Part("Throughput and MFU in bf16", campaign_work.throughput, campaign_work.judge_throughput, 100),
    "estimate": Part("Estimate against measured peaks", campaign_memory.estimates, campaign_memory.judge_estimates, 80),
    "peers": Part("Probe beside its peers", campaign_memory.peers, campaign_memory.judge_peers, 180),
    "sensors": Part("Sensors under load, faults", campaign_work.sensors, campaign_work.judge_sensors, 90),
    "runs": Part("Where the time of a run goes", campaign_work.runs, campaign_work.judge_runs, 30),
    "energy": Part("Energy", campaign_work.energy, campaign_work.judge_energy, 60),
    "tests": Part("The tests of tests/gpu", campaign_work.tests, campaign_work.judge_tests, 180),
}


def machine() -> Row:
    """What the figures belong to; the device is asked in a process of its own, which batchtune starts."""
    import batchtune

    found = batchtune.environment("cuda")["environment"]
    names = ("device", "device_memory_bytes", "driver", "cuda", "allocator_conf", "torch")
    facts = {name: found[name] for name in names if found.get(name) is not None}
    facts |= {"batchtune": batchtune.__version__, "python": platform.python_version(), "processors": os.cpu_count()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def on_the_rig() -> contextlib.AbstractContextManager[Any]:
    """A fake H100 for all that starts meanwhile, whose kernels take about as long as the real one's."""
    import fake_gpu

    clock = {"launch_seconds": 5e-6, "thread_seconds": 1e-11, "flops": 4e14}
    power = {"idle_watts": 70, "full_watts": 700}
    kind = {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "multiprocessors": 132, "context_bytes": "500MiB"}
    return fake_gpu.machine(fake_gpu.Card("81559MiB", **kind, **clock, **power))


def read(kept: Path) -> Rows:
    """The rows in a part's file, the later of two with the same case; a line that was cut short is none."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {row["case"]: row for row in (json.loads(line) for line in lines if line.endswith("}"))}


def work(name: str, folder: Path, *, quick: bool) -> None:
    """Does one part in this process: rows as lines of JSON on standard output, all else that is printed beside them."""
    rows, there = os.fdopen(os.dup(1), "w"), read(folder / f"{name}.jsonl")
    os.dup2(2, 1)
    for row in PARTS[name].work(quick, there):
        print(json.dumps(row), file=rows, flush=True)


def run(name: str, folder: Path, limit: float, *, quick: bool) -> Row:
    """One part in a process of its own, with what it started ended at its limit, if it lasts as long."""
    command = [sys.executable, sys.argv[0], "--part", name, "--output", str(folder), *(["--quick"] if quick else [])]
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
    began, kept = time.perf_counter(), folder / f"{name}.jsonl"  # it stays if we are ended, too
    known = len(read(kept))
    with kept.open("a") as rows, tempfile.TemporaryFile() as errors:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whoever asks for a GPU may fork afterwards
        child = subprocess.Popen(command, stdout=rows, stderr=errors, env=environment, process_group=0)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()[-TOLD:]
    found = list(read(kept).values())
    record = {"state": "done", "seconds": round(time.perf_counter() - began, 1), "rows": found}
    if code:
        record |= {"state": "failed", "error": said.rpartition("\n")[2] if code > 0 else f"signal {-code}", "end": said}
    elif code is None:
        state = "unfinished" if len(found) > known else "stopped"  # nothing new in all its time: not tried again
        record |= {"state": state, "error": f"had {limit:.0f} s, {len(found)} rows are there", "end": said}
    if code is None and limit < PARTS[name].seconds:  # it had not what it needs
        record["state"] = "unfinished"
    if record["state"] != "unfinished":
        kept.unlink()
    return record


def judged(part: Part, rows: list[Row]) -> list[Row]:
    """The goals; one that the rows there are do not suffice for is missed, and says why."""
    try:
        return part.judge(rows)
    except Exception as error:  # noqa: BLE001 - rows of a part that was cut short
        return [campaign_report.goal("all of it measured", f"{type(error).__name__}: {error}", met=False)]


def write(folder: Path, campaign: Row) -> None:
    """Both files, each replaced in one go."""
    rig = json.loads(RIG.read_text()) if RIG.exists() else {"parts": {}}
    titles = {name: part.title for name, part in PARTS.items()}
    texts = {"json": json.dumps(campaign, indent=1), "md": campaign_report.markdown(campaign, rig, titles)}
    for ending, text in texts.items():
        new = folder / f"gpu_campaign.{ending}.new"
        new.write_text(text + "\n")
        new.replace(folder / f"gpu_campaign.{ending}")


def begin(folder: Path, *, quick: bool) -> Row:
    """The campaign as an earlier call left it in the folder, or a new one.

    Raises:
        SystemExit: there is no GPU here, or the folder's figures are another one's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        facts = machine()
    except Exception as error:  # noqa: BLE001 - whatever keeps us from the device is the one thing to tell
        raise SystemExit(f"no campaign without a GPU: {error}") from None
    old = folder / "gpu_campaign.json"
    if not old.exists():
        return {"machine": facts, "began": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC", "parts": {}}
    campaign: Row = json.loads(old.read_text())
    if campaign["machine"]["device"] != facts["device"]:
        raise SystemExit(f"--output {folder}: the figures there are of {campaign['machine']['device']}; name another")
    if campaign["quick"] != quick:
        raise SystemExit(
            f"--output {folder}: the figures there are of {'all' if quick else 'few and small'} cases; name another"
        )
    return campaign


def main() -> None:
    """Does the parts that are missing, as long as there is time, and keeps each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder of the report, and of what an earlier call left")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}: these alone, also if they are there")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="for all of it; what is left waits for the next call"
    )
    parser.add_argument("--quick", action="store_true", help="few and small cases: shows that every part works")
    parser.add_argument("--rig", action="store_true", help="on a fake H100, for the figures to compare with")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        work(given.part, given.output, quick=given.quick)
        return
    names = given.parts.split(",") if given.parts else list(PARTS)
    if given.output is None or set(names) - set(PARTS):
        parser.error(f"needs --output DIR, and --parts of {','.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that no part outlives us
    with on_the_rig() if given.rig else contextlib.nullcontext():
        campaign = measure(given, names)
    if given.rig and not given.quick and all(part["state"] == "done" for part in campaign["parts"].values()):
        RIG.write_text(json.dumps(campaign, indent=1) + "\n")
    print(campaign_report.summary(campaign, {name: part.title for name, part in PARTS.items()}))


def measure(given: argparse.Namespace, names: Sequence[str]) -> Row:
    """The campaign with what these parts came to, as far as there was time."""
    end = time.perf_counter() + given.seconds
    campaign = begin(given.output, quick=given.quick)
    command = " ".join(sys.argv).replace(str(given.output), given.output.name)
    campaign |= {"command": f"python3 {command}", "quick": given.quick}
    records = campaign["parts"]
    open_ones = [name for name in names if given.parts or records.get(name, UNFINISHED)["state"] == "unfinished"]
    for place, name in enumerate(open_ones):
        left = end - time.perf_counter()
        if left < LEAST_SECONDS:
            break
        print(f"{name}: ", end="", file=sys.stderr, flush=True)
        share = PARTS[name].seconds / sum(PARTS[each].seconds for each in open_ones[place:])
        limit = min(left, max(PARTS[name].seconds, share * left))
        record = run(name, given.output, limit, quick=given.quick)
        before = records.get(name, UNFINISHED)
        record["seconds"] += before["seconds"] if before["state"] == "unfinished" else 0.0
        records[name] = record | {"goals": judged(PARTS[name], record["rows"])}
        write(given.output, campaign)
        print(f"{record['state']} in {record['seconds']:.1f} s {record.get('error', '')}", file=sys.stderr, flush=True)
    return campaign


if __name__ == "__main__":
    main()

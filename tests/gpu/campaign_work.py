"""The parts of the campaign that need work done: sensors, faults, throughput, a recipe, energy, and the tests."""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign_report import goal

Row = dict[str, Any]
Rows = dict[str, Row]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = HERE / "campaign_models.py"
MIB, GIB = 1 << 20, 1 << 30
FAULTS = ("OutOfMemory", "Killed", "Asserted")
GIVEN_BACK = 64 * MIB  # the driver's own books move by this much


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns from a process of its own, which has the only context."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


# --- sensors ----------------------------------------------------------------------------------------------------------


def _idle() -> Callable[[], None]:
    return lambda: time.sleep(0.1)


def _matrix_products() -> Callable[[], None]:
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(left, right)


def _copies() -> Callable[[], None]:
    import torch

    here, there = (torch.zeros(GIB, device="cuda", dtype=torch.uint8) for _ in range(2))
    return lambda: there.copy_(here)


LOADS = {"idle": _idle, "bf16 matrix products": _matrix_products, "copies": _copies}


def _sampled(load: str, seconds: float) -> Row:
    """Mean readings of all sensors while the load runs, how far each moved, and energy by counter and by power."""
    import torch

    from batchtune.device.nvml import Sensors

    work, sensors = LOADS[load](), Sensors(torch.device("cuda", 0))
    began = time.perf_counter()
    with sensors.sampling() as readings:
        while time.perf_counter() - began < seconds:
            for _ in range(10):
                work()
            torch.cuda.synchronize()
    took, found = time.perf_counter() - began, readings.summary()
    named = ("gpu_utilization", "memory_controller_utilization", "memory_used_bytes", "power_watts")
    row: Row = {name: found.get(name) for name in (*named, "temperature_celsius", "throttle_reasons")}
    row["values_seen"] = min((len(set(values)) for values in readings.samples.values()), default=0)
    row["joules_by_counter"] = readings.joules
    row["joules_by_power"] = found["power_watts"] * took if "power_watts" in found else None
    return row | {"seconds": took}


def _card() -> Row:
    """Free bytes and the processes on the first card, as NVML tells them without a context."""
    import pynvml

    from batchtune.device.nvml import sharing

    pynvml.nvmlInit()
    seen = sharing(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    return {"free": seen.free_bytes or 0, "held": {each.pid: each.memory_bytes for each in seen.processes}}


def sensors(quick: bool, there: Rows) -> Iterator[Row]:
    if "process list" not in there:
        yield from _loads(quick)
    for fault in FAULTS[:1] if quick else FAULTS:
        if fault not in there:
            yield {"case": fault} | _fault(fault)


def _loads(quick: bool) -> Iterator[Row]:
    """All loads in one process that holds a context, and what the process list said of it meanwhile."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for load in LOADS:
            busy, held = pool.apply_async(_sampled, (load, 0.5 if quick else 4.0)), {}
            while not busy.ready():
                held |= _card()["held"]  # as this process sees it, which has no context
                busy.wait(0.2)
            yield {"case": load} | busy.get()
        child = pool.apply(os.getpid)
    told = {"child_listed": child in held, "child_bytes": held.get(child), "parent_listed": os.getpid() in held}
    yield {"case": "process list", "processes": len(held)} | told


def _fault(task: str) -> Row:
    import batchtune

    before = _card()["free"]
    limits = {"memory_limit": 2 * GIB, "max": 16, "tolerance": 0.5, "verify_steps": 3}  # each fault costs a process
    found = batchtune.probe(f"{MODELS}:{task}", device="cuda", throughput=False, **limits).probe
    time.sleep(0.5)  # a driver takes a moment to clear up after a process
    after = _card()
    return {
        "batch_size": found.max_batch_size,
        "limited_by": found.limited_by,
        "outcomes": sorted({each.outcome for each in found.attempts}),
        "kept_bytes": before - after["free"],
        "parent_listed": os.getpid() in after["held"],
    }


def judge_sensors(rows: list[Row]) -> list[Row]:
    by = {row["case"]: row for row in rows}
    idle, products, copies = (by[load] for load in LOADS)
    moved = [f"{name} {idle[name]:.3g} to {products[name]:.3g}" for name in ("gpu_utilization", "power_watts")]
    rises = products["gpu_utilization"] > idle["gpu_utilization"] + 0.2
    rises &= products["power_watts"] > 1.2 * idle["power_watts"]
    memory = [row["memory_controller_utilization"] for row in (idle, copies)]
    faults = [by[fault] for fault in FAULTS if fault in by]
    kept = max(row["kept_bytes"] for row in faults)
    right = [row["batch_size"] in range(1, 13) for row in faults if row["case"] != "OutOfMemory"]
    listed = any(row["parent_listed"] for row in (*faults, by["process list"]))
    sane = all(0 <= row["gpu_utilization"] <= 1 and 10 < row["temperature_celsius"] < 110 for row in (idle, products))
    return [
        goal("utilisation and power rise under load", ", ".join(moved), met=rises),
        goal(
            "the memory controller's share rises with copies",
            "{:.2f} to {:.2f}".format(*memory),
            met=memory[1] > memory[0] + 0.1,
        ),
        goal("readings are plausible", f"{products['temperature_celsius']:.0f} degrees", met=sane),
        goal("the parent has no context", "listed" if listed else "not listed", met=not listed),
        goal("memory is given back after each fault", f"{kept / MIB:.0f} MiB kept at most", met=kept <= GIVEN_BACK),
        goal(
            "a killed and an asserting size are told from those that train",
            f"{sum(right)} of {len(right)}",
            met=all(right),
        ),
    ]


# --- throughput -------------------------------------------------------------------------------------------------------


def throughput(quick: bool, there: Rows) -> Iterator[Row]:
    """The curve as the probe reports it, its fitted line, and steps by the device's clock and by ours."""
    import batchtune

    for task, largest in (("SmallGpt", 2),) if quick else (("Gpt", 32), ("ConvNet", 256)):
        if f"{task}, {largest}, clocks" in there:
            continue
        result = batchtune.probe(f"{MODELS}:{task}", device="cuda", precision="bf16", max=largest, verify_steps=3)
        found = result.probe
        line = found.throughput_fit
        for point in found.throughput:
            named = ("step_seconds", "samples_per_second", "mfu", "gpu_utilization", "power_watts", "joules_per_sample")
            row = {"case": f"{task}, {point.batch_size}"} | {name: getattr(point, name) for name in named}
            fitted = line.alpha_seconds + line.beta_seconds_per_sample * point.batch_size if line else None
            row["residual"] = point.step_seconds / fitted - 1 if fitted else None
            yield row
        if line:
            yield {"case": f"{task}, fit", **line.model_dump()}
        sizes = sorted({1, max(1, largest // 4), largest})
        for size, events, wall in in_a_process(_two_clocks, task, sizes, 3 if quick else 10):
            yield {"case": f"{task}, {size}, clocks", "event_seconds": events, "wall_seconds": wall}


def _two_clocks(task: str, sizes: list[int], steps: int) -> list[tuple[int, float, float]]:
    """Median seconds of a step by CUDA events and by the wall clock, synchronised after each step."""
    import campaign_models
    import torch

    from batchtune.child.trainer import Trainer
    from batchtune.task.load import load_task

    device, found = torch.device("cuda", 0), []
    trainer = Trainer(load_task(f"{campaign_models.__file__}:{task}"), device, "bf16", loss_scale=1.0)
    for size in sizes:
        batch, times = trainer.task.worst_batch(size), []
        for _ in range(steps + 3):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            began = time.perf_counter()
            first.record()
            trainer.forward_backward(batch)
            trainer.update()
            last.record()
            torch.cuda.synchronize()
            times.append((first.elapsed_time(last) / 1000, time.perf_counter() - began))
        events, walls = zip(*times[3:], strict=True)
        found.append((size, statistics.median(events), statistics.median(walls)))
    return found


def judge_throughput(rows: list[Row]) -> list[Row]:
    points = [row for row in rows if "mfu" in row]
    residuals = [abs(row["residual"]) for row in points if row["residual"] is not None]
    shares = [row["mfu"] for row in points if row["mfu"] is not None]
    clocks = [row["wall_seconds"] / row["event_seconds"] - 1 for row in rows if row.get("event_seconds")]
    best = {row["case"].split(",")[0]: 0.0 for row in points}
    for row in points:
        name = row["case"].split(",")[0]
        best[name] = max(best[name], row["mfu"] or 0.0)
    told = ", ".join(f"{name} {share:.1%}" for name, share in best.items())
    return [
        goal("MFU is told and plausible", told, met=min(shares, default=0) > 0 and max(shares, default=2) < 1),
        goal(
            "a line fits the step times (median residual of 5 %)",
            f"{statistics.median(residuals):.1%}",
            met=statistics.median(residuals) <= 0.05,
        ),
        goal(
            "wall and device clock agree on the largest batches (2 %)",
            f"{min(clocks):+.2%}",
            met=abs(min(clocks)) <= 0.02,
        ),
    ]


# --- studies ----------------------------------------------------------------------------------------------------------


def _study(recipe: str, overrides: list[str]) -> tuple[Any, Row]:
    """The result of a recipe's study and the shares of its wall clock."""
    from tune_live import RECIPES, Stopwatch, shares

    import batchtune
    from batchtune.config.load import load_config

    if "FAKE_GPU" in os.environ:  # all losses are zero there: no target can be reached by training
        overrides = [*overrides, "objective.kind=best_metric"]
    config = load_config(RECIPES / recipe / "config.yaml", ["device=cuda", *overrides])
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        result = batchtune.tune(config, fresh=True, observer=watch, run_folders=folder)
    return result, shares(result, watch)


def recipe(quick: bool, there: Rows) -> Iterator[Row]:
    short = ["budget.total=60s", "budget.run=1s", "budget.trials=2", "confirm.seeds=1", "objective.kind=best_metric"]
    budget = [*short, "batch_size.max=32"] if quick else ["budget.total=70s", "budget.run=6s"]
    result, spent = _study("charlm", ["precision=bf16", *budget])
    runs = len(result.trials or [])
    yield {"case": "charlm, wall clock", "status": result.status, "runs": runs} | spent
    found = result.recommendation
    if found is None:
        return
    gain = found.speedup_over_baseline
    yield {
        "case": "charlm, recommendation",
        "batch": found.global_batch_size,
        "learning_rate": found.learning_rate,
        "precision": found.precision,
        "seconds_to_target": found.time_to_target_seconds.median if found.time_to_target_seconds else None,
        "speedup": gain.median if gain else None,
        "speedup_low": gain.low if gain else None,
        "speedup_high": gain.high if gain else None,
        "reason": found.reason,
    }


def judge_recipe(rows: list[Row]) -> list[Row]:
    spent, found = rows[0], rows[1] if len(rows) > 1 else {}
    own = spent["rest_seconds"] / spent["seconds"]
    gain = (
        f"{found['speedup']:.2f} times ({found['speedup_low']:.2f} to {found['speedup_high']:.2f})"
        if found.get("speedup")
        else "none"
    )
    return [
        goal(
            "a recommendation in bf16, no slower than the baseline", gain, met=(found.get("speedup_low") or 0) >= 0.95
        ),
        goal(
            "neither training nor evaluation for at most 5 % of 5 minutes",
            f"{spent['rest_seconds']:.1f} s of {spent['seconds']:.0f} s ({own:.0%})",
            met=spent["rest_seconds"] <= 0.05 * 300,
        ),
    ]


# --- where the time of a run goes -------------------------------------------------------------------------------------


def runs(quick: bool, there: Rows) -> Iterator[Row]:
    """What runs of a second or so take beside training and evaluation, the first of a process and later ones."""
    task, sizes = ("FewImages", (8,)) if quick else ("Images", (64, 128))
    if f"{task}, {sizes[-1]}, again" not in there:
        yield from in_a_process(_runs, task, sizes)


def _runs(task: str, sizes: tuple[int, ...]) -> list[Row]:
    """Each size twice: seconds until the first point, in training and in evaluation, and the rest.

    A third time tells on standard error where Python was.
    """
    import cProfile
    import io
    import pstats

    import campaign_models

    from batchtune.child.training_run import train
    from batchtune.device.memory import open_device
    from batchtune.protocol.messages import RunSpec
    from batchtune.task.load import load_task, set_libraries_apart

    began = time.perf_counter()
    memory, opened = open_device("cuda:0"), load_task(f"{campaign_models.__file__}:{task}")
    set_libraries_apart()
    opened.train_size()
    rows: list[Row] = [{"case": f"{task}, opened", "seconds": time.perf_counter() - began}]
    limits = {"limit_seconds": 1.0, "evaluate_every": None, "evaluation_batch_size": 256, "target": None}

    def run(size: int) -> Row:
        how = {"micro_batch_size": size, "accumulation_steps": 1, "learning_rate": 0.01, "precision": "bf16", "seed": 0}
        began = time.perf_counter()
        points = train(opened, memory, RunSpec(**how, **limits, metric="val_loss", goal="minimize"))
        point = next(points)
        first = time.perf_counter() - began
        try:
            while True:
                point = points.send(True)  # noqa: FBT003 - a generator takes it so
        except StopIteration as end:
            evaluated = end.value.evaluation_seconds
        took = time.perf_counter() - began
        row = {"seconds": took, "until_first_point": first, "training": point.seconds, "evaluation": evaluated}
        return row | {"rest": took - point.seconds - evaluated}

    for size in sizes:
        rows += [{"case": case} | run(size) for case in (f"{task}, {size}", f"{task}, {size}, again")]
    profile, told = cProfile.Profile(), io.StringIO()
    profile.runcall(run, sizes[-1])
    pstats.Stats(profile, stream=told).sort_stats("tottime").print_stats(12)
    print(told.getvalue(), file=sys.stderr)
    return rows


def judge_runs(rows: list[Row]) -> list[Row]:
    later = [row["rest"] for row in rows if row["case"].endswith("again")]
    told = f"{max(later):.2f} s"
    return [goal("a later run takes at most 0.5 s beside training and evaluation", told, met=max(later) <= 0.5)]


# --- energy -----------------------------------------------------------------------------------------------------------


def energy(quick: bool, there: Rows) -> Iterator[Row]:
    task, size = ("SmallGpt", 8) if quick else ("Gpt", 16)
    if f"{task}, {size}" not in there:
        yield {"case": f"{task}, {size}"} | in_a_process(_joules, task, size, 0.5 if quick else 8.0)
    if quick:
        return
    result, _ = _study("digits", ["objective.kind=energy_to_target", "budget.total=25s", "budget.run=5s"])
    found = result.recommendation
    joules = [each.energy_to_target_joules for each in result.trials or [] if each.energy_to_target_joules]
    row: Row = {"case": "digits, energy to target", "status": result.status, "runs_with_joules": len(joules)}
    row["joules"] = found.energy_to_target_joules.median if found and found.energy_to_target_joules else None
    saved = found.energy_saving_over_baseline if found else None
    yield row | {"saving_over_baseline": saved.median if saved else None}


def _joules(task: str, size: int, seconds: float) -> Row:
    """Joules of a sample in training, by the device's counter and by the mean of power samples times the time."""
    import campaign_models
    import torch

    from batchtune.child.trainer import Trainer
    from batchtune.device.nvml import Sensors
    from batchtune.task.load import load_task

    device = torch.device("cuda", 0)
    trainer = Trainer(load_task(f"{campaign_models.__file__}:{task}"), device, "bf16", loss_scale=1.0)
    batch, steps = trainer.task.worst_batch(size), 0

    def train(for_seconds: float) -> float:
        nonlocal steps
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < for_seconds:
            trainer.forward_backward(batch)
            trainer.update()
            torch.cuda.synchronize()
            steps += 1
        return time.perf_counter() - began

    train(seconds / 4)  # until power is that of training
    with Sensors(device).sampling() as readings:
        took = train(seconds)
    watts, samples = readings.summary().get("power_watts"), steps * size
    return {
        "seconds": took,
        "power_watts": watts,
        "joules_per_sample_by_counter": None if readings.joules is None else readings.joules / samples,
        "joules_per_sample_by_power": None if watts is None else watts * took / samples,
    }


def judge_energy(rows: list[Row]) -> list[Row]:
    counter, power = (rows[0][f"joules_per_sample_by_{way}"] for way in ("counter", "power"))
    known = bool(counter and power)
    told = f"{counter:.4g} against {power:.4g} J a sample" if known else "not told"
    agree = abs(counter / power - 1) <= 0.05 if known else None
    study = rows[1] if len(rows) > 1 else {"runs_with_joules": 0, "joules": None, "saving_over_baseline": None}
    saving = study["saving_over_baseline"]
    text = (
        f"{study['runs_with_joules']} runs, saving {saving:.2f} times"
        if saving
        else f"{study['runs_with_joules']} runs"
    )
    return [
        goal("the energy counter agrees with power over time (5 %)", told, met=agree),
        goal("a study for the least energy ends with joules", text, met=study["joules"] is not None),
    ]


# --- tests ------------------------------------------------------------------------------------------------------------


def tests(quick: bool, there: Rows) -> Iterator[Row]:
    """Each test as it ends; the slow studies of both recipes are a part of their own."""
    done = ("tests/gpu/test_cuda.py::test_a_recipe_is_tuned_on_the_device", *there)
    chosen = ["--collect-only", "-q"] if quick else ["-v", *(f"--deselect={each}" for each in done)]
    settings = (
        "--tb=line",
        *(part for name in ("cacheprovider", "xdist", "benchmark") for part in ("-p", f"no:{name}")),
    )
    command = [sys.executable, "-m", "pytest", "tests/gpu", *settings, *chosen]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if quick and "::" in line:
                yield {"case": line.strip(), "outcome": "collected"}
            elif found := re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", line):
                yield {"case": found[1], "outcome": found[2].lower()}
    if process.returncode > 1:
        raise RuntimeError(f"pytest ended with exit code {process.returncode}")


def judge_tests(rows: list[Row]) -> list[Row]:
    bad = [row["case"].rpartition("::")[2] for row in rows if row["outcome"] in {"failed", "error"}]
    told = f"{len(rows) - len(bad)} of {len(rows)}" + (f"; not: {', '.join(bad)}" if bad else "")
    return [goal("every test passes", told, met=bool(rows) and not bad)]

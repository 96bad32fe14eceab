"""One way of finding the largest batch, in a process of its own: it tells each attempt as it is made, then the answer.

`probe_peers.py` and `probe_endurance.py` start it. All ways train the same task for STEPS optimizer steps an attempt,
under the same limit of resident memory, which counts from the process as it is when torch, the way's own package and
the task are imported. Lines of JSON on standard output; what a package prints itself goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from probe_tasks import TASKS, Task

from batchtune.device.failures import classify
from batchtune.device.memory import find_device, open_device

TASK_FILE = Path(__file__).with_name("probe_tasks.py")
STEPS = 3
TOLERANCE = 0.01
CPU_FAILURE = "DefaultCPUAllocator: can't allocate memory: beyond the limit"  # by these words both peers know it
LIGHTNING = {"steps_per_trial": STEPS, "init_val": 2, "max_trials": 60, "margin": 0.0, "max_val": 1 << 22}

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def tell(**facts: Any) -> None:
    print(json.dumps(facts), file=_answers, flush=True)


class Job:
    """What to search: a task, a device and its limit.

    Args:
        name: of a class in `probe_tasks.py`, or FILE:CLASS.
        device: as on batchtune's command line.
        size: where to start, or what to try.
        steps: optimizer steps of an attempt.
    """

    def __init__(self, name: str, device: str, limit_bytes: int, size: int, steps: int) -> None:
        self.limit_bytes, self.size, self.steps = limit_bytes, size, steps
        self.source = name if ":" in name else f"{TASK_FILE}:{name}"
        self.task: Task = class_of(self.source)()
        self.device = find_device(device)

    def limit_this_process(self) -> None:
        """Sets the limit for the ways that know none of their own."""
        self.memory = open_device(str(self.device))  # what it keeps for itself stays as long as the job does
        self.memory.enforce(self.limit_bytes)

    def train(self, size: int) -> None:
        """Plain PyTorch, as in a tutorial."""
        model = self.task.build_model().to(self.device).train()
        optimizer = self.task.build_optimizer(model, 1e-3)
        batch = tuple(part.to(self.device) for part in self.task.make_batch(size))
        for _ in range(self.steps):
            optimizer.zero_grad()
            loss = self.task.compute_loss(model, batch)  # a variable, which holds the graph until the next one is there
            loss.backward()
            optimizer.step()


def class_of(source: str) -> type[Task]:
    """The class that FILE:CLASS names."""
    file, _, name = source.rpartition(":")
    if Path(file or TASK_FILE) == TASK_FILE:
        return TASKS[name]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[Task] = getattr(module, name)
    return found


@contextlib.contextmanager
def told(job: Job, size: int) -> Iterator[None]:
    """Tells what came of the attempt in the block; on a CPU more than the limit is out of memory, too."""
    if job.device.type == "cpu":
        job.memory.reset_peaks()
    try:
        yield
        if job.device.type == "cpu" and job.memory.peaks().is_beyond:
            raise torch.OutOfMemoryError(CPU_FAILURE)  # noqa: TRY301 - told as one
    except Exception as error:
        tell(size=size, outcome=classify(error))
        raise
    tell(size=size, outcome="fit")


def try_one(job: Job) -> None:
    """Trains, on a CPU without a limit: nothing of ours is opened there, and what it took is told."""
    if job.device.type != "cpu":
        job.limit_this_process()
        with contextlib.suppress(Exception), told(job, job.size):
            job.train(job.size)
        return
    before = _status_bytes("VmRSS")
    job.train(job.size)
    taken = _status_bytes("VmHWM") - before
    tell(size=job.size, outcome="fit" if taken <= job.limit_bytes else "oom", bytes=taken)


def _status_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def by_batchtune(job: Job) -> int | None:
    import batchtune
    from batchtune.document import Attempt
    from batchtune.observer import Observer

    class Teller(Observer):
        def attempted(self, attempt: Attempt) -> None:
            tell(size=attempt.batch_size, outcome=attempt.outcome, final=attempt.purpose == "verify")

    found = batchtune.probe(
        job.source,
        device=str(job.device),
        precision="fp32",
        memory_limit=job.limit_bytes,
        tolerance=TOLERANCE,
        steps=job.steps,
        throughput=False,
        observer=Teller(),
    )
    return found.probe.max_batch_size if found.probe else None


def by_doubling_and_bisecting(job: Job) -> int:
    """In batchtune's worker, from 2 samples on as Lightning does, to the same tolerance as batchtune."""
    from batchtune.processes.worker import Worker, WorkerDied
    from batchtune.protocol.commands import OpenTask, TryBatchSize

    settings = OpenTask(task=job.source, device=str(job.device), memory_limit=job.limit_bytes, precision=("fp32",))
    low, high, size = 0, None, 2
    with Worker(settings) as worker:
        while high is None or high - low > max(1, int(TOLERANCE * low)):
            arguments = {"batch_size": size, "steps": job.steps, "precision": "fp32"}
            try:
                outcome = worker.call(TryBatchSize(**arguments), timeout=120).attempt.outcome
            except WorkerDied as lost:
                outcome = lost.outcome
            tell(size=size, outcome=outcome)
            low, high = (size, high) if outcome == "fit" else (low, size)
            size = 2 * low if high is None else (low + high) // 2
    return low


def by_accelerate(job: Job) -> int:
    """`job.size` is where it starts, from which it only goes down."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=job.size)
    def train(batch_size: int) -> int:
        with told(job, batch_size):
            job.train(batch_size)
        return batch_size

    job.limit_this_process()
    found: int = train()
    return found


def by_lightning(job: Job, mode: str) -> int | None:
    lightning = _lightning()
    tuner = importlib.import_module(f"{lightning.__name__}.tuner")
    batch_size_scaling = importlib.import_module(f"{tuner.__name__}.batch_size_scaling")
    folder = tempfile.TemporaryDirectory()

    def new_trainer(**options: Any) -> Any:
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        kind = "gpu" if job.device.type == "cuda" else job.device.type
        options |= {"accelerator": kind, "devices": 1, "default_root_dir": folder.name} | dict.fromkeys(off, False)
        return lightning.Trainer(**options)

    began = time.perf_counter()
    new_trainer(max_steps=1).fit(lightning_module(job.task, 2))  # loads what it loads late, before the limit is set
    tell(warm_up_seconds=time.perf_counter() - began)
    job.limit_this_process()
    trial = batch_size_scaling._try_loop_run

    def counted(trainer: Any, params: dict[str, Any]) -> None:
        with told(job, trainer.lightning_module.batch_size):
            trial(trainer, params)

    batch_size_scaling._try_loop_run = counted
    search = tuner.Tuner(new_trainer(max_epochs=1)).scale_batch_size
    found: int | None = search(lightning_module(job.task, 2), mode=mode, **LIGHTNING)
    return found


def _lightning() -> Any:
    """Lightning under the one of its two names that is installed."""
    whole = importlib.util.find_spec("lightning") is not None
    return importlib.import_module("lightning.pytorch" if whole else "pytorch_lightning")


def lightning_module(task: Task, size: int) -> Any:
    """The task as a LightningModule, which makes its batches whole as the other ways do."""
    from torch.utils.data import DataLoader, Dataset

    class Batches(Dataset):
        """Batches of one size; with a length, since Lightning would hold a second batch at the ready otherwise."""

        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, _: int) -> Any:
            return task.make_batch(self.size)

    class Module(_lightning().LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.model = size, task.build_model()

        def training_step(self, batch: Any, _: int) -> Any:
            return task.compute_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.build_optimizer(self.model, 1e-3)

        def train_dataloader(self) -> DataLoader:
            return DataLoader(Batches(self.batch_size), batch_size=None)

    return Module()


METHODS: dict[str, Callable[[Job], int | None]] = {
    "batchtune": by_batchtune,
    "Lightning binsearch": functools.partial(by_lightning, mode="binsearch"),
    "Lightning power": functools.partial(by_lightning, mode="power"),
    "Accelerate": by_accelerate,
    "doubling + bisection": by_doubling_and_bisecting,
}
ALONE: dict[str, Callable[[Job], None]] = {"try": try_one}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=[*METHODS, *ALONE])
    parser.add_argument("task")
    parser.add_argument("device")
    parser.add_argument("limit_bytes", type=int)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    job = Job(given.task, given.device, given.limit_bytes, given.size, given.steps)
    if given.method in ALONE:
        ALONE[given.method](job)
        return
    try:
        tell(answer=METHODS[given.method](job))
    except Exception as error:  # noqa: BLE001 - how a method ends is what is measured
        tell(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")


if __name__ == "__main__":
    main()

"""The parent's part of an estimate: which precisions and GPUs are asked about, and the records that answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from batchtune.errors import UsageError
from batchtune.results import Estimate
from batchtune.train.worker import Worker

PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
# TF32 changes how matrix units multiply, not what is stored; loss scaling adds three numbers of 512 bytes to bf16.
_TRACED_AS = {"tf32": "fp32", "fp16": "bf16"}
_ANSWER = "batchtune.estimate.answer:answer"
_TIMEOUT_SECONDS = 1800.0
_AMPERE, _VOLTA = 8, 7
_TERA = 1e12


class GpuFacts(Protocol):
    """What an estimate needs of a catalogue's GPU (`batchtune.device.gpus.Gpu` has it)."""

    @property
    def name(self) -> str: ...
    @property
    def vendor(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def compute_capability(self) -> tuple[int, int] | None: ...
    @property
    def bandwidth_bytes_per_second(self) -> float: ...
    @property
    def tflops(self) -> Mapping[str, float]: ...
    @property
    def board_power_watts(self) -> int | None: ...


@dataclass(frozen=True)
class Detail:
    """The peak of one precision's largest estimated batch.

    Attributes:
        precision: at which it was traced.
        batch_size: the largest batch on the roomiest GPU asked about.
        allocated_bytes: bytes of live storages at the peak.
        by_category: those bytes by parameters, gradients, optimizer_states, activations and temporaries.
        moment: when the peak is, such as `backward 2`.
        op: the operator whose result makes the peak.
        module: whose forward runs then, where one does.
        activations_by_module: bytes of activations at the peak by module path, numbers replaced by `*`, largest first.
        curve: (moment, live bytes) over two optimizer steps, at most some 400 points.
    """

    precision: str
    batch_size: int
    allocated_bytes: int
    by_category: dict[str, int]
    moment: str
    op: str
    module: str
    activations_by_module: dict[str, int]
    curve: list[tuple[str, int]]


@dataclass(frozen=True)
class EstimateRun:
    """Everything an estimate found: one record for each GPU and precision, and one detail for each precision."""

    estimates: list[Estimate]
    details: list[Detail]


def estimate_task(
    spec: str,
    gpus: Sequence[GpuFacts],
    precisions: Sequence[str] = ("auto",),
    *,
    memory_limit: int | None = None,
    accumulation_steps: int = 1,
    processes: int = 2,
    echo: Callable[[str], None] | None = None,
) -> EstimateRun:
    """Estimates the largest micro-batch of a task on each GPU at each precision, without one.

    Args:
        spec: the task, as for `probe`.
        gpus: rows of the catalogue.
        precisions: bf16, fp16, fp32, tf32, or `auto` for what each GPU does well.
        memory_limit: bytes a process may reserve; None for all that the GPU has beside its context.
        accumulation_steps: micro-batches per optimizer step.
        processes: children that trace at the same time.
        echo: called with each line the user's code prints.

    Raises:
        UsageError: an unknown precision.
        UserCodeError: the task cannot be imported or lacks a piece.
        DeviceError: this build of torch cannot trace.
        WorkerLost: the child died.
    """
    for name in precisions:
        if name not in (*PRECISIONS, "auto"):
            raise UsageError(f"--precision {name}: not one of {', '.join(PRECISIONS)} or auto")
    asked = [(gpu, choose(gpu) if name == "auto" else name) for gpu in gpus for name in dict.fromkeys(precisions)]
    traced = list(dict.fromkeys(_TRACED_AS.get(name, name) for _, name in asked))

    def answer(precision: str) -> dict[str, Any]:
        facts = {gpu.name: _facts(gpu) for gpu, name in asked if _TRACED_AS.get(name, name) == precision}
        arguments: dict[str, Any] = {
            "task": spec,
            "precision": precision,
            "accumulation_steps": accumulation_steps,
            "memory_limit": memory_limit,
        }
        with Worker(None, echo) as worker:
            found = _ask(worker, arguments | {"gpus": list(facts.values())})
            found["rows"] = dict(zip(facts, found.get("gpus", []), strict=False))
            none = [name for name, row in found["rows"].items() if not row["max_batch_size"]]
            if none:
                again = _ask(worker, arguments | {"gpus": [facts[name] for name in none], "checkpointing": True})
                for name, row in zip(none, again.get("gpus", []), strict=False):
                    found["rows"][name]["with_checkpointing"] = row["max_batch_size"]
        return found

    with ThreadPoolExecutor(max(1, min(processes, len(traced), os.cpu_count() or 1))) as pool:
        answers = dict(zip(traced, pool.map(answer, traced), strict=True))
    estimates = [
        _record(gpu, name, answers[_TRACED_AS.get(name, name)], memory_limit, accumulation_steps) for gpu, name in asked
    ]
    return EstimateRun(estimates, [_detail(name, each) for name in traced for each in answers[name].get("details", [])])


def _ask(worker: Worker, arguments: dict[str, Any]) -> dict[str, Any]:
    return worker.call("apply", timeout=_TIMEOUT_SECONDS, function=_ANSWER, arguments=arguments)


def choose(gpu: GpuFacts) -> str:
    """The precision a GPU does well, as `batchtune.train.precision.choose` finds it on the device itself."""
    if gpu.vendor == "Apple":
        return "fp32"
    if gpu.compute_capability is None or gpu.compute_capability[0] >= _AMPERE:
        return "bf16"
    return "fp16" if gpu.compute_capability[0] >= _VOLTA else "fp32"


def _facts(gpu: GpuFacts) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "memory_bytes": gpu.capacity_bytes,
        "generation": gpu.generation,
        "vendor": gpu.vendor,
    }


def _record(
    gpu: GpuFacts, precision: str, answer: dict[str, Any], memory_limit: int | None, accumulation_steps: int
) -> Estimate:
    if "refused" in answer:
        return Estimate(
            gpu=gpu.name,
            memory_bytes=gpu.memory_bytes,
            precision=precision,
            confidence="refused",
            notes=[answer["refused"]],
        )
    row = answer["rows"][gpu.name]
    notes = list(row["notes"])
    if memory_limit is not None and memory_limit > gpu.capacity_bytes:
        notes.append(f"the memory limit of {memory_limit:,} bytes is more than this GPU has")
    if not row["max_batch_size"]:
        notes.append(f"a batch of 1 needs {row['needed_bytes']:,} bytes, this GPU holds {row['capacity_bytes']:,}")
        if row.get("with_checkpointing"):
            notes.append(f"with activation checkpointing of its repeated blocks: {row['with_checkpointing']}")
    speed = samples_per_second(gpu, precision, row, accumulation_steps)
    if speed is not None:
        notes.append("samples per second: a roofline, which real training stays below")
    return Estimate(
        gpu=gpu.name,
        memory_bytes=gpu.memory_bytes,
        precision=precision,
        max_batch_size=row["max_batch_size"],
        safe_max_batch_size=row["safe_max_batch_size"],
        expandable_segments_max_batch_size=row["expandable_segments_max_batch_size"],
        peak_bytes=row.get("peak_bytes"),
        samples_per_second=speed,
        confidence=row["confidence"],
        notes=notes,
    )


def samples_per_second(gpu: GpuFacts, precision: str, row: Mapping[str, Any], accumulation_steps: int) -> float | None:
    """Speed at the largest batch if arithmetic or memory were busy all the time: matrix operators, then all others.

    Source: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009.

    Returns:
        Samples per second; None where nothing fits or the GPU's rate at this precision is not known.
    """
    rate = gpu.tflops.get(precision)
    if rate is None or not row["max_batch_size"]:
        return None
    work = row["work"]
    bandwidth = gpu.bandwidth_bytes_per_second
    seconds = max(work["flops"] / (rate * _TERA), work["matmul_bytes"] / bandwidth) + work["other_bytes"] / bandwidth
    micro_batches = min(accumulation_steps, 2)  # as many as were traced
    found: float = row["max_batch_size"] * micro_batches / seconds if seconds > 0 else 0.0
    return found or None


def _detail(precision: str, found: dict[str, Any]) -> Detail:
    curve = [(str(moment), int(live)) for moment, live in found["curve"]]
    return Detail(precision, **{**found, "curve": curve})

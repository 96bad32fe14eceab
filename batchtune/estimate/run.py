"""The parent's part of an estimate: which precisions and GPUs are asked about, and the records that answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from batchtune.config.options import TRACE_SECONDS
from batchtune.document import Estimate, MemoryDetail, Remedy
from batchtune.errors import NothingFitsError, UsageError, UserCodeError
from batchtune.estimate.calibration import offsets_of
from batchtune.estimate.tracers import Asking, ask_tracers
from batchtune.observer import Observer
from batchtune.processes.worker import Worker
from batchtune.units import size

STRATEGIES = ("ddp", "fsdp")
PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
# TF32 changes how matrix units multiply, not what is stored; loss scaling adds three numbers of 512 bytes to bf16. CUDA
# has a softmax from fp16 to fp32 in one kernel, and none from bf16: a step that has one is traced at both.
_TRACED_AS = {"tf32": "fp32", "fp16": "bf16"}
_AMPERE, _VOLTA = 8, 7
_TERA = 1e12
_ROOFLINE = (
    "samples per second and per joule: a roofline at full board power, not measured; published trainings reach a fifth "
    "to a half of peak arithmetic (Chowdhery et al., PaLM, 2022, table 3)"
)

_NOT_IN_HARDWARE = {
    "bf16": "bf16 is emulated before compute capability 8.0: it fits as estimated and is slow; fp16 is not",
    "tf32": "tf32 is what fp32 is before compute capability 8.0",
}


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
class EstimateRun:
    """Everything an estimate found: one record for each GPU and precision, and one detail for each precision.

    `refusal` says why where there is no figure in any of them: the user's error, or what cannot be estimated.
    """

    estimates: list[Estimate]
    details: list[MemoryDetail]
    refusal: UserCodeError | NothingFitsError | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about every GPU.

    Attributes:
        task: as for `probe`.
        memory_limit: bytes a process may reserve; None for all that the GPU has beside its context.
        accumulation_steps: micro-batches per optimizer step.
        strategy: ddp or fsdp, where there is more than one rank.
        world_size: number of ranks; the answer is for each of them.
        inference: forward passes without gradients instead of training.
    """

    task: str
    memory_limit: int | None = None
    accumulation_steps: int = 1
    strategy: str = "ddp"
    world_size: int = 1
    inference: bool = False

    @property
    def may_shard(self) -> bool:
        """Whether more ranks that share the model were not asked about yet, and could be."""
        return self.world_size == 1 and not self.inference


def estimate_task(
    question: Question,
    gpus: Sequence[GpuFacts],
    precisions: Sequence[str] = ("auto",),
    *,
    processes: int = 2,
    observer: Observer | None = None,
    timeout: float = TRACE_SECONDS,
) -> EstimateRun:
    """Estimates the largest micro-batch of a task on each GPU at each precision, without one.

    Args:
        question: the task and how it is trained.
        gpus: rows of the catalogue.
        precisions: bf16, fp16, fp32, tf32, or `auto` for what each GPU does well.
        processes: children that trace at the same time.
        observer: told how far it is.
        timeout: seconds after which tracing is given up.

    Raises:
        UsageError: an unknown precision.
        UserCodeError: the task cannot be imported or lacks a piece.
        DeviceError: this build of torch cannot trace.
        WorkerDied: the child died.
    """
    for name in precisions:
        if name not in (*PRECISIONS, "auto"):
            raise UsageError(f"--precision {name}: not one of {', '.join(PRECISIONS)} or auto")
    asked = [(gpu, choose(gpu) if name == "auto" else name) for gpu in gpus for name in dict.fromkeys(precisions)]
    alike = {name: _TRACED_AS.get(name, name) for _, name in asked}
    if "fp16" in alike and "bf16" not in alike:
        alike["fp16"] = "fp16"

    def facts_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {gpu.name: _facts(gpu) for gpu, name in asked if name in names}

    deadline = time.monotonic() + timeout

    def answer(worker: Worker, traced: str) -> dict[str, dict[str, Any]]:
        names = [name for name, other in alike.items() if other == traced]
        found = {traced: Asking(worker, vars(question) | {"precision": traced}, deadline).answer(facts_of(names))}
        if traced == "bf16" and "fp16" in names and found[traced].get("has_softmax"):
            found["fp16"] = Asking(worker, vars(question) | {"precision": "fp16"}, deadline).answer(facts_of(["fp16"]))
        return found

    jobs = list(dict.fromkeys(alike.values()))
    answers = ask_tracers(jobs, answer, observer or Observer(), seconds=timeout, processes=processes)
    alike |= {name: name for name in alike if name in answers}
    estimates = [_record(gpu, name, answers[alike[name]], question) for gpu, name in asked]
    return EstimateRun(
        estimates,
        [
            MemoryDetail(precision=_roomiest(row for row in estimates if alike[row.precision] == traced), **detail)
            for traced, found in answers.items()
            for detail in found.get("details", [])
        ],
        _refusal(list(answers.values())),
    )


def _refusal(answers: Sequence[Mapping[str, Any]]) -> UserCodeError | NothingFitsError | None:
    """Why none of them has a figure; None where one has."""
    if any("refused" not in each for each in answers):
        return None
    failed = next((each for each in answers if "frames" in each), None)
    if failed is not None:
        return UserCodeError(failed["refused"], failed["frames"])
    return NothingFitsError(f"nothing could be estimated: {answers[0]['refused']}")


def _roomiest(rows: Iterable[Estimate]) -> str:
    """The precision at which the largest batch fits."""
    return max(rows, key=lambda row: row.max_batch_size or 0).precision


def choose(gpu: GpuFacts) -> str:
    """The precision a GPU does well, as `batchtune.child.training.precision.choose` finds it on the device itself."""
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
        "measured": asdict(offsets_of(gpu.name)),
    }


def _record(gpu: GpuFacts, precision: str, answer: dict[str, Any], question: Question) -> Estimate:
    known: dict[str, Any] = {"gpu": gpu.name, "memory_bytes": gpu.memory_bytes, "precision": precision}
    known["inference"] = question.inference or None
    if "refused" in answer:
        return Estimate(**known, confidence="refused", notes=[answer["refused"]])
    row = answer["rows"][gpu.name]
    speed = samples_per_second(gpu, precision, row, question.accumulation_steps)
    watts = gpu.board_power_watts
    if not row["max_batch_size"]:
        known["needed_bytes"] = row["needed_bytes"]
        known["remedies"] = [Remedy(name=name, max_batch_size=most or 0) for name, most in row.get("remedies", [])]
    return Estimate(
        **known,
        max_batch_size=row["max_batch_size"],
        safe_max_batch_size=row["safe_max_batch_size"],
        expandable_segments_max_batch_size=row["expandable_segments_max_batch_size"],
        limited_by=row["limited_by"],
        peak_bytes=row.get("peak_bytes"),
        samples_per_second=speed,
        samples_per_joule=speed / watts if speed is not None and watts else None,
        confidence=row["confidence"],
        error_share=row["error_share"],
        notes=[
            *row["notes"],
            *_notes(gpu, row, question),
            *shortage(known.get("needed_bytes"), known.get("remedies", ()), may_shard=question.may_shard),
            *([_NOT_IN_HARDWARE[precision]] if _is_emulated(gpu, precision) else []),
            *([_ROOFLINE] if speed is not None else []),
        ],
    )


def _is_emulated(gpu: GpuFacts, precision: str) -> bool:
    capability = gpu.compute_capability
    return precision in _NOT_IN_HARDWARE and capability is not None and capability[0] < _AMPERE


def _notes(gpu: GpuFacts, row: dict[str, Any], question: Question) -> list[str]:
    """What the figures of a row leave to be said."""
    notes = []
    limit = question.memory_limit
    if limit is not None and limit > gpu.capacity_bytes:
        notes.append(f"the memory limit of {limit:,} bytes is more than this GPU has")
    if row["limited_by"] == "max":
        notes.append(f"at least {row['max_batch_size']:,}: larger batches were not looked at")
    return notes


def shortage(needed_bytes: int | None, remedies: Sequence[Remedy], *, may_shard: bool = True) -> list[str]:
    """What there is to say where not even a batch of 1 fits; nothing elsewhere."""
    if needed_bytes is None:
        return []
    notes = [f"a batch of 1 needs {size(needed_bytes)} for tensors alone"]
    helps = [f"{each.name}: {each.max_batch_size:,}" for each in remedies if each.max_batch_size]
    others = [each.name for each in remedies if not each.max_batch_size]
    notes += [f"would fit with {'; with '.join(helps)}"] if helps else []
    notes += [f"does not fit with {', nor with '.join(others)}"] if others else []
    shards = may_shard and not helps
    return notes + (["--strategy fsdp --world-size N asks what fits where N such GPUs share it"] if shards else [])


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

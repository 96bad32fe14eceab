"""`batchtune estimate` as a function: which GPUs and precisions a person means, and the document that answers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.device.gpus import Gpu, all_gpus, gpus_called
from batchtune.document import Estimate, EstimatedLength, Failure, MemoryDetail, Remedy, TaskInfo
from batchtune.errors import (
    BatchtuneError,
    HalfPrecisionError,
    NothingFitsError,
    RunInterrupted,
    UsageError,
    UserCodeError,
)
from batchtune.estimate.commands import EstimateMemory, LengthRow, Refusal, Row
from batchtune.estimate.memory.events import Work
from batchtune.estimate.tracers import Answered, ask, ask_tracers, facts_of
from batchtune.observer import Observer
from batchtune.processes.worker import Worker
from batchtune.result import Result
from batchtune.task.spec import file_hash, spec_of
from batchtune.units import size, typed_size
from batchtune.vocabulary import PRECISIONS, AskedLengths

# TF32 changes how matrix units multiply, not what is stored. fp16 and bf16 are not alike: CUDA casts fp16 alone inside
# softmax and log_softmax, recurrent layers compute in fp16 whatever autocast has, and user code may tell them apart.
_TRACED_AS = {"tf32": "fp32"}
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


@dataclass(frozen=True)
class EstimateRun:
    """Everything an estimate found: one record for each GPU and precision, and one detail for each precision.

    `refusal` says why where there is no figure in any of them: the user's error, or what cannot be estimated.
    """

    estimates: list[Estimate]
    details: list[MemoryDetail]
    refusal: UserCodeError | NothingFitsError | None = None


def run_estimate(
    task: str | os.PathLike[str],
    gpus: Sequence[str],
    precisions: Sequence[str],
    *,
    memory_limit: int | None,
    accumulation_steps: int,
    strategy: str,
    world_size: int,
    inference: bool,
    lengths: AskedLengths | None,
    timeout: float,
    observer: Observer,
) -> Result:
    """Estimates a task on every GPU named at every precision named.

    Raises:
        NothingFitsError: not even a batch of 1 on any GPU, or nothing can be estimated; `result` holds the rows, with
            what would make it fit or why not.
        UserCodeError: the step fails, on a GPU as in the trace; so it does.
        BatchtuneError: with the document, which says no more than the error, in `result`.
    """
    if inference and max(accumulation_steps, world_size) > 1:
        raise UsageError("--inference: takes neither --accumulation nor --world-size; leave them out")
    if inference and lengths:
        raise UsageError("--lengths: not with --inference, which takes no steps over them")
    chosen = list(all_gpus() if "all" in gpus else dict.fromkeys(gpu for name in gpus for gpu in gpus_called(name)))
    names = list(PRECISIONS) if list(precisions) == ["all"] else list(precisions)
    observer.stage(f"tracing for {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}")
    question = EstimateMemory(
        task=spec_of(task),
        memory_limit=memory_limit,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        world_size=world_size,
        inference=inference,
        lengths=lengths,
    )
    info = TaskInfo(path=question.task, sha256=file_hash(question.task))
    nothing = Result(kind="estimate", status="complete", task=info, options=_options(question, precisions))
    try:
        found = estimate_task(question, chosen, names, observer=observer, timeout=timeout)
    except (BatchtuneError, KeyboardInterrupt) as caught:
        error = caught if isinstance(caught, BatchtuneError) else RunInterrupted("interrupted: nothing was estimated")
        raise _ended(error, nothing, "failed" if error is caught else "interrupted") from None
    result = nothing.model_copy(update={"estimates": found.estimates, "details": found.details or None})
    if found.refusal is not None:
        raise _ended(found.refusal, result, "failed")
    if all(row.max_batch_size == 0 for row in found.estimates):
        error = NothingFitsError(too_large(found.estimates, may_shard=_may_shard(question)))
        error.result = result
        raise error
    return result


def _options(asked: EstimateMemory, precisions: Sequence[str]) -> str | None:
    """As they are typed, those that are not the usual ones; None: there are none."""
    given = [f"--precision {each}" for each in precisions if len(precisions) == 1 and each != "auto"]
    if asked.memory_limit:
        given.append(f"--memory-limit {typed_size(asked.memory_limit)}")
    if asked.accumulation_steps > 1:
        given.append(f"--accumulation {asked.accumulation_steps}")
    if asked.world_size > 1:
        given.append(f"--world-size {asked.world_size} --strategy {asked.strategy}")
    return " ".join(given) or None


def _ended(error: BatchtuneError, result: Result, status: str) -> BatchtuneError:
    """The error with the document of an estimate that did not complete."""
    failure = Failure(exit_code=error.exit_code, message=str(error))
    error.result = result.model_copy(update={"status": status, "error": failure})
    return error


def too_large(rows: Sequence[Estimate], *, may_shard: bool = True) -> str:
    """One line for rows of which none holds a batch of 1: the need and the remedy on the GPU with the most memory."""
    roomiest = max(rows, key=lambda row: (any(each.max_batch_size for each in row.remedies), row.memory_bytes))
    gpus = len({row.gpu for row in rows})
    where = f"any of {gpus} GPUs; {roomiest.gpu}" if gpus > 1 else roomiest.gpu
    why = "; ".join(shortage(roomiest.needed_bytes, roomiest.remedies, may_shard=may_shard))
    return f"nothing fits on {where} at {roomiest.precision}: {why}"


def estimate_task(
    question: EstimateMemory,
    gpus: Sequence[Gpu],
    precisions: Sequence[str] = ("auto",),
    *,
    observer: Observer | None = None,
    timeout: float,
) -> EstimateRun:
    """Estimates the largest micro-batch of a task on each GPU at each precision, without one.

    Args:
        question: the task and how it is trained; of GPUs and precisions it says nothing.
        gpus: rows of the catalogue.
        precisions: bf16, fp16, fp32, tf32, or `auto` for what each GPU does well.
        observer: told how far it is.
        timeout: seconds after which tracing is given up.

    Raises:
        UsageError: an unknown precision.
        UserCodeError: the task cannot be imported or lacks a piece.
        DeviceError: this build of torch cannot trace, or something else has ended the child twice.
    """
    for name in precisions:
        if name not in (*PRECISIONS, "auto"):
            raise UsageError(f"--precision {name}: not one of {', '.join(PRECISIONS)} or auto")
    wanted = [(gpu, choose(gpu) if name == "auto" else name) for gpu in gpus for name in dict.fromkeys(precisions)]
    alike = {name: _TRACED_AS.get(name, name) for _, name in wanted}
    deadline = time.monotonic() + timeout

    def answer(worker: Worker, traced: str) -> Answered:
        facts = {gpu.name: facts_of(gpu) for gpu, name in wanted if alike[name] == traced}
        may_change = traced not in precisions  # where the user has named it, they are told that it does not train
        return ask(worker, question.but(precision=traced), list(facts.values()), deadline, may_change=may_change)

    jobs = list(dict.fromkeys(alike.values()))
    answers = ask_tracers(jobs, answer, observer or Observer(), seconds=timeout)
    records = [_record(gpu, name, answers[alike[name]], question) for gpu, name in wanted]
    estimates = list({(each.gpu, each.precision): each for each in records}.values())  # one may be in another's place
    asked_as = {traced: name for name, traced in reversed(alike.items())}  # the first of those that are traced alike
    details = {
        precision: each.detail.model_copy(update={"precision": precision})
        for precision, each in ((each.instead or asked_as[name], each) for name, each in answers.items())
        if each.detail is not None
    }
    return EstimateRun(estimates, list(details.values()), _refusal([each.refusal for each in answers.values()]))


def _refusal(refusals: Sequence[Refusal | None]) -> UserCodeError | NothingFitsError | None:
    """Why none of the answers has a figure; None where one has."""
    known = [each for each in refusals if each is not None]
    if len(known) < len(refusals):
        return None
    failed = next((each for each in known if each.frames is not None), None)
    if failed is not None:
        return (HalfPrecisionError if failed.instead else UserCodeError)(failed.refused, failed.frames or "")
    hint = "" if "probe" in known[0].refused else "; 'batchtune probe' measures it where there is a GPU"
    return NothingFitsError(f"nothing could be estimated: {known[0].refused}{hint}")


def choose(gpu: Gpu) -> str:
    """The precision a GPU does well, as `batchtune.child.stepping.choose` finds it on the device itself."""
    if gpu.vendor == "Apple":
        return "fp32"
    if gpu.compute_capability is None or gpu.compute_capability[0] >= _AMPERE:
        return "bf16"
    return "fp16" if gpu.compute_capability[0] >= _VOLTA else "fp32"


def _record(gpu: Gpu, precision: str, answer: Answered, question: EstimateMemory) -> Estimate:
    precision = answer.instead or precision
    known = Estimate(
        gpu=gpu.name, memory_bytes=gpu.memory_bytes, precision=precision, inference=question.inference or None
    )
    if answer.refusal is not None:
        return known.model_copy(update={"confidence": "refused", "notes": [answer.refusal.refused]})
    row, remedies = answer.rows[gpu.name], answer.remedies.get(gpu.name, [])
    emulated = precision in _NOT_IN_HARDWARE and (gpu.compute_capability or (_AMPERE,))[0] < _AMPERE
    speed, watts = _speed(gpu, precision, row, question), gpu.board_power_watts
    speeds = [{"samples_per_second": _speed(gpu, precision, each, question)} for each in row.lengths]
    per_length = [each.model_dump(exclude={"work"}) | how for each, how in zip(row.lengths, speeds, strict=True)]
    return known.model_copy(
        update=row.model_dump(exclude={"work", "lengths"})
        | {
            "samples_per_second": speed,
            "samples_per_joule": speed / watts if speed is not None and watts else None,
            "remedies": remedies,
            "lengths": tuple(EstimatedLength(**each) for each in per_length),
            "notes": [
                *row.notes,
                *_notes(gpu, row, question.memory_limit),
                *shortage(row.needed_bytes, remedies, may_shard=_may_shard(question)),
                *([_NOT_IN_HARDWARE[precision]] if emulated else []),
                *([_ROOFLINE] if speed is not None else []),
            ],
        }
    )


def _speed(gpu: Gpu, precision: str, row: Row | LengthRow, question: EstimateMemory) -> float | None:
    samples = row.max_batch_size * min(question.accumulation_steps, 2)  # as many micro-batches as were traced
    return samples_per_second(gpu, precision, samples, row.work)


def _may_shard(question: EstimateMemory) -> bool:
    """Whether more ranks that share the model were not asked about yet, and could be."""
    return question.world_size == 1 and not question.inference


def _notes(gpu: Gpu, row: Row, limit: int | None) -> list[str]:
    """What the figures of a row leave to be said."""
    notes = []
    if limit is not None and limit > gpu.capacity_bytes:
        notes.append(f"the memory limit of {limit:,} bytes is more than this GPU has")
    if row.limited_by == "max":
        notes.append(f"at least {row.max_batch_size:,}: larger batches were not looked at")
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


def samples_per_second(gpu: Gpu, precision: str, samples: int, work: Work | None) -> float | None:
    """Speed of a step of so many samples if arithmetic or memory were busy all the time: matrix operators, then others.

    Source: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009.

    Returns:
        Samples per second; None where nothing fits or the GPU's rate at this precision is not known.
    """
    rate = gpu.tflops.get(precision)
    if rate is None or work is None:
        return None
    bandwidth = gpu.bandwidth_bytes_per_second
    seconds = max(work.flops / (rate * _TERA), work.matmul_bytes / bandwidth) + work.other_bytes / bandwidth
    return samples / seconds if seconds > 0 else None

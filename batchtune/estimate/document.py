"""`batchtune estimate` as a function: which GPUs and precisions a person means, and the document that answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from batchtune.device.gpus import Gpu, all_gpus, find_gpu
from batchtune.document import Estimate, Failure, TaskInfo
from batchtune.errors import BatchtuneError, NothingFitsError, RunInterrupted, UsageError
from batchtune.estimate.run import PRECISIONS, Question, estimate_task, shortage
from batchtune.observer import Observer
from batchtune.result import Result
from batchtune.task.spec import file_hash


def run_estimate(
    task: str,
    gpus: Sequence[str],
    precisions: Sequence[str],
    *,
    memory_limit: int | None,
    accumulation_steps: int,
    strategy: str,
    world_size: int,
    inference: bool,
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
    info = TaskInfo(path=task, sha256=file_hash(task))
    chosen = choose_gpus(gpus)
    names = list(PRECISIONS) if list(precisions) == ["all"] else list(precisions)
    observer.stage(f"tracing for {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}")
    question = Question(
        task=task,
        memory_limit=memory_limit,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        world_size=world_size,
        inference=inference,
    )
    try:
        found = estimate_task(question, chosen, names, observer=observer, timeout=timeout)
    except (BatchtuneError, KeyboardInterrupt) as caught:
        error = caught if isinstance(caught, BatchtuneError) else RunInterrupted("interrupted: nothing was estimated")
        status: Literal["interrupted", "failed"] = "failed" if error is caught else "interrupted"
        failure = Failure(exit_code=error.exit_code, message=str(error))
        error.result = Result(kind="estimate", status=status, task=info, error=failure)
        raise error from None
    result = Result(
        kind="estimate", status="complete", task=info, estimates=found.estimates, details=found.details or None
    )
    if found.refusal is not None:
        failure = Failure(exit_code=found.refusal.exit_code, message=str(found.refusal))
        found.refusal.result = result.model_copy(update={"status": "failed", "error": failure})
        raise found.refusal
    if all(row.max_batch_size == 0 for row in found.estimates):
        nothing = NothingFitsError(too_large(found.estimates, may_shard=question.may_shard))
        nothing.result = result
        raise nothing
    return result


def too_large(rows: Sequence[Estimate], *, may_shard: bool = True) -> str:
    """One line for rows of which none holds a batch of 1: the need and the remedy on the GPU with the most memory."""
    roomiest = max(rows, key=lambda row: (any(each.max_batch_size for each in row.remedies), row.memory_bytes))
    gpus = len({row.gpu for row in rows})
    where = f"any of {gpus} GPUs; {roomiest.gpu}" if gpus > 1 else roomiest.gpu
    why = "; ".join(shortage(roomiest.needed_bytes, roomiest.remedies, may_shard=may_shard))
    return f"nothing fits on {where} at {roomiest.precision}: {why}"


def choose_gpus(names: Sequence[str]) -> list[Gpu]:
    """The catalogue's rows for names, each once; `all` is every row.

    Raises:
        UsageError: a name that the catalogue lacks, or that means several of its rows.
    """
    if "all" in names:
        return list(all_gpus())
    return list(dict.fromkeys(find_gpu(name) for name in names))

"""One answer out of those of a group's ranks: the peak of the fullest, the time of the slowest, whose fault it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchtune.document import Attempt, DeviceProcess, LoaderPoint, ThroughputPoint
from batchtune.protocol.commands import Opened, OpenTask, TimeLoader, TimeSteps, Tried, TryBatchSize
from batchtune.protocol.messages import AnyCommand, Json


def failed(answer: Json) -> bool:
    """Whether a rank's answer keeps the others from coming to an end."""
    return "done" not in answer or told(answer).get("attempt", {}).get("outcome", "fit") != "fit"


def told(answer: Json) -> Json:
    """What was done, where that is a record; some commands are answered by a list, or by nothing."""
    done = answer.get("done")
    return done if isinstance(done, dict) else {}


def merge(command: AnyCommand, answers: Mapping[int, Json], world_size: int) -> Json:
    """One answer out of the ranks', in the order in which they came; where one failed, others may be missing."""
    errors = [rank for rank, answer in answers.items() if "done" not in answer]
    if errors:
        return _as_told_by(answers, errors[0], world_size)
    done = {rank: command.read(answer["done"]) for rank, answer in answers.items()}
    match command:
        case TryBatchSize():
            merged: Any = _attempt(done, world_size)
        case OpenTask():
            merged = _opened(done)
        case TimeSteps() | TimeLoader():
            merged = _slowest(done)
        case _:
            merged = done[min(done)]
    return {"done": command.write(merged)}


def _as_told_by(answers: Mapping[int, Json], rank: int, world_size: int) -> Json:
    """One rank's error; its number is told where the others did not say the same, unless it names a setting of all."""
    answer = answers[rank]
    alike = sum(each.get("error") == answer.get("error") for each in answers.values()) == world_size
    if alike or world_size == 1 or answer.get("setting"):
        return answer
    return answer | {"error": f"rank {rank}: {answer['error']}", "rank": rank}


def _attempt(done: Mapping[int, Tried], world_size: int) -> Tried:
    """Fit only if all fit; the peaks are the highest, the times the longest."""
    attempts = {rank: answer.attempt for rank, answer in done.items()}
    unfit = [rank for rank, attempt in attempts.items() if not attempt.fits]
    merged = attempts[unfit[0]] if unfit else attempts[min(attempts)]
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "forward_backward_peak_bytes", "steps_peak_bytes")
    changes = {name: _most(attempts.values(), name) for name in (*peaks, "step_seconds", "seconds", "recompiles")}
    evaluated = [each.evaluation_batch_size for each in attempts.values() if each.evaluation_batch_size is not None]
    changes["evaluation_batch_size"] = min(evaluated, default=None)
    if unfit:
        changes["forward_backward_peak_bytes"] = None
        alike = len(unfit) == world_size and len({attempts[rank].outcome for rank in unfit}) == 1
        if not alike:
            changes |= {"limiting_rank": unfit[0], "message": f"rank {unfit[0]}: {merged.message}"}
    complete = len(done) == world_size
    usable = complete and all(answer.usable for answer in done.values())
    frames = next((each.frames for each in done.values() if each.frames), "")
    return Tried(attempt=merged.model_copy(update=changes), usable=usable, frames=frames)


def _opened(answers: Mapping[int, Opened | None]) -> Opened | None:
    """What the ranks have opened; None where they were told that it is known."""
    done = {rank: each for rank, each in answers.items() if each is not None}
    if not done:
        return None
    limits = tuple(done[rank].memory_limit_bytes for rank in sorted(done))
    first = done[min(done)]
    environment = first.environment.model_copy(update={"other_processes": _neighbours(done)})
    known = [limit for limit in limits if limit is not None]
    changes = {"memory_limit_bytes": min(known, default=None), "rank_memory_limits_bytes": limits}
    forks = all(each.forks for each in done.values())
    return first.model_copy(update=changes | {"environment": environment, "forks": forks})


def _neighbours(done: Mapping[int, Opened]) -> list[DeviceProcess] | None:
    """Who else holds memory of any rank's device; None where no device tells."""
    known = [each for rank in sorted(done) if (each := done[rank].environment.other_processes) is not None]
    found: list[DeviceProcess] = []
    for process in (process for processes in known for process in processes):
        if process not in found:  # ranks that share a device see the same
            found.append(process)
    return found if known else None


def _slowest(done: Mapping[int, ThroughputPoint | LoaderPoint]) -> ThroughputPoint | LoaderPoint:
    """A group goes at the pace of its slowest rank; one that told no speed failed."""
    return min(done.values(), key=lambda answer: answer.samples_per_second or 0.0)


def _most(attempts: Iterable[Attempt], name: str) -> object:
    return max((value for each in attempts if (value := getattr(each, name)) is not None), default=None)

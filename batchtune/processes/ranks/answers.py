"""What the ranks' answers to one command come to: one answer, in which the group is as good as its weakest rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Answer = dict[str, Any]


def failed(answer: Answer) -> bool:
    """Whether a rank's answer keeps the others from coming to an end."""
    return "done" not in answer or answer["done"].get("attempt", {}).get("outcome", "fit") != "fit"


def merge(command: str, answers: Mapping[int, Answer], world_size: int) -> Answer:
    """One answer out of the ranks'.

    Args:
        command: what they were asked.
        answers: by rank, in the order in which they came; where one failed, others may be missing.
        world_size: how many ranks were asked.
    """
    errors = [rank for rank, answer in answers.items() if "done" not in answer]
    if errors:
        return _as_told_by(answers, errors[0], world_size)
    done = {rank: answer["done"] for rank, answer in answers.items()}
    if command == "attempt":
        return {"done": _attempt(done, world_size)}
    if command == "open":
        return {"done": _facts(done)}
    if command in {"time_steps", "time_loader"}:
        return {"done": _slowest(done)}
    return {"done": done[min(done)]}


def _as_told_by(answers: Mapping[int, Answer], rank: int, world_size: int) -> Answer:
    """One rank's error; its number is told where the others did not say the same."""
    answer = answers[rank]
    alike = sum(each.get("error") == answer.get("error") for each in answers.values()) == world_size
    return answer if alike or world_size == 1 else answer | {"error": f"rank {rank}: {answer['error']}", "rank": rank}


def _attempt(done: Mapping[int, Answer], world_size: int) -> Answer:
    """Fit only if all fit; the peaks are the highest, the times the longest."""
    attempts = {rank: answer["attempt"] for rank, answer in done.items()}
    unfit = [rank for rank, attempt in attempts.items() if attempt["outcome"] != "fit"]
    merged = dict(attempts[unfit[0]] if unfit else attempts[min(attempts)])
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "forward_backward_peak_bytes")
    for name in (*peaks, "step_seconds", "seconds", "recompiles"):
        merged[name] = _most(attempts.values(), name)
    if unfit:
        merged["forward_backward_peak_bytes"] = None
        alike = len(unfit) == world_size and len({attempts[rank]["outcome"] for rank in unfit}) == 1
        if not alike:
            merged["limiting_rank"] = unfit[0]
            merged["message"] = f"rank {unfit[0]}: {merged['message']}"
    complete = len(done) == world_size
    return {"attempt": merged, "usable": complete and all(answer["usable"] for answer in done.values())}


def _facts(done: Mapping[int, Answer]) -> Answer:
    limits = {rank: facts["memory_limit_bytes"] for rank, facts in sorted(done.items())}
    known = [limit for limit in limits.values() if limit is not None]
    first = done[min(done)]
    return first | {
        "environment": first["environment"] | {"other_processes": _neighbours(done)},
        "memory_limit_bytes": min(known, default=None),
        "rank_memory_limits_bytes": list(limits.values()),
    }


def _neighbours(done: Mapping[int, Answer]) -> list[Any] | None:
    """Who else holds memory of any rank's device; None where no device tells."""
    told = [facts["environment"].get("other_processes") for _, facts in sorted(done.items())]
    known = [processes for processes in told if processes is not None]
    found: list[Any] = []
    for process in (process for processes in known for process in processes):
        if process not in found:  # ranks that share a device see the same
            found.append(process)
    return found if known else None


def _slowest(done: Mapping[int, Answer]) -> Answer:
    """A group goes at the pace of its slowest rank; one that told no speed failed."""
    return min(done.values(), key=lambda answer: answer["samples_per_second"] or 0.0)


def _most(attempts: Any, name: str) -> Any:
    return max((each[name] for each in attempts if each.get(name) is not None), default=None)

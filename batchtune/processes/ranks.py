"""Groups of ranks: one that is started here, or inside of the user's own torchrun; its devices; its one answer."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from batchtune.config.ranks import TorchrunEnv
from batchtune.device.host import processors
from batchtune.device.nvml import distances
from batchtune.document import Attempt, DeviceProcess
from batchtune.errors import UsageError
from batchtune.processes.local import LocalProcess, Process, child_environment, entry
from batchtune.processes.torchrun import Leader
from batchtune.protocol.commands import Opened, OpenTask, TimeLoader, TimeSteps, Tried, TryBatchSize
from batchtune.protocol.messages import AnyCommand, Json, Message

FOLLOWING_SECONDS = 120.0  # in which the processes that the user's own launcher started join a group
RANKS_A_PROCESSOR = 16  # that may share one: each is a process with torch in it, and too many take all memory
MOST_DEVICES = 16  # whose groups are all looked at, to find those closest to one another
Apart: TypeAlias = tuple[int, int]  # of a group, or of all: the most that two of its devices are apart, and all pairs'


class GroupSettings(Message):
    """What a group is started with."""

    world_size: int
    strategy: str
    name: str = ""  # among the groups that the user's own launcher holds; none: the ranks are launched here
    patience_seconds: float = 0.0  # with all processes of the user's own launcher, before one is given up


class RankLauncher:
    """Starts processes that train one model together, each on its own device, with the interface of one child.

    The batch size of a command is each rank's. An attempt fits only if it fits on all of them, and a failure on one
    ends it for all: those that wait for the failed one in a collective are killed after a short time of grace, and the
    next command starts the group again. Of the device that is named, each rank takes the one of its number.

    Where the user's own launcher runs the ranks, its leader names the groups; else torch's is started for each.
    """

    def __init__(
        self,
        world_size: int,
        strategy: str,
        echo: Callable[[str], None] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._world_size, self._strategy = world_size, strategy
        self._echo, self._environment = echo, dict(environment or {})

    def start(self) -> Process:
        name = Leader.at_work.next_group() if Leader.at_work else ""
        if not name and self._world_size > (most := RANKS_A_PROCESSOR * processors()):
            told = f"more than the {most} ranks that may share the {processors()} processors here; name fewer"
            raise UsageError(f"{self._world_size}: {told}", setting="ranks")
        group = GroupSettings(
            world_size=self._world_size, strategy=self._strategy, name=name, patience_seconds=FOLLOWING_SECONDS
        )
        command = [*entry("batchtune.processes.coordinator"), group.model_dump_json()]
        threads = max(1, processors() // self._world_size)  # ranks that train on the host share its processors
        environment = {"OMP_NUM_THREADS": str(threads)} | child_environment() | self._environment
        return LocalProcess(command, environment, self._echo, leads_sessions=True)


def closest_seats(device: str, each: int) -> dict[str, str]:
    """What a group's environment says, so that so many ranks are on close devices; nothing: they are as they are."""
    if each == 1 or device == "cpu" or (found := distances(os.environ.get("CUDA_VISIBLE_DEVICES"))) is None:
        return {}
    names, apart = found
    order = by_closeness(apart, each)
    closer = ",".join(names[number] for number in order)
    return {} if order == sorted(order) else {"CUDA_VISIBLE_DEVICES": closer}


def by_closeness(distances: Sequence[Sequence[int]], each: int) -> list[int]:
    """An order of the devices in which so many at a time are a group; as they are, where no other is closer.

    The widest distance within a group counts first, since ranks wait for their slowest connection, then the sum of all.
    The closest group comes first, and devices that are left over come last.

    Args:
        distances: of each device to each.
        each: devices of a group.
    """
    count = len(distances)
    if not 1 < each < count <= MOST_DEVICES:
        return list(range(count))

    def apart(group: tuple[int, ...]) -> Apart:
        pairs = [distances[one][other] for one, other in itertools.combinations(group, 2)]
        return max(pairs), sum(pairs)

    @functools.cache
    def best(left: tuple[int, ...], spare: int) -> tuple[Apart, tuple[tuple[int, ...], ...]]:
        """The groups of these devices, of which so many need not be in any, and how far apart they are."""
        if len(left) < each:
            return (-(2**62), 0), ()
        first, *others = left
        found = [best(left[1:], spare - 1)] if spare else []
        for more in itertools.combinations(others, each - 1):
            group = first, *more
            widest, total = apart(group)
            rest, groups = best(tuple(device for device in others if device not in more), spare)
            found.append(((max(widest, rest[0]), total + rest[1]), (group, *groups)))
        return min(found, key=lambda either: either[0])

    groups = best(tuple(range(count)), count % each)[1]
    order = list(itertools.chain(*sorted(groups, key=apart)))
    return order + [device for device in range(count) if device not in order]


def world_size_here(nproc_per_node: int) -> int:
    """How many ranks a probe is of: so many as are asked for, or inside of torchrun all that it has started.

    Raises:
        UsageError: another number than those is asked for.
    """
    torchrun = TorchrunEnv.from_environment()
    if torchrun is None:
        return nproc_per_node
    if nproc_per_node not in {1, torchrun.world_size}:
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: torchrun has started {torchrun.world_size} ranks; leave the option out"
        )
    return torchrun.world_size


def failed(answer: Json) -> bool:
    """Whether a rank's answer keeps the others from coming to an end."""
    return "done" not in answer or told(answer).get("attempt", {}).get("outcome", "fit") != "fit"


def told(answer: Json) -> Json:
    """What was done, where that is a record; some commands are answered by a list, or by nothing."""
    done = answer.get("done")
    return done if isinstance(done, dict) else {}


def merge(command: AnyCommand, answers: Mapping[int, Json], world_size: int) -> Json:
    """One answer out of the ranks', in the order in which they came: the peak of the fullest, the time of the slowest.

    Where one failed, others may be missing.
    """
    errors = [rank for rank, answer in answers.items() if "done" not in answer]
    if errors:
        return _as_told_by(answers, errors[0], world_size)
    done = {rank: command.read(answer["done"]) for rank, answer in answers.items()}
    match command:
        case TryBatchSize():
            merged: Any = _attempt(done, world_size)
        case OpenTask():
            merged = _opened(done)
        case TimeSteps() | TimeLoader():  # a group goes at the pace of its slowest; one that told no speed failed
            merged = min(done.values(), key=lambda answer: answer.samples_per_second or 0.0)
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
    most = min((each.most_samples for each in done.values() if each.most_samples), default=None)
    differ = any(answer.batches_differ for answer in done.values())
    attempt = merged.model_copy(update=changes)
    return Tried(
        attempt=attempt,
        usable=usable,
        frames=frames,
        batches_differ=differ,
        most_samples=most,
        fails_in_half=any(answer.fails_in_half for answer in done.values()),
    )


def _opened(answers: Mapping[int, Opened | None]) -> Opened | None:
    """What the ranks have opened; None where they were told that it is known."""
    done = {rank: each for rank, each in answers.items() if each is not None}
    if not done:
        return None
    limits = tuple(done[rank].memory_limit_bytes for rank in sorted(done))
    first = done[min(done)]
    environment = first.environment.model_copy(update={"other_processes": _neighbours(done)})
    return first.but(
        memory_limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        rank_memory_limits_bytes=limits,
        environment=environment,
        forks=all(each.forks for each in done.values()),
    )


def _neighbours(done: Mapping[int, Opened]) -> list[DeviceProcess] | None:
    """Who else holds memory of any rank's device; None where no device tells."""
    known = [each for rank in sorted(done) if (each := done[rank].environment.other_processes) is not None]
    return list(dict.fromkeys(itertools.chain(*known))) if known else None  # ranks that share a device see the same


def _most(attempts: Iterable[Attempt], name: str) -> object:
    return max((value for each in attempts if (value := getattr(each, name)) is not None), default=None)

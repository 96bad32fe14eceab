"""Groups of ranks: one that is started here, or inside of the user's own torchrun; and which devices form one."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from batchtune.config.ranks import TorchrunEnv
from batchtune.device.host import processors
from batchtune.device.nvml import distances
from batchtune.errors import UsageError
from batchtune.processes.local import LocalProcess, Process, child_environment, entry
from batchtune.processes.torchrun import Leader
from batchtune.protocol.messages import Message

FOLLOWING_SECONDS = 120.0  # in which the processes that the user's own launcher started join a group
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

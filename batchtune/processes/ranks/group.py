"""Starts groups of ranks: to whoever probes, each is a child like any other."""

from __future__ import annotations

import os
from collections.abc import Callable

from batchtune.processes.local import LocalProcess, Process, child_environment, entry
from batchtune.processes.ranks.coordinator import GroupSettings
from batchtune.processes.ranks.torchrun import Leader


class RankLauncher:
    """Starts processes that train one model together, each on its own device, with the interface of one child.

    The batch size of a command is each rank's. An attempt fits only if it fits on all of them, and a failure on one
    ends it for all: those that wait for the failed one in a collective are killed after a short time of grace, and the
    next command starts the group again. Of the device that is named, each rank takes the one of its number.

    Args:
        world_size: number of ranks.
        strategy: ddp or fsdp.
        echo: called with each line the user's code prints.
        leader: where the user's own launcher runs the ranks; None: torch's is started for each group.
    """

    def __init__(
        self,
        world_size: int,
        strategy: str,
        echo: Callable[[str], None] | None = None,
        *,
        leader: Leader | None = None,
    ) -> None:
        self._world_size, self._strategy = world_size, strategy
        self._echo, self._leader = echo, leader

    def start(self) -> Process:
        number = self._leader.next_group() if self._leader else 0
        group = GroupSettings(world_size=self._world_size, strategy=self._strategy, number=number)
        command = [*entry("batchtune.processes.ranks.coordinator"), group.to_argument()]
        threads = max(1, (os.cpu_count() or 1) // self._world_size)  # ranks that train on the host share its processors
        return LocalProcess(command, {"OMP_NUM_THREADS": str(threads)} | child_environment(), self._echo)

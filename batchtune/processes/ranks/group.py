"""The parent's side of a group of ranks: to whoever probes, a worker like any other."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchtune.processes.local import entry
from batchtune.processes.ranks.coordinator import GroupSettings
from batchtune.processes.ranks.torchrun import Leader
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask

_REAPING_SECONDS = 3.0  # for the launcher to see its ranks' end; torch's looks ten times a second


class RankGroup(Worker):
    """Several processes that train one model together, each on its own device, with the interface of one child.

    The batch size of a command is each rank's. An attempt fits only if it fits on all of them, and a failure on one
    ends it for all: those that wait for the failed one in a collective are killed after a short time of grace, and the
    next command starts the group again.

    Args:
        settings: as for one child; `device` names a kind, of which each rank takes the one of its number.
        world_size: number of ranks.
        strategy: ddp or fsdp.
        echo: called with each line the user's code prints.
        grace_seconds: how long the other ranks may take to answer once one has failed.
        rank_limits: memory limits in bytes of single ranks, over that of `settings`.
        leader: where the user's own launcher runs the ranks; None: torch's is started for each group.
    """

    def __init__(
        self,
        settings: OpenTask,
        world_size: int,
        strategy: str,
        echo: Callable[[str], None] | None = None,
        *,
        grace_seconds: float = 3.0,
        rank_limits: Mapping[int, int] | None = None,
        leader: Leader | None = None,
    ) -> None:
        super().__init__(settings, echo)
        limits = {str(rank): limit for rank, limit in (rank_limits or {}).items()}
        self._group = GroupSettings(
            world_size=world_size, strategy=strategy, grace_seconds=grace_seconds, rank_limits=limits
        )
        self._pids: list[int] = []
        self._leader = leader

    def prepare(self) -> None:
        """Nothing: a second group would be in the way of the first."""

    def renew(self) -> None:
        """Ends the ranks, the launcher and all that they started; the next command starts others."""
        pids, self._pids = self._pids, []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each leads a session of its own
        if pids and self._process is not None:
            self._process.wait(_REAPING_SECONDS)
        super().renew()

    def _command(self) -> list[str]:
        if self._leader is not None:
            self._group = replace(self._group, number=self._leader.next_group())
        return [*entry("batchtune.processes.ranks.coordinator"), self._group.to_argument()]

    def _environment(self) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // self._group.world_size)
        usual = {"OMP_NUM_THREADS": str(threads)}  # ranks that train on the host share its processors
        return usual | super()._environment()

    def _keep_limit(self, settings: OpenTask, opened: Opened) -> None:  # noqa: ARG002 - each rank has its own
        limits = {str(rank): limit for rank, limit in enumerate(opened.rank_memory_limits_bytes) if limit}
        self._group = replace(self._group, rank_limits=limits)

    def _heard(self, answer: dict[str, Any]) -> bool:
        if "rank_pids" in answer:
            self._pids = answer["rank_pids"]
            return True
        return super()._heard(answer)

"""One rank's process: a child that takes its commands from a socket, and trains as a part of its group."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from typing import Any

import torch

from batchtune.child.server import Child, serve
from batchtune.child.training.parallel import Parallel
from batchtune.device.sharing import Sharing, usable_now
from batchtune.errors import UsageError
from batchtune.protocol.channel import Channel, give_standard_streams_away
from batchtune.protocol.commands import Done, Opened, OpenTask, Rejoin
from batchtune.protocol.messages import AnyCommand
from batchtune.protocol.rendezvous import Rendezvous

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


class RankChild(Child):
    """A child that is one of several ranks.

    Args:
        channel: the line to the coordinator.
        rendezvous: the group's.
    """

    def __init__(self, channel: Channel, rendezvous: Rendezvous) -> None:
        super().__init__(channel)
        self._rendezvous = rendezvous

    def answer(self, command: AnyCommand) -> Any:
        return self._rejoin() if isinstance(command, Rejoin) else super().answer(command)

    def open(self, command: OpenTask) -> Opened | None:
        """As a child alone does, with what is to be known of the group."""
        limits = command.rank_memory_limits_bytes
        own = {"memory_limit": limits[int(os.environ["RANK"])]} if limits else {}
        opened, group = super().open(command.but(device=_own_device(command.device), **own)), self._parallel
        assert group is not None and opened is not None  # noqa: PT018, S101 - it was made when the device was opened
        about = {"world_size": group.world_size, "strategy": group.strategy, "backend": group.backend}
        return opened.model_copy(update=about)

    def _open_device(self, name: str) -> Sharing | None:
        """Makes the group, too: what its connections take is not in the memory limit."""
        seen = super()._open_device(name)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        strategy: Any = self._rendezvous.strategy
        device = self._memory.device
        self._parallel = Parallel(strategy, device, rank=rank, world_size=world_size, name=self._rendezvous.name)
        with usable_now(name, seen):
            self._parallel.join()
        return seen

    def _default_limit(self, margin: float) -> int | None:
        """On a CPU a share: the ranks of a host share its memory."""
        limit, on_cpu = super()._default_limit(margin), self._memory.device.type == "cpu"
        return limit // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if limit and on_cpu else limit

    def _rejoin(self) -> Done:
        assert self._parallel is not None  # noqa: S101 - it was opened
        self._parallel.join()
        return Done()


def _own_device(device: str) -> str:
    """The device of this rank: on a machine with several, that of its local number."""
    if ":" in device:
        raise UsageError(
            f"{device}: each rank has a device of its own; name the kind alone, e.g. cuda", setting="device"
        )
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator else "cpu"
    return device if device == "cpu" else f"{device}:{os.environ['LOCAL_RANK']}"


def main() -> None:
    """The rank's process, with torch's environment variables for ranks and a `Rendezvous`."""
    _die_with_parent()
    rendezvous = Rendezvous.from_environment()
    try:
        line = rendezvous.connect(rank=int(os.environ["RANK"]), pid=os.getpid())
    except OSError:
        sys.exit(0)  # the group was ended before it began
    give_standard_streams_away()
    channel = Channel(line.makefile("r", encoding="utf-8"), line.makefile("w", encoding="utf-8"))
    serve(RankChild(channel, rendezvous), channel)


def _die_with_parent() -> None:
    """Linux ends this process with its launcher, even when it hangs where no line to anybody is read."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

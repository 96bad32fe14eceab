"""One rank's process: a child that takes its commands from a socket, and trains as a part of its group."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import signal
import sys
import zlib
from typing import Any

from batchtune.child.image import serve_forks
from batchtune.child.ranks._base import ALONE, shared_by_user
from batchtune.child.ranks.parallel import Parallel, load_early
from batchtune.child.server import Child
from batchtune.child.trainer import Trainer, training_loader
from batchtune.device.memory import count_devices, find_device
from batchtune.errors import DeviceError, UsageError
from batchtune.protocol.commands import Opened, OpenTask, Rejoin, Train, TryBatchSize
from batchtune.protocol.messages import NO_VARIANT, AnyCommand, Channel, Rendezvous, give_standard_streams_away
from batchtune.vocabulary import Variant

_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_DEALS_OUT = "ranks read different samples of your stream: it is taken as dealt out by your code, not dealt out again"


class RankChild(Child):
    """A child that is one of several ranks."""

    def __init__(self, channel: Channel, rendezvous: Rendezvous, **how: Any) -> None:
        super().__init__(channel, **how)
        self._rendezvous = rendezvous
        self._group: Parallel

    def answer(self, command: AnyCommand) -> object:
        if isinstance(command, Rejoin):
            self._group.join()
            return None
        if self._ranks is not ALONE:
            self._group.strategy = _variant_of(command).strategy or self._rendezvous.strategy
        with self._group.unseen() if command.by_itself else contextlib.nullcontext():
            return super().answer(command)

    def open(self, command: OpenTask) -> Opened | None:
        """As a child alone does, with what is to be known of the group."""
        limits = command.rank_memory_limits_bytes
        own = {"memory_limit": limits[int(os.environ["RANK"])]} if limits else {}
        opened = super().open(command.but(device=_own_device(command.device), **own))
        group, task = self._group, self._task
        first = task.loader if task.has("train_loader") else functools.partial(training_loader, task, seed=0)
        deals_out = command.deals_out if opened is None else shared_by_user(first, group)
        task.parts = group.world_size if deals_out else 1
        if opened is not None:
            notes = (*opened.notes, *[_DEALS_OUT] * deals_out)
            opened = opened.but(deals_out=deals_out, train_size=task.train_size(), notes=notes)
        if opened is not None and command.purpose == "tune":  # what a way of sharing does not take is to be said now
            _require_alike(group, opened)
            for strategy in command.strategies:
                group.strategy = strategy
                Trainer(task, self._memory.device, opened.precision[0][0], ranks=group)
                self._memory.release()
            group.strategy = self._rendezvous.strategy
        return opened and opened.but(world_size=group.world_size, strategy=group.strategy, backend=group.backend)

    def _join(self) -> None:
        """Before the memory limit, in which what the group's connections take does not count."""
        self._ranks = self._group = Parallel(self._memory.device, self._rendezvous, self._fork)
        with self._usable_now():
            self._group.join()

    def _default_limit(self, margin: float) -> int | None:
        """On a CPU a share: the ranks of a host share its memory."""
        limit, on_cpu = super()._default_limit(margin), self._memory.device.type == "cpu"
        return limit // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if limit and on_cpu else limit


def _variant_of(command: AnyCommand) -> Variant:
    """What this command trains by, where it says so."""
    if isinstance(command, Train):
        return command.spec.variant
    return command.variant if isinstance(command, TryBatchSize) else NO_VARIANT


def _require_alike(group: Parallel, opened: Opened) -> None:
    """Refuses ranks on unlike GPUs: all would wait for the slowest, and times would be of neither."""
    names = group.each(float(zlib.crc32((opened.environment.device or "").encode())))
    other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other is not None:
        told = f"{group.world_size}: rank {other} has another kind of GPU than rank 0"
        raise DeviceError(f"{told}; name GPUs of one kind in CUDA_VISIBLE_DEVICES", setting="ranks")


def _own_device(device: str) -> str:
    """The device of this rank: on a machine with several, that of its local number."""
    if ":" in device:
        raise UsageError(
            f"{device}: each rank has a device of its own; name the kind alone, e.g. cuda", setting="device"
        )
    found, ranks = find_device(device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found.type == "cpu":
        return "cpu"
    if (count := count_devices(found)) < ranks:
        raise DeviceError(f"{ranks}: there are only {count} {found.type} devices here", setting="ranks")
    return f"{found.type}:{os.environ['LOCAL_RANK']}"


def main() -> None:
    """The rank's process, with torch's environment variables for ranks and a `Rendezvous`."""
    _die_with_parent()
    rendezvous = Rendezvous.from_environment()
    try:
        line = rendezvous.connect(rank=int(os.environ["RANK"]), pid=os.getpid())
    except OSError:
        sys.exit(0)  # the group was ended before it began
    give_standard_streams_away()

    def make(channel: Channel, **how: Any) -> Child:
        _die_with_parent()
        return RankChild(channel, rendezvous, **how)

    load_early()
    commands = line.detach()
    serve_forks(commands, os.dup(commands), make)


def _die_with_parent() -> None:
    """Linux ends this process with its launcher, even when it hangs where no line to anybody is read."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

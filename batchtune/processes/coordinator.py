"""The process between the parent and its ranks: it has torch's elastic launcher start them, and coordinates them.

To the parent it is a child like any other: one command after another comes on stdin, goes to every rank, and what the
ranks answer comes out of stdout as one answer. It holds no device. A rank that fails gives the others a short time of
grace, in which they may say how they fared: in a collective they would wait for the failed one forever.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from batchtune.errors import DeviceError
from batchtune.processes.local import FROM_OUTSIDE, describe_exit, entry, kill_sessions_below
from batchtune.processes.ranks import GroupSettings, failed, merge, told
from batchtune.processes.torchrun import open_store
from batchtune.protocol.commands import Rejoin, Renew
from batchtune.protocol.messages import AnyCommand, Channel, Command, Json, Rendezvous, move_standard_streams, watched

_GRACE_SECONDS = 3.0  # for the other ranks when one has failed
_REJOIN_SECONDS, _ENDLESS_SECONDS = 20.0, 1e9
_REPORT_SECONDS = 5.0  # until the launcher says by which exit status a rank ended; it looks ten times a second


class RankCoordinator:
    """The ranks' side of one parent's commands."""

    def __init__(self, settings: GroupSettings, parent: Channel) -> None:
        self._settings, self._parent = settings, parent
        own = not settings.name
        self._server = socket.create_server(("127.0.0.1" if own else "", 0))
        host, port = "127.0.0.1" if own else os.environ["MASTER_ADDR"], self._server.getsockname()[1]
        self.rendezvous = Rendezvous(
            host=host, port=port, token=secrets.token_hex(16), strategy=settings.strategy, name=settings.name
        )
        self._lines: dict[int, socket.socket] = {}
        self._followers: dict[int, socket.socket] = {}
        self._followed = threading.Event()
        self._said: queue.Queue[tuple[int, Json | None]] = queue.Queue()
        self._everybody_here = threading.Event()
        self._exits: dict[int, int] = {}
        self._ended = threading.Event()
        self._is_whole = True  # no rank is late with an answer, or gone
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._admit, daemon=True).start()

    def serve(self) -> None:
        """Answers the parent's commands until a rank is lost; the parent then ends this process."""
        while True:
            command = Command.from_message(self._parent.receive())
            self._idle.clear()
            self._parent.send(**(self._missing() or self._answer(command)))
            self._idle.set()

    def ranks_ended(self, exits: Mapping[int, int]) -> None:
        """Ranks have ended with such a status, the group with them; returns when the parent knows."""
        self._exits |= exits
        self._ended.set()
        self._everybody_here.set()
        self._idle.wait(_REPORT_SECONDS)

    def _missing(self) -> Json | None:
        """Waits for the ranks; the error where the user's launcher has no process any more that would run one."""
        if self._settings.name and not self._followed.wait(self._settings.patience_seconds):
            ranks = ", ".join(str(rank) for rank in range(self._settings.world_size) if rank not in self._followers)
            why = f"rank {ranks}: its process or its machine is gone; start torchrun again"
            return {"exit_code": DeviceError.exit_code, "error": why}
        self._everybody_here.wait()
        return None

    def _admit(self) -> None:
        while len(self._lines) < self._settings.world_size:
            line, _ = self._server.accept()
            words = watched(line).makefile("r", encoding="utf-8")
            hello = json.loads(words.readline() or "{}")
            if hello.get("token") != self.rendezvous.token:
                line.close()
                continue
            rank, follows = hello["rank"], "follows" in hello
            threading.Thread(target=self._watch if follows else self._listen, args=(rank, words), daemon=True).start()
            if follows:
                self._followers[rank] = line  # it ends with this process
                if len(self._followers) == self._settings.world_size:
                    self._followed.set()
                continue
            self._lines[rank] = line
            if not self._settings.name:
                self._parent.send(alive=True, sessions=[hello["pid"]])
        self._everybody_here.set()

    def _watch(self, rank: int, words: IO[str]) -> None:
        """Hears from the process that runs a rank how that ended."""
        exits = {}
        with contextlib.suppress(OSError, ValueError):
            exits = {rank: int(json.loads(words.readline())["ended"])}
        self._said.put((rank, None))
        self.ranks_ended(exits)

    def _listen(self, rank: int, words: IO[str]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for text in words:
                self._said.put((rank, json.loads(text)))
        self._said.put((rank, None))

    def _answer(self, command: AnyCommand) -> Json:
        ranks = command.asked(self._settings.world_size)
        if isinstance(command, Renew) and not self._is_whole:
            return {"outcome": "crash", "error": "a rank has not answered"}
        answers = self._ask(command, ranks)
        self._is_whole = self._is_whole and len(answers) == len(ranks)
        merged = self._loss(answers) or merge(command, answers, len(ranks))
        usable = told(merged).get("usable")
        if usable and any(failed(answer) for answer in answers.values()):
            merged["done"]["usable"] = self._is_whole = self._rejoined()
        return merged

    def _ask(self, command: AnyCommand, ranks: Sequence[int], seconds: float = _ENDLESS_SECONDS) -> dict[int, Json]:
        """The ranks' answers in the order in which they came; those that are late after a failure are left out."""
        for rank in ranks:
            self._send(rank, command.to_message())
        answers: dict[int, Json] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(ranks):
            try:
                rank, said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if said is not None and "alive" in said:
                self._parent.send(**said)
                continue
            if said is not None and "event" in said:  # of the first rank, which tells the others what is answered
                self._parent.send(**said)
                self._send(rank, self._parent.receive())
                continue
            answers[rank] = said or {"lost": True, "error": "its process ended"}
            if "lost" in answers[rank]:
                break
            if failed(answers[rank]):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers

    def _send(self, rank: int, message: Json) -> None:
        try:
            self._lines[rank].sendall((json.dumps(message) + "\n").encode())
        except (OSError, KeyError):  # its end is told by the listener, or it never came
            self._said.put((rank, None))

    def _loss(self, answers: Mapping[int, Json]) -> Json | None:
        """The answer where a rank's process ended, as told by whoever saw it end; None where none did."""
        lost = [rank for rank, answer in answers.items() if "lost" in answer]
        if not lost:
            return None
        self._ended.wait(_REPORT_SECONDS)
        rank = lost[0] if lost[0] in self._exits else min(self._exits, default=lost[0])  # the others were ended with it
        code = self._exits.get(rank)
        text = "its process or its machine is gone" if code is None else describe_exit(code)
        outside = code is None or -code in FROM_OUTSIDE  # of None nobody has told, as of a machine that is gone
        return {"outcome": "crash", "error": f"rank {rank}: {text}", "rank": rank, "from_outside": outside}

    def _rejoined(self) -> bool:
        """Whether all ranks have rejoined after a failure."""
        ranks = range(self._settings.world_size)
        answers = self._ask(Rejoin(), ranks, _REJOIN_SECONDS)
        return len(answers) == len(ranks) and not any(failed(answer) for answer in answers.values())


def _launch(settings: GroupSettings) -> dict[int, int]:
    """Has torch start the ranks and waits for their end; by rank, the status of those that failed first."""
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # that a rank failed is an outcome, told by us
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # torch 2.11's LaunchConfig has no argument for it
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.world_size,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks say everything to us: no files to be left behind
    )
    program, *arguments = entry("batchtune.child.rank")
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def main() -> None:
    """The launcher's process; its one argument is the group's settings."""
    parent = Channel(*move_standard_streams(), at_end=lambda: kill_sessions_below(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = GroupSettings.model_validate_json(sys.argv[1])
    coordinator = RankCoordinator(settings, parent)
    if settings.name:
        open_store().set(settings.name, coordinator.rendezvous.model_dump_json())
        coordinator.serve()
    os.environ |= coordinator.rendezvous.variable()
    threading.Thread(target=coordinator.serve, daemon=True).start()
    coordinator.ranks_ended(_launch(settings))

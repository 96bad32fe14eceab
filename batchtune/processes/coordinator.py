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
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from batchtune.document import Attempt, DeviceProcess, LoaderPoint, ThroughputPoint
from batchtune.processes.local import describe_exit, entry, kill_sessions_below
from batchtune.processes.ranks import GroupSettings, RendezvousStore
from batchtune.protocol.commands import Opened, OpenTask, Rejoin, Renew, TimeLoader, TimeSteps, Tried, TryBatchSize
from batchtune.protocol.messages import AnyCommand, Channel, Command, Json, Rendezvous

_GRACE_SECONDS = 3.0  # for the other ranks when one has failed
_REJOIN_SECONDS = 20.0
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # no process ends itself so by accident
_REPORT_SECONDS = 5.0  # until the launcher says by which exit status a rank ended; it looks ten times a second


class RankCoordinator:
    """The ranks' side of one parent's commands."""

    def __init__(self, settings: GroupSettings, parent: Channel) -> None:
        self._settings, self._parent = settings, parent
        own = settings.number == 0
        self._server = socket.create_server(("127.0.0.1" if own else "", 0))
        host, port = "127.0.0.1" if own else os.environ["MASTER_ADDR"], self._server.getsockname()[1]
        self.rendezvous = Rendezvous(
            host=host, port=port, token=secrets.token_hex(16), strategy=settings.strategy, name=str(settings.number)
        )
        self._lines: dict[int, socket.socket] = {}
        self._followers: list[socket.socket] = []
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
            self._everybody_here.wait()
            self._parent.send(**self._answer(command))
            self._idle.set()

    def ranks_ended(self, exits: Mapping[int, int]) -> None:
        """Ranks have ended with such a status, the group with them; returns when the parent knows."""
        self._exits |= exits
        self._ended.set()
        self._everybody_here.set()
        self._idle.wait(_REPORT_SECONDS)

    def _admit(self) -> None:
        while len(self._lines) < self._settings.world_size:
            line, _ = self._server.accept()
            words = line.makefile("r", encoding="utf-8")
            hello = json.loads(words.readline() or "{}")
            if hello.get("token") != self.rendezvous.token:
                line.close()
                continue
            rank, follows = hello["rank"], "follows" in hello
            threading.Thread(target=self._watch if follows else self._listen, args=(rank, words), daemon=True).start()
            if follows:
                self._followers.append(line)  # it ends with this process
                continue
            self._lines[rank] = line
            if not self._settings.number:
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
        answers = self._ask(command, ranks, None)
        self._is_whole = self._is_whole and len(answers) == len(ranks)
        merged = self._loss(answers) or merge(command, answers, len(ranks))
        usable = _told(merged).get("usable")
        if usable and any(failed(answer) for answer in answers.values()):
            merged["done"]["usable"] = self._is_whole = self._rejoined()
        return merged

    def _ask(self, command: AnyCommand, ranks: Sequence[int], seconds: float | None) -> dict[int, Json]:
        """The ranks' answers in the order in which they came; those that are late after a failure are left out."""
        for rank in ranks:
            self._send(rank, command.to_message())
        answers: dict[int, Json] = {}
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(answers) < len(ranks):
            try:
                rank, said = self._said.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
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
                grace = time.monotonic() + _GRACE_SECONDS
                deadline = grace if deadline is None else min(deadline, grace)
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
        text = "the process ended" if code is None else describe_exit(code)
        outside = code is None or -code in _FROM_OUTSIDE  # of None nobody has told, as of a machine that is gone
        return {"outcome": "crash", "error": f"rank {rank}: {text}", "rank": rank, "from_outside": outside}

    def _rejoined(self) -> bool:
        """Whether all ranks have rejoined after a failure."""
        ranks = range(self._settings.world_size)
        answers = self._ask(Rejoin(), ranks, _REJOIN_SECONDS)
        return len(answers) == len(ranks) and not any(failed(answer) for answer in answers.values())


def failed(answer: Json) -> bool:
    """Whether a rank's answer keeps the others from coming to an end."""
    return "done" not in answer or _told(answer).get("attempt", {}).get("outcome", "fit") != "fit"


def _told(answer: Json) -> Json:
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
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "forward_backward_peak_bytes")
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


def _opened(told: Mapping[int, Opened | None]) -> Opened | None:
    """What the ranks have opened; None where they were told that it is known."""
    done = {rank: each for rank, each in told.items() if each is not None}
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
    told = [done[rank].environment.other_processes for rank in sorted(done)]
    known = [processes for processes in told if processes is not None]
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
    parent = Channel.on_standard_streams(at_end=lambda: kill_sessions_below(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = GroupSettings.model_validate_json(sys.argv[1])
    coordinator = RankCoordinator(settings, parent)
    if settings.number:
        RendezvousStore().announce(settings.number, coordinator.rendezvous)
        coordinator.serve()
    os.environ |= coordinator.rendezvous.variable()
    threading.Thread(target=coordinator.serve, daemon=True).start()
    coordinator.ranks_ended(_launch(settings))

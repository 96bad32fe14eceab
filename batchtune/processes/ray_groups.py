"""A group of ranks on a Ray cluster: an actor for each of them, which does what a process of torchrun's does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchtune.config.ranks import Ranks, TorchrunEnv
from batchtune.errors import DeviceError
from batchtune.observer import Observer
from batchtune.processes.local import Process
from batchtune.processes.ranks import RankLauncher
from batchtune.processes.ray_actor import CALLS_AT_ONCE, LISTENING_SECONDS, Actor, Host, asked_of, in_a_line, room_for
from batchtune.processes.torchrun import Follower, Leader
from batchtune.processes.worker import NodeLost
from batchtune.protocol.messages import Json

_SCOPE = "batchtune/ray"


@dataclass(frozen=True)
class Seat:
    """Where an actor of a group is: its node, with an address and a port that is free there, and its GPUs."""

    node: str
    address: str
    port: int
    gpus: tuple[str, ...]


class RankHost(Host):
    """What runs in each actor of a group: a rank beside it, and in the first one's what coordinates them."""

    def seat(self) -> Seat:
        """Where Ray has put it."""
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Seat(node, address, port, tuple(map(str, ray.get_gpu_ids())))

    def join(self, variables: Mapping[str, str], strategy: str) -> None:
        """Becomes the rank that these variables tell of."""
        os.environ |= variables
        env = TorchrunEnv.from_environment()
        assert env is not None  # noqa: S101 - the variables are of several ranks
        if env.rank:
            threading.Thread(target=Follower(env, _SCOPE).follow, daemon=True).start()
            return
        Leader(env, _SCOPE).__enter__()  # it ends with the actor
        self._launcher = RankLauncher(env.world_size, strategy, self._printed.append)


class Group(Actor):
    """Starts a worker's groups of ranks: each has a placement group, and another one where an actor of it is lost."""

    def __init__(self, resources: Json, stopping: threading.Event, observer: Observer, ranks: Ranks) -> None:
        self._stopping, self._observer, self._ranks = stopping, observer, ranks
        self._resources = resources
        self._waiting: Sequence[object]
        self._members: list[ray.actor.ActorHandle]
        self._begin()

    def start(self) -> Process:
        """As of a single child; where an actor is gone, all of them are others."""
        if not self._waiting and not self._is_whole():
            self._lost()
        return super().start()

    def is_there(self) -> bool:
        """Whether Ray has put all ranks somewhere, and they have met; a DeviceError where one cannot be started."""
        while self._waiting:
            if len(ray.wait(self._waiting, num_returns=len(self._waiting), timeout=0)[0]) < len(self._waiting):
                return False
            try:
                ray.get(self._waiting)
                self._waiting = next(self._steps, [])
            except RayActorError as error:
                raise DeviceError(f"Ray cannot start a rank: {in_a_line(error)}") from None
        return True

    def ask(self, method: str, *arguments: object) -> object:
        """As of a single actor; what befalls a rank whose actor is gone has befallen the node."""
        answer = super().ask(method, *arguments)
        said = answer[0] if method == "answer" and isinstance(answer, tuple) else None
        if said is not None and "outcome" in said and not self._is_whole():
            self._lost()
            raise NodeLost(f"its Ray node was lost: {said['error']}")
        return answer

    def dismiss(self) -> None:
        """Ends all actors; ranks and what coordinates them, whose lines are cut, end themselves."""
        for member in self._members:
            ray.kill(member)
        remove_placement_group(self._place)

    def _lost(self) -> None:
        self.dismiss()
        self._begin()

    def _begin(self) -> None:
        self._members = []
        self._steps = self._gather()
        self._waiting = next(self._steps)

    def _gather(self) -> Iterator[Sequence[object]]:
        """What is to be waited for, one after the other, until the ranks have met."""
        count, asked = self._ranks.of_each, asked_of(self._resources)
        self._place = placement_group([asked] * count, strategy=placement_of(self._resources, count, alive()))
        yield [self._place.ready()]
        for number in range(count):
            here = PlacementGroupSchedulingStrategy(self._place, number)
            how = {"max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": here, **self._resources}
            self._members.append(ray.remote(RankHost).options(**how).remote())
        self._handle, *_ = self._members
        seats = [member.seat.remote() for member in self._members]
        yield seats
        told = zip(self._members, variables_of(ray.get(seats)), strict=True)
        yield [member.join.remote(variables, self._ranks.strategies[0]) for member, variables in told]

    def _is_whole(self) -> bool:
        """Whether all actors answer."""
        try:
            ray.get([member.there.remote() for member in self._members], timeout=LISTENING_SECONDS)
        except (RayActorError, GetTimeoutError):
            return False
        return True


def variables_of(seats: Sequence[Seat]) -> list[dict[str, str]]:
    """What torchrun would tell the ranks on these seats; those of one node see all of its GPUs, as torchrun's do."""
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    order = sorted(range(len(seats)), key=lambda number: nodes.index(seats[number].node))
    first, found = seats[order[0]], [dict[str, str]() for _ in seats]
    for rank, number in enumerate(order):
        beside = [each for each in order if seats[each].node == seats[number].node]
        gpus = ",".join(gpu for each in beside for gpu in seats[each].gpus)
        found[number] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_RANK": str(beside.index(number)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
        }
    return found


def alive() -> list[Mapping[str, float]]:
    """What each node has that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def placement_of(resources: Json, each: int, nodes: Sequence[Mapping[str, float]]) -> str:
    """Ray's word for where the ranks of a group are: on one node, or on several where none has room for so many."""
    return "STRICT_PACK" if any(room_for(resources, [node]) >= each for node in nodes) else "PACK"


def groups_for(resources: Json, each: int, nodes: Sequence[Mapping[str, float]]) -> int:
    """How many groups of so many ranks these nodes have room for."""
    if placement_of(resources, each, nodes) == "PACK":
        return room_for(resources, nodes) // each
    return sum(room_for(resources, [node]) // each for node in nodes)

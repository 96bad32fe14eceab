"""What trains each run: the ranks of a group, and what a worker asks of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from batchtune.config.fields import Count, NoSwitch, Positive, Section, distinct
from batchtune.errors import UsageError
from batchtune.vocabulary import Strategy

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which torchrun, and whoever starts ranks as it does, tells a process which one it is."""


@dataclass(frozen=True, slots=True)
class TorchrunEnv:
    """This process's number among those that torchrun started, on so many machines."""

    rank: int
    world_size: int
    nodes: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self | None:
        """None where no launcher of ranks started this process, or it started a single one."""
        known = os.environ if environment is None else environment
        if any(name not in known for name in OF_LAUNCHERS) or (world_size := int(known["WORLD_SIZE"])) == 1:
            return None
        each = int(known.get("LOCAL_WORLD_SIZE", world_size))
        return cls(int(known["RANK"]), world_size, int(known.get("GROUP_WORLD_SIZE", world_size // each)))


def nothing_to_share(*strategies: str, add: str) -> str:
    """Why one rank takes no strategy but that of who says nothing, and what would make it several."""
    return f"strategy {', '.join(strategies)}: there is nothing to share on one rank; add {add}, or drop it"


class RayCluster(Section):
    """What each worker asks of a Ray cluster."""

    address: str | None = Field(
        default=None, description="Of the cluster; null: RAY_ADDRESS, else one that runs here, else a new one here."
    )
    num_gpus: Annotated[float, NoSwitch] | None = Field(
        default=None, gt=0, le=1, description="null: 1 where the cluster has GPUs. Less: that share of a GPU's memory."
    )
    num_cpus: Count = Field(default=1, description="Processors; on the CPU also the threads of a run.")
    resources: dict[str, Positive] = Field(
        default={}, description="What else Ray is asked for, e.g. {'accelerator_type:A100': 0.001}."
    )


class Ranks(Section):
    """What trains each run: one device, or a group of ranks with a device each; batch sizes are of all together."""

    per_trial: Count | Literal["auto"] = Field(
        default=1,
        description="Ranks that train a run as one; on a CPU they share it. auto: one, and the answer on 2, 4, 8, too.",
    )
    strategy: Strategy | Annotated[list[Strategy], Field(min_length=1), distinct("{}: each strategy once")] = Field(
        default="ddp",
        description="ddp: each holds the model (DistributedDataParallel); fsdp: a shard of it (FSDP2); a list: each is "
        "tried, and the first is what you run today.",
    )
    nodes: Count = Field(
        default=1, description="Machines of a group; several are started by torchrun, which says how many there are."
    )

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if self.strategies != ("ddp",) and self.of_each == self.nodes == 1:
            raise ValueError(nothing_to_share(*self.strategies, add="per_trial (--ranks 2)"))
        return self

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Those to choose from; the first is the baseline's."""
        return (self.strategy,) if isinstance(self.strategy, str) else tuple(self.strategy)

    @property
    def of_each(self) -> int:
        """Ranks of each run of the study."""
        return 1 if self.per_trial == "auto" else self.per_trial

    def require_launcher(self, *, workers: int | str = 1, executor: str = "local") -> None:
        """Refuses what whoever started this process has not started.

        Raises:
            UsageError: machines without torchrun; or with it another number of ranks or machines, or several groups.
        """
        torchrun = TorchrunEnv.from_environment()
        if torchrun is None and self.nodes > 1:
            shape = f"--nnodes {self.nodes} --nproc-per-node {max(1, self.of_each // self.nodes)}"
            raise UsageError(
                f"ranks.nodes {self.nodes}: start it by torchrun on each of them (Slurm: srun torchrun …): torchrun "
                f"{shape} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m -- batchtune tune …"
            )
        if torchrun is None:
            return
        started = f"{torchrun.world_size} ranks on {torchrun.nodes} machine{'s' if torchrun.nodes > 1 else ''}"
        for key, asked, here in (
            ("ranks.per_trial", self.per_trial, torchrun.world_size),
            ("ranks.nodes", self.nodes, torchrun.nodes),
            ("workers", workers, 1),
            ("executor", executor, "local"),
        ):
            if asked != here:
                raise UsageError(f"{key} {asked}: torchrun has started {started}, so that it can only be {here}")


def lay_under(document: dict[str, object], environment: Mapping[str, str]) -> None:
    """Where torchrun started this process, what a configuration leaves open about ranks is as it has started them."""
    torchrun, ranks = TorchrunEnv.from_environment(environment), document.get("ranks", {})
    if torchrun is not None and isinstance(ranks, dict):
        document["ranks"] = {"per_trial": torchrun.world_size, "nodes": torchrun.nodes} | ranks

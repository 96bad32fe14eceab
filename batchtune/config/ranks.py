"""What trains each run: the ranks of a group, and what a worker asks of a Ray cluster."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from batchtune.config.fields import Count, NoSwitch, Positive, Section


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
    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="ddp: each holds the model (DistributedDataParallel); fsdp: a shard of it (FSDP2)."
    )
    nodes: Count = Field(default=1, description="Machines of a group; only 1 is possible so far.")

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if self.nodes > 1:
            raise ValueError(
                f"nodes {self.nodes}: the ranks of a run are on one machine; for several machines start batchtune on "
                "each, with a storage that they share"
            )
        if self.strategy == "fsdp" and self.of_each == 1:
            raise ValueError(
                "strategy fsdp: there is nothing to share on one rank; add per_trial (--ranks 2), or drop it"
            )
        return self

    @property
    def of_each(self) -> int:
        """Ranks of each run of the study."""
        return 1 if self.per_trial == "auto" else self.per_trial

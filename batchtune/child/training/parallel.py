"""How ranks train together: their process group, and what DistributedDataParallel or FSDP2 make of a model."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Strategy = Literal["ddp", "fsdp"]
_NEVER = timedelta(days=1)  # the coordinator ends the group; a collective's own timeout would only come in between


class Replica(Protocol):
    """What a rank trains."""

    def loss(self, batch: object, *, synchronize: bool) -> Tensor:
        """The user's loss of one micro-batch; with `synchronize`, its backward pass leaves the ranks' mean gradient."""


class Parallel:
    """One rank's place among those that train together.

    Args:
        strategy: how they share the work.
        device: this rank's.
        rank: its number.
        world_size: how many there are.
        name: of this group among those that have used the same store.
    """

    def __init__(self, strategy: Strategy, device: torch.device, *, rank: int, world_size: int, name: str = "") -> None:
        self.strategy, self.device, self.rank, self.world_size = strategy, device, rank, world_size
        self._name, self._times_joined = name, 0
        self._store: Any = None

    @property
    def backend(self) -> str:
        """What carries the gradients."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def join(self) -> None:
        """Makes the process group, anew where there was one; every rank calls this.

        What a failed attempt left half done in the group before is forgotten with it.
        """
        import torch.distributed
        import torch.nn.parallel

        if self.strategy == "fsdp":  # loaded here, so that what loading takes is not in the memory limit
            import torch.distributed.fsdp

        dist: Any = torch.distributed
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        if self._store is None:
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(*where, is_master=False, timeout=_NEVER)
        self._times_joined += 1
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"batchtune {self._name} {self._times_joined}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=_NEVER,
            device_id=self.device if self.backend == "nccl" else None,
        )
        self.agree(go_on=True)  # connections are made by the first collective

    def agree(self, go_on: bool) -> bool:
        """Whether every rank says so."""
        import torch.distributed as dist

        said = torch.tensor([int(go_on)], device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MIN)
        return bool(said.item())

    def place(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device: all of it, or with FSDP a shard of each repeated block and of the rest.

        A block is sharded as soon as it is on the device, so that the whole model never has to fit there.
        """
        if self.strategy == "ddp":
            return model.to(self.device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for block in repeated_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def replica(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> Replica:
        """A placed model with its loss, ready to train."""
        return _Replicated(model, loss) if self.strategy == "ddp" else _Sharded(model, loss)


class _LossOf(nn.Module):
    """The user's loss as a module: what they call of their model, and how, is inside of what DDP wraps."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> None:
        super().__init__()
        self._model, self._loss = model, loss

    def forward(self, batch: object) -> Tensor:
        return self._loss(self._model, batch)


class _Replicated:
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._wrapped = DistributedDataParallel(_LossOf(model, loss))

    def loss(self, batch: object, *, synchronize: bool) -> Tensor:
        self._wrapped.require_backward_grad_sync = synchronize  # what no_sync() does; backward comes after this returns
        loss: Tensor = self._wrapped(batch)
        return loss


class _Sharded:
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> None:
        self._model: Any = model
        self._loss = loss

    def loss(self, batch: object, *, synchronize: bool) -> Tensor:
        self._model.set_requires_gradient_sync(synchronize)
        return self._loss(self._model, batch)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that come two or more of a kind in a list or a sequence, such as a transformer's layers."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = Counter(type(child) for child in module.children())
        for child in module.children():
            if kinds[type(child)] > 1 and next(child.children(), None) is not None and id(child) not in inside:
                found.append(child)
                inside |= {id(each) for each in child.modules()}
    return found

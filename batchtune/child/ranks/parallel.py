"""This process among the ranks of a group: the process group, the model on several devices, and its own pace."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from batchtune.child.ranks._base import How, RankLoss, Ranks, sum_of_squares
from batchtune.errors import UsageError
from batchtune.protocol.messages import Rendezvous

dist: Any = torch.distributed
_NEVER = timedelta(days=1)  # the coordinator ends the group; a collective's own timeout would only come in between
_NAMED = 3  # parameters, where many are meant
SLOW, NOTICEABLE_SECONDS = 3.0, 1e-3  # times as long as the others, and by how much, what a rank does may take
_STEPS = 5  # of which the quickest counts for its pace


def load_early() -> None:
    """Loads what ranks need of torch, so that it is in no memory limit, and in no fork of an image anew."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.nn.parallel  # noqa: F401

    import batchtune.child.ranks.deferred  # noqa: F401


class Parallel(Ranks):
    """This rank's place among those that train together by DistributedDataParallel or FSDP2."""

    def __init__(self, device: torch.device, rendezvous: Rendezvous, fork: int = 0) -> None:
        self.device, self.strategy = device, rendezvous.strategy
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._name, self._times_joined = f"{rendezvous.name}.{fork}", 0

    @functools.cached_property
    def _store(self) -> object:
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*where, is_master=False, timeout=_NEVER)

    def join(self) -> None:
        """Makes the process group, anew where there was one; every rank calls this.

        What a failed attempt left half done in the group before is forgotten with it.
        """
        load_early()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._times_joined += 1
        dist.init_process_group(
            f"cpu:gloo,{self.device.type}:{self.backend}" if self.backend == "nccl" else self.backend,
            store=dist.PrefixStore(f"batchtune {self._name} {self._times_joined}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=_NEVER,
            device_id=self.device if self.backend == "nccl" else None,
        )
        dist.all_reduce(torch.zeros(1, device=self.device))  # connections are made by the first collective
        self.agree(go_on=True)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """While one rank works by itself: in it there is no process group, for nobody would answer."""
        group, dist.group.WORLD = dist.group.WORLD, None
        try:
            yield
        finally:
            dist.group.WORLD = group

    def agree(self, go_on: bool) -> bool:
        return bool(self.together("min", float(go_on)))

    def together(self, how: How, value: float) -> float:
        said = torch.tensor([value], dtype=torch.float64)  # on the host, so that no device is waited for
        if how == "first":
            dist.broadcast(said, src=0)
        else:
            dist.all_reduce(said, op=getattr(dist.ReduceOp, how.upper()))
        return float(said.item())

    def each(self, value: float) -> list[float]:
        said = [torch.zeros(1, dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(said, torch.tensor([value], dtype=torch.float64))
        return [float(each.item()) for each in said]

    def align(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.broadcast(buffer, src=0)

    def squared_norm(self, gradients: Iterable[Tensor]) -> float:
        if self.strategy == "ddp":
            return super().squared_norm(gradients)
        shards: Any = gradients
        held = [shard.to_local() for shard in shards]
        return self.together("sum", sum_of_squares(shard for shard in held if shard.numel()))

    def squared_norms_apart(self, gradients: Iterable[Tensor]) -> tuple[float, float]:
        own = list(gradients)
        apart = self.together("sum", sum_of_squares(own)) / self.world_size
        for gradient in own:
            dist.all_reduce(gradient)
            gradient.div_(self.world_size)
        return apart, sum_of_squares(own)

    def sketch(self, build: Callable[[], nn.Module]) -> nn.Module:
        if self.strategy == "ddp":
            return super().sketch(build)
        from batchtune.child.ranks.deferred import build_deferred

        return build_deferred(build)[0]

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """The model on this rank's device: all of it, or with FSDP a shard of each repeated block and of the rest.

        A block gets its weights when its turn has come, and is sharded as soon as it is on the device, so that the
        whole model never has to fit there, nor into the host's memory.
        """
        if self.strategy == "ddp":
            return super().place(lambda: _undistributed(build()), device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from batchtune.child.ranks.deferred import build_deferred

        model, fill = build_deferred(lambda: _undistributed(build()))
        mesh, blocks = init_device_mesh(device.type, (self.world_size,)), repeated_blocks(model)
        _require_untied(model, blocks)
        for module in (*blocks, model):
            fill(module)
            try:
                fully_shard(module, mesh=mesh)
            except (ValueError, NotImplementedError) as error:
                why = str(error).partition("\n")[0]
                raise UsageError(f"strategy fsdp: {type(module).__name__}: {why}; change that, or use ddp") from None
        return model

    def holds_whole(self, model: nn.Module, limit_bytes: int | None) -> bool:
        weights_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        return self.strategy == "ddp" or limit_bytes is None or 2 * weights_bytes <= limit_bytes

    def loss_of(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> RankLoss:
        """The loss of a placed model."""
        if self.strategy == "fsdp":
            placed: Any = model

            def sharded(batch: object, *, synchronize: bool) -> Tensor:
                placed.set_requires_gradient_sync(synchronize)
                return loss(model, batch)

            return sharded
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(_LossOf(model, loss))

        def replicated(batch: object, *, synchronize: bool) -> Tensor:
            wrapped.require_backward_grad_sync = synchronize  # what no_sync() does; backward comes after this returns
            try:
                return wrapped(batch)  # type: ignore[no-any-return]
            except RuntimeError as error:
                if unused := _unused(model, str(error)):
                    raise unused from None
                raise

        return replicated


def _undistributed(model: nn.Module) -> nn.Module:
    """Refuses a model that the user's code has wrapped or sharded already: both would be done twice."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            kind, how = (
                ("fully_shard", "fsdp") if isinstance(module, FSDPModule) else ("DistributedDataParallel", "ddp")
            )
            raise UsageError(f"build_model applies {kind} by itself; leave that out: ranks do so with --strategy {how}")
    return model


class _LossOf(nn.Module):
    """The user's loss as a module: what they call of their model, and how, is inside of what DDP wraps."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> None:
        super().__init__()
        self._model, self._loss = model, loss

    def forward(self, batch: object) -> Tensor:
        return self._loss(self._model, batch)


def _unused(model: nn.Module, told: str) -> UsageError | None:
    """What DDP says of parameters without a gradient, by their names; None where it says something else."""
    if "find_unused_parameters" not in told:
        return None
    listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", told)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = [trained[int(each)] for each in listed[1].split() if int(each) < len(trained)] if listed else []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    which = f" ({', '.join(names[:_NAMED])}{more})" if names else ""
    return UsageError(
        f"strategy ddp: some parameters of the model get no gradient{which}, for which ranks would wait; "
        "have the loss use them, set their requires_grad to False, or use fsdp"
    )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that come two or more of a kind in a list or a sequence, such as a transformer's layers.

    A list in a list is none: nobody calls it.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = Counter(type(child) for child in module.children())
        for child in module.children():
            is_block = next(child.children(), None) is not None and not isinstance(child, nn.ModuleList | nn.ModuleDict)
            if is_block and kinds[type(child)] > 1 and id(child) not in inside:
                found.append(child)
                inside |= {id(each) for each in child.modules()}
    return found


def _require_untied(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuses a weight that is used in several shards: each would have its own, and the two would part."""
    shards = {id(each): number for number, block in enumerate(blocks) for each in block.modules()}
    held: dict[int, tuple[str, int]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            first, shard = held.setdefault(id(parameter), (name, shards.get(id(module), -1)))
            if shard != shards.get(id(module), -1):
                raise UsageError(f"strategy fsdp: {first} and {name} are one weight (tied), in two shards; use ddp")


def own_seconds(
    model: nn.Module,
    loss: Callable[[object], object],
    batches: Iterator[object],
    synchronize: Callable[[], None],
) -> float:
    """Seconds in which this rank loads a batch and computes its `loss`, but for what surrounds the innermost modules.

    No rank waits for another in these, be the model sharded or not: gathering shards is around modules. Of a model with
    compiled modules, which are left alone, loading counts.
    """
    inside, own, read = 0, 0.0, 0.0

    def lap(*, counts: bool) -> None:
        nonlocal own, read
        synchronize()
        now = time.perf_counter()
        own, read = own + (now - read if counts else 0.0), now

    def enter(*_: object) -> None:
        nonlocal inside
        lap(counts=inside == 0)
        inside += 1

    def leave(*_: object) -> None:
        nonlocal inside
        lap(counts=False)
        inside -= 1

    modules = list(model.modules())
    if any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules):  # noqa: SLF001
        modules = []  # hooks would have them compiled anew
    innermost = [each for each in modules if next(each.children(), None) is None]
    hooks = [each.register_forward_pre_hook(enter, prepend=True) for each in modules]
    hooks += [each.register_forward_pre_hook(lambda *_: lap(counts=False)) for each in innermost]
    hooks += [each.register_forward_hook(lambda *_: lap(counts=True), prepend=True) for each in innermost]
    hooks += [each.register_forward_hook(leave) for each in modules]
    taken = []
    for _ in range(_STEPS):
        own = 0.0
        lap(counts=False)
        batch = next(batches)
        lap(counts=True)
        loss(batch)
        lap(counts=bool(modules))
        taken.append(own)
    for hook in hooks:
        hook.remove()
    return min(taken)


def straggler(seconds: Sequence[float]) -> tuple[int, float] | None:
    """The rank that takes much longer than the others, and how many times as long; None where none does."""
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
    slow = seconds[rank] >= SLOW * others and seconds[rank] - others >= NOTICEABLE_SECONDS
    return (rank, seconds[rank] / max(others, 1e-9)) if slow else None

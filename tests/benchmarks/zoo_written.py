"""Models and optimizers as people write them beyond the basics: adapters, GANs, experts, quantised states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from zoo_basics import VOCABULARY, Gpt, UNet, resnet


class LowRank(nn.Module):
    """A frozen linear layer with a trainable product of two thin ones beside it (Hu et al., LoRA, 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def lora_gpt() -> nn.Module:
    model = Gpt(512, 6)
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.attend, block.down = LowRank(block.attend), LowRank(block.down)
    return model


def frozen_resnet() -> nn.Module:
    """A frozen backbone whose last layer alone is trained."""
    model = resnet()
    model[:-1].requires_grad_(requires_grad=False)
    return model


class Gan(nn.Module):
    """Generator and discriminator, trained by one loss: the discriminator's on real and detached images, and the
    generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(128, 256, 8, bias=False),
            nn.BatchNorm2d(256),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(64, 3, 4, 2, 1),
            nn.Tanh(),
        )
        widths = (3, 64, 128, 256)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        self.discriminator = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 64, 1))

    def forward(self, real: Tensor) -> Tensor:
        fake = self.generator(torch.randn(len(real), 128, 1, 1, device=real.device))
        ours = functional.softplus(self.discriminator(fake)).mean()
        judged = functional.softplus(-self.discriminator(real)) + functional.softplus(self.discriminator(fake.detach()))
        return judged.mean() + ours


class Experts(nn.Module):
    """A dense mixture of experts: every expert sees every token, the router weighs them."""

    def __init__(self, width: int = 256, experts: int = 8) -> None:
        super().__init__()
        self.tokens, self.router = nn.Embedding(VOCABULARY, width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        weights = self.router(x).softmax(-1)
        kept, chosen = weights.topk(2, -1)
        gates = torch.zeros_like(weights).scatter(1, chosen, kept)
        hidden = functional.gelu(torch.einsum("nd,edh->enh", x, self.up))
        mixed = torch.einsum("enh,ehd,ne->nd", hidden, self.down, gates)
        return self.out(x + mixed).view(*ids.shape, -1)


class Capacity(nn.Module):
    """Experts of a fixed capacity: tokens are sorted to them by `topk`, so no shape depends on the data."""

    def __init__(self, width: int = 256, experts: int = 8) -> None:
        super().__init__()
        self.tokens, self.router = nn.Embedding(VOCABULARY, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        scores = self.router(x).softmax(-1)
        each = 2 * len(x) // len(self.experts)
        total = x
        for number, expert in enumerate(self.experts):
            weights, places = scores[:, number].topk(each)
            total = total.index_add(0, places, (expert(x[places]) * weights[:, None]).to(x.dtype))
        return self.out(total).view(*ids.shape, -1)


class Recommender(nn.Module):
    """Large embedding tables, a bag of past items, and the dot products of all pairs of features."""

    def __init__(self, tables: int = 12, rows: int = 50_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.out = nn.Linear(256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, items: Tensor) -> Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, *(table(items[:, n]) for n, table in enumerate(self.tables))], 1)
        products = (features @ features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.out(self.top(torch.cat([low, products], 1))).squeeze(1)


class Segmenter(UNet):
    """The U-Net with a class for every pixel: its loss is at full resolution."""

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.up(self.deep(functional.max_pool2d(high, 2)))
        return self.out(self.join(torch.cat([low, high], 1)))


class PixelShuffler(nn.Module):
    """Super-resolution: bilinear upsampling beside convolutions and a pixel shuffle."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(6))
        self.last = nn.Conv2d(width, 3 * 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.first(x)
        for layer in self.body:
            low = low + 0.1 * functional.leaky_relu(layer(low), 0.1)
        return functional.pixel_shuffle(self.last(low), 2) + functional.interpolate(
            x, scale_factor=2, mode="bilinear", align_corners=False
        )


class HandLstm(nn.Module):
    """A recurrent cell written out: one Python step for each token."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.width = nn.Embedding(VOCABULARY, width), width
        self.inside, self.again = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        inputs = self.inside(self.tokens(ids[:, :32]))
        hidden = memory = inputs.new_zeros(len(ids), self.width)
        states = []
        for step in inputs.unbind(1):
            take, forget, give, what = (step + self.again(hidden)).chunk(4, 1)
            memory = forget.sigmoid() * memory + take.sigmoid() * what.tanh()
            hidden = give.sigmoid() * memory.tanh()
            states.append(hidden)
        return self.out(torch.stack(states, 1))


class Recurrent(nn.Module):
    """Layers of torch's own, `kind` of nn, on sequences that are padded or packed."""

    def __init__(self, kind: str, width: int = 256, *, packed: bool = False, **how: Any) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(VOCABULARY, 128), getattr(nn, kind)(128, width, 2, **how)
        self.out = nn.Linear(self._width(), VOCABULARY)
        self.packed = packed

    def _width(self) -> int:
        return (self.cells.proj_size or self.cells.hidden_size) * (1 + self.cells.bidirectional)

    def forward(self, ids: Tensor) -> Tensor:
        inputs = self.tokens(ids)
        if self.packed:
            lengths = torch.full((len(ids),), ids.shape[1])
            inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
            return self.out(nn.utils.rnn.pad_packed_sequence(self.cells(inputs)[0], batch_first=True)[0])
        inputs = inputs if self.cells.batch_first else inputs.transpose(0, 1)
        outputs = self.cells(inputs)[0]
        return self.out(outputs if self.cells.batch_first else outputs.transpose(0, 1))


class GruCells(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(VOCABULARY, width), nn.GRUCell(width, width)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, states = None, []
        for step in self.tokens(ids[:, :32]).unbind(1):
            hidden = self.cell(step, hidden)
            states.append(hidden)
        return self.out(torch.stack(states, 1))


class Audio(nn.Module):
    """Dilated one-dimensional convolutions with gates, as in WaveNet."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2**n, dilation=2**n) for n in range(layers))
        self.short = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.out = nn.Linear(width, 35)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for gated, short in zip(self.gated, self.short, strict=True):
            left, right = gated(x).chunk(2, 1)
            x = x + short(left.tanh() * right.sigmoid())
        return self.out(x.mean(2))


def video() -> nn.Module:
    def stage(before: int, after: int) -> list[nn.Module]:
        return [
            nn.Conv3d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm3d(after),
            nn.ReLU(inplace=True),
            nn.MaxPool3d(2),
        ]

    pool: list[nn.Module] = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*stage(3, 32), *stage(32, 64), *stage(64, 128), *pool)


class Checkpointed(nn.Module):
    """The transformer with reentrant checkpoints around pairs of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gpt(256, 6)

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.inner
        x = inner.tokens(ids) + inner.places(torch.arange(ids.shape[1], device=ids.device))
        for first, second in zip(inner.blocks[::2], inner.blocks[1::2], strict=True):
            x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=True)
        return inner.head(inner.norm(x))


class MixedTypes(nn.Module):
    """Weights in bf16, norms and head in fp32, without autocast's help."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(functional.silu(norm(x)).bfloat16()).float()
        return self.head(x)


class Graph(nn.Module):
    """Message passing over a fixed graph: gather, scatter-add, and attention over neighbours."""

    def __init__(self, nodes: int = 256, edges: int = 1024, width: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("edges", torch.randint(0, nodes, (2, edges), generator=generator))
        self.first, self.score = nn.Linear(16, width), nn.Linear(2 * width, 1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, (source, target) = self.first(x), self.edges
        for layer in self.layers:
            ends = torch.cat([x[:, source], x[:, target]], -1)
            message = layer(x[:, source]) * functional.leaky_relu(self.score(ends), 0.2).sigmoid()
            x = functional.elu(torch.zeros_like(x).index_add(1, target, message.to(x.dtype)) + x)
        return self.out(x.mean(1))


class Diffusion(nn.Module):
    """A denoiser: noise and times are drawn in the step, group norms, and attention at the low resolution."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.first, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm, self.attend = nn.GroupNorm(8, 2 * width), nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up, self.out = nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        noise, time = torch.randn_like(images), torch.rand(len(images), 1, device=images.device)
        share = time[:, :, None, None]
        high = functional.silu(self.first(images * (1 - share) + noise * share))
        low = self.norm(self.down(high)) + self.time(time)[:, :, None, None]
        flat = low.flatten(2).transpose(1, 2)
        flat = flat + self.attend(flat, flat, flat, need_weights=False)[0]
        low = functional.silu(flat.transpose(1, 2).reshape(low.shape))
        return functional.mse_loss(self.out(torch.cat([self.up(low), high], 1)), noise)


class Autoencoder(nn.Module):
    """A variational autoencoder: reconstruction and divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 128))
        self.decoder = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 512))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        divergence = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
        return functional.mse_loss(self.decoder(code), x) + 1e-3 * divergence


class MetricLearner(nn.Module):
    """Distances between all pairs, and the hardest of each row: quadratic in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, x: Tensor) -> Tensor:
        codes = functional.normalize(self.body(x))
        distances = torch.cdist(codes, codes)
        same = torch.eye(len(x), dtype=torch.bool, device=x.device)
        near = distances.masked_fill(same, 4.0).amin(1)
        return functional.relu(1.0 - near).mean() + distances.square().mean()


class EightBit(torch.optim.Optimizer):
    """Adam whose states are bytes with a scale for each block, unpacked within the step (Dettmers et al., 2021)."""

    BLOCK = 2048

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6})

    def _packed(self, values: Tensor) -> tuple[Tensor, Tensor]:
        padded = functional.pad(values.flatten(), (0, -values.numel() % self.BLOCK)).view(-1, self.BLOCK)
        scales = padded.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return (padded / scales * 127 + 128).round().to(torch.uint8), scales

    @staticmethod
    def _unpacked(packed: Tensor, scales: Tensor, like: Tensor) -> Tensor:
        return ((packed.float() - 128) / 127 * scales).flatten()[: like.numel()].view_as(like)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            (fast, slow), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter)
                    state["mean"], state["square"] = self._packed(zeros), self._packed(zeros)
                mean = self._unpacked(*state["mean"], parameter).lerp_(parameter.grad, 1 - fast)
                square = self._unpacked(*state["square"], parameter).clamp_(min=0)
                square.mul_(slow).addcmul_(parameter.grad, parameter.grad, value=1 - slow)
                parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-lr)
                state["mean"], state["square"] = self._packed(mean), self._packed(square)
        return None if closure is None else closure()


class Clipped(torch.optim.AdamW):
    """AdamW that clips the gradients' norm first."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        return super().step(closure)


class MasterWeights(torch.optim.Optimizer):
    """SGD with momentum on fp32 copies of weights that are kept in a narrower type."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"], state["momentum"] = parameter.float(), torch.zeros_like(parameter).float()
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"])
                parameter.copy_(state["master"])
        return None if closure is None else closure()


def optimizer(kind: str, **options: Any) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    """A maker of torch's own optimizer of this name."""
    return lambda model, lr: getattr(torch.optim, kind)(model.parameters(), lr=lr, **options)


def trainable(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)


def two_groups(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """No weight decay on vectors."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=lr)


def hooked(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """An optimizer of its own for each parameter, stepped in backward as soon as the gradient is there."""
    own = {each: torch.optim.AdamW([each], lr=lr, foreach=False) for each in model.parameters()}

    def update(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad(set_to_none=True)

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    return torch.optim.SGD(model.parameters(), lr=0.0)

"""What the campaign trains: a stack of GPT blocks and a conv net as people train them, and tasks with a fault.

Each class is a task (`campaign_models.py:Gpt`); none imports batchtune.
"""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.between(x))


class Gpt:
    """GPT blocks on hidden states: no vocabulary, so that nearly all of it is matrix products and attention."""

    width, heads, layers, length = 1024, 16, 12, 1024

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(_Block(self.width, self.heads) for _ in range(self.layers)))

    def make_batch(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, self.length, self.width)

    def compute_loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


class SmallGpt(Gpt):
    """The same in a size that takes no time."""

    width, heads, layers, length = 128, 4, 2, 64


class ConvNet:
    """torchvision's ResNet-50 at 224 x 224, channels last."""

    pixels, name = 224, "resnet50"

    def build_model(self) -> nn.Module:
        import torchvision

        return torchvision.models.get_model(self.name).to(memory_format=torch.channels_last)

    def make_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, 3, self.pixels, self.pixels).to(memory_format=torch.channels_last)
        return images, torch.randint(1000, (batch_size,))

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class SmallConvNet(ConvNet):
    """The same in a size that takes no time."""

    pixels, name = 64, "resnet18"


class Images:
    """torchvision's ResNet-18 on generated images of 32 x 32 pixels: two looks a class, shifted, and noise."""

    samples, name = 20_000, "resnet18"

    def build_model(self) -> nn.Module:
        import torchvision

        model = torchvision.models.get_model(self.name, num_classes=10)
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        return model

    def train_dataset(self) -> TensorDataset:
        return self._images(self.samples, seed=2)

    def val_dataset(self) -> TensorDataset:
        return self._images(self.samples // 10, seed=3)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)

    def _images(self, count: int, seed: int) -> TensorDataset:
        looks = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        drawn = torch.Generator().manual_seed(seed)
        labels, which, shifts = (torch.randint(most, (count,), generator=drawn) for most in (10, 2, 32))
        images = functional.interpolate(looks[labels + 10 * which], scale_factor=4)
        columns = (torch.arange(32) - shifts[:, None]) % 32
        images = images.gather(3, columns[:, None, None].expand_as(images))
        return TensorDataset(images + 1.6 * torch.randn(images.shape, generator=drawn), labels)


class FewImages(Images):
    """The same in a size that takes no time."""

    samples = 500


class OutOfMemory(SmallGpt):
    """Ends at the memory limit, as tasks do."""

    width, heads, layers, length = 256, 4, 8, 8192


class Killed(SmallGpt):
    """The process is gone from one sample on, as with the kernel's out-of-memory killer."""

    first_failing = 13

    def compute_loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) >= self.first_failing:
            self.fail(batch)
        return super().compute_loss(model, batch)

    def fail(self, batch: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Asserted(Killed):
    """An index out of range on the device poisons the context."""

    def fail(self, batch: Tensor) -> None:
        if "FAKE_GPU" in os.environ:  # whose kernels do nothing
            import fake_gpu

            fake_gpu.poison()
        torch.zeros(4, device=batch.device)[torch.full((9,), 100, device=batch.device)].sum().item()

"""Which models the benchmarks of memory train, at which precision and with which optimizer; each case is a task.

A case is one by what it does: two sizes of a family are one case. Where a library is missing, its cases are left out;
`absent()` names them. As a task for any command: `tests/benchmarks/zoo.py:case_mlp_adamw`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import zoo_libraries as lib
import zoo_written as own
from torch import Tensor, nn
from torch.nn import functional
from zoo_basics import (
    LENGTH,
    VOCABULARY,
    Contrast,
    DenseNet,
    Ema,
    Encoder,
    FanIn,
    Gpt,
    Lstm,
    UNet,
    foreach,
    fused,
    images,
    loss,
    mlp,
    pairs,
    resnet,
    sgd,
    tokens,
    vectors,
)

from batchtune.task.contract import Task


@dataclass(frozen=True)
class Case:
    """A model as it is trained.

    Attributes:
        name: the case's own, in the tables.
        model: makes the model; `options` are its arguments.
        batch: makes a batch of so many samples.
        size: the batch at which it is run on a CPU.
        needs: the library that it takes.
        strategy: ddp or fsdp, where more than one rank trains.
        world_size: number of ranks.
    """

    name: str
    model: Callable[..., nn.Module]
    batch: Callable[[int], Any]
    size: int
    precision: str = "fp32"
    accumulation_steps: int = 1
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[nn.Module, Any], Tensor] = loss
    needs: str | None = None
    strategy: str = "ddp"
    world_size: int = 1

    @property
    def slug(self) -> str:
        """The name as an attribute of this module."""
        return "case_" + re.sub(r"\W+", "_", self.name.lower()).strip("_")

    def source(self) -> SimpleNamespace:
        """The names of the task contract."""
        members: dict[str, Any] = {"build_model": lambda: self.model(**self.options)}
        members |= {"make_batch": self.batch}
        members |= {"compute_loss": self.loss}
        if self.optimizer is not None:
            members["build_optimizer"] = self.optimizer
        return SimpleNamespace(**members)

    def task(self) -> Task:
        return Task(self.source(), self.name)


BASICS = (
    Case("MLP, AdamW", mlp, vectors, 512),
    Case("MLP, dropout, in place, SGD", mlp, vectors, 2048, optimizer=sgd, options={"inplace": True, "dropout": 0.1}),
    Case("MLP, bf16", mlp, vectors, 2048, precision="bf16"),
    Case("MLP, 2 micro-batches", mlp, vectors, 1024, accumulation_steps=2),
    Case("MLP, foreach AdamW", mlp, vectors, 512, optimizer=foreach),
    Case("MLP, fused AdamW", mlp, vectors, 512, optimizer=fused),
    Case("MLP, moving average", mlp, vectors, 512, optimizer=Ema),
    Case("gradients added up", FanIn, vectors, 4096),
    Case("contrastive, B x B logits", Contrast, pairs, 2048),
    Case("transformer", Gpt, tokens, 8),
    Case("transformer, bf16", Gpt, tokens, 8, precision="bf16"),
    Case("transformer, checkpointing", Gpt, tokens, 8, options={"checkpointed": True}),
    Case("transformer, untied, 2 micro-batches", Gpt, tokens, 4, accumulation_steps=2, options={"tied": False}),
    Case("nn.TransformerEncoder", Encoder, tokens, 8),
    Case("ResNet", resnet, images, 16, optimizer=sgd),
    Case("ResNet, bf16", resnet, images, 16, precision="bf16"),
    Case("U-Net", UNet, images, 16),
    Case("DenseNet", DenseNet, images, 16),
    Case("LSTM", Lstm, tokens, 16),
)


def softmax() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 8192), nn.Softmax(-1), nn.Linear(8192, 1024))


def rows(size: int) -> Tensor:
    return torch.randn(size, 64, 1024)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def output(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that returns it."""
    return model(batch)


def short_tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (size, LENGTH)), torch.randint(0, VOCABULARY, (size, 32))


def clicks(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(size, 13), torch.randint(0, 50_000, (size, 12)), torch.randint(0, 2, (size,)).float()


def click_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])


def masks(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 96, 96), torch.randint(0, 10, (size, 96, 96))


def pixel_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def doubled(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 64, 64), torch.randn(size, 3, 128, 128)


def l1(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.l1_loss(model(batch[0]), batch[1])


def first(batch: Callable[[int], tuple[Tensor, ...]]) -> Callable[[int], Tensor]:
    return lambda size: batch(size)[0]


def sounds(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 8000), torch.randint(0, 35, (size,))


def clips(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 48, 48), torch.randint(0, 10, (size,))


def graphs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 256, 16), torch.randint(0, 10, (size,))


def channels_last_images(size: int) -> tuple[Tensor, Tensor]:
    pictures, labels = images(size)
    return pictures.contiguous(memory_format=torch.channels_last), labels


def channels_last_resnet() -> nn.Module:
    return resnet().to(memory_format=torch.channels_last)


def narrow_mlp() -> nn.Module:
    return mlp().bfloat16()


def narrow_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def smoothed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Two views of one batch, label smoothing, and a penalty on the logits."""
    one, two = model(batch[0]), model(batch[0].flip(0))
    fitted = functional.cross_entropy(one, batch[1], label_smoothing=0.1)
    return fitted + functional.kl_div(two.log_softmax(-1), one.softmax(-1).detach(), reduction="batchmean")


WRITTEN = (
    Case("MLP, SGD without states", mlp, vectors, 512, optimizer=own.optimizer("SGD")),
    Case(
        "MLP, Nesterov, for-loop",
        mlp,
        vectors,
        512,
        optimizer=own.optimizer("SGD", momentum=0.9, nesterov=True, foreach=False),
    ),
    Case("MLP, Adam, for-loop", mlp, vectors, 512, optimizer=own.optimizer("Adam", foreach=False)),
    Case("MLP, amsgrad, foreach", mlp, vectors, 512, optimizer=own.optimizer("AdamW", amsgrad=True, foreach=True)),
    Case("MLP, Adafactor", mlp, vectors, 512, optimizer=own.optimizer("Adafactor")),
    Case("MLP, RMSprop, centred", mlp, vectors, 512, optimizer=own.optimizer("RMSprop", centered=True, momentum=0.9)),
    Case("MLP, 8-bit states", mlp, vectors, 512, optimizer=own.EightBit),
    Case("MLP, bf16 weights, fp32 copies", narrow_mlp, vectors, 512, optimizer=own.MasterWeights, loss=narrow_loss),
    Case("MLP, optimizer in backward", mlp, vectors, 512, optimizer=own.hooked),
    Case("MLP, two views, label smoothing", mlp, vectors, 512, loss=smoothed, optimizer=own.two_groups),
    Case("MLP, fp16, gradient scaling", mlp, vectors, 1024, precision="fp16"),
    Case("mixed types, tf32", own.MixedTypes, vectors, 1024, precision="tf32"),
    Case("autoencoder, variational", own.Autoencoder, first(vectors), 1024, loss=output),
    Case("metric learning, cdist", own.MetricLearner, first(vectors), 512, loss=output),
    Case("recommender, large embeddings", own.Recommender, clicks, 1024, loss=click_loss),
    Case(
        "recommender, Adagrad, bf16",
        own.Recommender,
        clicks,
        1024,
        "bf16",
        loss=click_loss,
        optimizer=own.optimizer("Adagrad"),
    ),
    Case("experts, dense, bf16", own.Experts, tokens, 4, "bf16"),
    Case("experts of a fixed capacity", own.Capacity, tokens, 4),
    Case("LoRA, bf16", own.lora_gpt, tokens, 8, "bf16", optimizer=own.trainable),
    Case("transformer, reentrant checkpoints, fp16", own.Checkpointed, tokens, 8, "fp16"),
    Case("transformer, clipping, 4 micro-batches, bf16", Gpt, tokens, 4, "bf16", 4, own.Clipped),
    Case("transformer, fused AdamW, tf32", Gpt, tokens, 4, "tf32", optimizer=fused),
    Case("nn.TransformerEncoder, bf16", Encoder, tokens, 8, "bf16"),
    Case("LSTM written out, bf16", own.HandLstm, short_tokens, 16, "bf16"),
    Case("GRU cells", own.GruCells, short_tokens, 16),
    Case(
        "GRU, both directions, bf16", own.Recurrent, tokens, 16, "bf16", options={"kind": "GRU", "bidirectional": True}
    ),
    Case(
        "LSTM, projected, no biases",
        own.Recurrent,
        tokens,
        16,
        options={"kind": "LSTM", "proj_size": 64, "bias": False},
    ),
    Case(
        "LSTM, packed, fp16",
        own.Recurrent,
        tokens,
        16,
        "fp16",
        options={"kind": "LSTM", "packed": True, "dropout": 0.1},
    ),
    Case(
        "RNN, batch first, 2 micro-batches",
        own.Recurrent,
        tokens,
        16,
        "fp32",
        2,
        options={"kind": "RNN", "batch_first": True},
    ),
    Case("ResNet, channels last, fp16", channels_last_resnet, channels_last_images, 16, "fp16", optimizer=sgd),
    Case("ResNet, frozen but for its head", own.frozen_resnet, images, 16, optimizer=own.trainable),
    Case("segmentation, loss at full resolution", own.Segmenter, masks, 4, loss=pixel_loss),
    Case("super-resolution", own.PixelShuffler, doubled, 4, loss=l1),
    Case("GAN, one loss", own.Gan, first(images), 16, loss=output, optimizer=own.optimizer("Adam", betas=(0.5, 0.9))),
    Case("diffusion, bf16", own.Diffusion, first(images), 8, "bf16", loss=output),
    Case("audio, dilated conv1d", own.Audio, sounds, 8),
    Case("video, conv3d, bf16", own.video, clips, 4, "bf16"),
    Case("graph, index_add", own.Graph, graphs, 32),
)


def _timm(architecture: str, precision: str = "fp32", **more: Any) -> Case:
    options = {"architecture": architecture} | more.pop("options", {})
    batch = more.pop("batch", lib.pictures)
    return Case(f"timm {architecture}", lib.timm, batch, 4, precision, options=options, needs="timm", **more)


TIMM = (
    _timm("resnet50", optimizer=sgd),
    _timm("efficientnet_b0", "bf16"),
    _timm("mobilenetv3_large_100", "fp16", optimizer=own.optimizer("RMSprop", momentum=0.9)),
    _timm("convnext_tiny", "bf16"),
    _timm("densenet121", "tf32", optimizer=sgd, batch=lib.small_pictures),
    _timm("regnety_016", optimizer=sgd, accumulation_steps=2),
    _timm("hrnet_w18_small", "bf16"),
    _timm("inception_v3", batch=lib.pictures),
    _timm("vit_small_patch16_224", "bf16", optimizer=fused),
    _timm("swin_tiny_patch4_window7_224", "bf16"),
    _timm("mixer_s32_224"),
    _timm("xcit_tiny_12_p16_224", "fp16"),
    _timm("coatnet_0_224", "bf16"),
    _timm("poolformer_s12", "bf16", options={"drop_path_rate": 0.1}),
    _timm("beit_base_patch16_224", "bf16", optimizer=own.EightBit),
)


def _hf(
    name: str,
    model: Callable[..., nn.Module],
    batch: Callable[[int], Any] = lib.text,
    precision: str = "bf16",
    **more: Any,
) -> Case:
    return Case(name, model, batch, 2, precision, loss=lib.own_loss, needs="transformers", **more)


TRANSFORMERS = (
    _hf("GPT-2", lib.gpt2),
    _hf("GPT-2, eager attention, fp32", lib.gpt2, precision="fp32", options={"attn_implementation": "eager"}),
    _hf("GPT-2, checkpointing, fp16", lib.checkpointed_gpt2, precision="fp16"),
    _hf("Llama, grouped queries", lib.llama),
    _hf("Llama, padding mask, Adafactor", lib.llama, lib.masked_text, optimizer=own.optimizer("Adafactor")),
    _hf("BERT", lib.bert),
    _hf("BERT, padding mask, fp32, 2 micro-batches", lib.bert, lib.masked_text, "fp32", accumulation_steps=2),
    _hf("ALBERT, shared layers", lib.albert, precision="fp16"),
    _hf("DeBERTa, relative attention", lib.deberta),
    _hf("T5", lib.t5),
    _hf("BART, tf32", lib.bart, precision="tf32"),
    _hf("OPT", lib.opt, optimizer=fused),
    _hf("GPT-NeoX, rotary", lib.gpt_neox, precision="fp16"),
    _hf("Gemma 2, soft caps, window", lib.gemma2),
    _hf("Mixtral, routed experts", lib.mixtral),
    _hf("Mamba, written-out scan", lib.mamba, precision="fp32"),
    _hf("Whisper", lib.whisper, lib.speech),
    _hf("wav2vec 2.0", lib.wav2vec, lib.quantiles),
    _hf("ViT", lib.vit, lib.photos),
    _hf("DINOv2, drop path, fp32", lib.dinov2, lib.photos, "fp32"),
    _hf("SegFormer", lib.segformer, lib.scenes),
    _hf("CLIP, B x B logits", lib.clip, lib.captions),
)

_GPT = {"model": Gpt, "batch": tokens, "size": 8, "precision": "bf16", "options": {"width": 512, "layers": 8}}
RANKS = (
    Case("transformer, DDP, 2 ranks", **_GPT, strategy="ddp", world_size=2),
    Case("transformer, DDP, 8 ranks", **_GPT, strategy="ddp", world_size=8),
    Case("transformer, FSDP, 2 ranks", **_GPT, strategy="fsdp", world_size=2),
    Case("transformer, FSDP, 4 ranks", **_GPT, strategy="fsdp", world_size=4),
    Case("transformer, FSDP, 8 ranks", **_GPT, strategy="fsdp", world_size=8),
    Case("ResNet, DDP, 4 ranks", resnet, images, 16, optimizer=sgd, strategy="ddp", world_size=4),
)
LATER = (  # more cases: the place of the others says which of them evaluate
    Case("softmax, fp16", softmax, rows, 64, precision="fp16", loss=squares),
)
_ALL = (*BASICS, *WRITTEN, *TIMM, *TRANSFORMERS, *RANKS, *LATER)


def absent() -> list[str]:
    """Names of the cases whose library is not installed."""
    return [case.name for case in _ALL if case.needs and importlib.util.find_spec(case.needs) is None]


CASES = tuple(case for case in _ALL if case.name not in absent())


def __getattr__(name: str) -> Any:
    for case in CASES:
        if case.slug == name:
            return case.source()
    raise AttributeError(name)

"""A model of transformers by itself as a task, with the largest batch that its class and configuration allow.

What a configuration does not say is assumed and told: the longest text of a model whose positions are relative, a
length of sound, the size of an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchtune.errors import UsageError
from batchtune.task.adapting import Adapted, real_copy

_KINDS = {  # the auto classes of transformers, in whose lists a model's class is looked for in this order
    "IMAGE_CLASSIFICATION": "class",
    "AUDIO_CLASSIFICATION": "class",
    "VIDEO_CLASSIFICATION": "class",
    "SEMANTIC_SEGMENTATION": "pixel classes",
    "SPEECH_SEQ_2_SEQ": "decoded",
    "CTC": "spoken",
    "SEQ_TO_SEQ_CAUSAL_LM": "decoded",
    "CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "SEQUENCE_CLASSIFICATION": "class",
    "NEXT_SENTENCE_PREDICTION": "class",
    "TOKEN_CLASSIFICATION": "token classes",
    "QUESTION_ANSWERING": "span",
}
_BARE = ("MODEL", "MODEL_FOR_TEXT_ENCODING")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_TEXT, _SOUND, _SIDE = 512, 160_000, 224  # tokens; values, ten seconds at 16 kHz; pixels
_UNSUITED = (AttributeError, LookupError, TypeError, ValueError)  # of a model whose inputs are not as they should be
_SPOKEN = 4  # frames of sound for each token that is said


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a batch has under one name: whole numbers from `low` up and below `high`, or without these any numbers.

    The shape is that of one sample; `never` is a whole number that does not occur, such as the padding's.
    """

    shape: tuple[int, ...]
    low: int = 0
    high: int | None = None
    never: int | None = None
    is_float: bool = False

    def make(self, batch_size: int) -> Tensor:
        """So many samples."""
        shape = (batch_size, *self.shape)
        if self.high is None:
            return torch.randn(shape)
        found = torch.randint(self.low, self.high, shape)
        if self.never is not None:
            found = torch.where(found == self.never, (self.never + 1) % self.high, found)
        return found.float() if self.is_float else found

    def __str__(self) -> str:
        shape = ", ".join(["batch_size", *map(str, self.shape)]) + ("" if self.shape else ",")
        if self.high is None:
            return f"torch.randn(({shape}))"
        return f"torch.randint({self.low}, {self.high}, ({shape}))" + (".float()" if self.is_float else "")


class GeneratedBatches:
    """Batches of the longest sequence or the largest image that a model's configuration allows, of random content.

    Args:
        model: a PreTrainedModel.
        where: how the user named it.
        anew: how to make such a model, as Python.

    Attributes:
        assumed: in sentences, what the configuration does not say.
        has_own_loss: it is no mere body, to which its users give a head and a loss.

    Raises:
        UsageError: its inputs are none of those known here.
    """

    def __init__(self, model: Any, where: str, anew: str) -> None:
        self._model, self._config, self._where, self._anew = type(model).__name__, model.config, where, anew
        self._text = self._config.get_text_config()
        self.assumed: list[str] = []
        self._taken = list(inspect.signature(model.forward).parameters)
        self._inputs = self._made_from(model)
        labels = self._labels() if self._inputs else {}
        if not self._inputs or ("labels" in self._taken and not labels):
            raise self.refused("no batches are known for it")
        self._inputs |= labels
        self.has_own_loss = "return_loss" in self._taken or not _is_listed(self._model, _BARE)
        if not self.has_own_loss:
            self.assumed.append(
                f"{self._model} computes no loss: to train it, the mean squares of its outputs stand in"
            )

    def make(self, batch_size: int) -> dict[str, object]:
        """Inputs and labels for so many samples; what is the same under two names is made once."""
        made = {each: each.make(batch_size) for each in self._inputs.values()}
        flags: dict[str, object] = {"return_loss": True} if "return_loss" in self._taken else {}
        return {**{name: made[each] for name, each in self._inputs.items()}, **flags}

    def refused(self, why: str) -> UsageError:
        """The error of a model that has no batch here, with the lines to write."""
        known = [f'"{name}": {each}' for name, each in self._inputs.items()]
        others = ", ".join(name for name in self._taken if name not in {*self._inputs, "kwargs"})
        return UsageError(
            f"{self._where}: {self._model}: {why}; name a Trainer, or write a task of these lines, with what it needs "
            f"for … (it also takes {others}):\n  def build_model(): return {self._anew}\n"
            f"  def make_batch(batch_size): return {{{', '.join([*known, '…'])}}}\n"
            "  def compute_loss(model, batch): return model(**batch).loss"
        )

    def _assume(self, what: str, value: int | str) -> None:
        self.assumed.append(
            f"the configuration of {self._model} names no {what}: batches of {value} were made; write "
            "make_batch(batch_size) if yours are others"
        )

    def _made_from(self, model: nn.Module) -> dict[str, Input]:
        """What goes in, by the names that `forward` takes."""
        found = {}
        if "input_ids" in self._taken:
            tokens = self._tokens(self._longest(model))
            found = {"input_ids": tokens, "attention_mask": Input(shape=tokens.shape, low=1, high=2)}
        elif "input_features" in self._taken and hasattr(self._config, "max_source_positions"):
            found["input_features"] = Input(shape=self._spectrum())
        elif "input_values" in self._taken:
            found["input_values"] = Input(shape=self._sound())
        if "pixel_values" in self._taken:
            found["pixel_values"] = Input(shape=self._image())
        return {name: each for name, each in found.items() if name in self._taken}

    def _tokens(self, length: int, *, low: int = 0) -> Input:
        never = self._text.pad_token_id if isinstance(self._text.pad_token_id, int) else None
        return Input(shape=(length,), low=low, high=self._text.vocab_size, never=never)

    def _longest(self, model: nn.Module) -> int:
        found = [length for name in _LENGTHS if isinstance(length := getattr(self._text, name, None), int)]
        length = found[0] if found and found[0] > 0 else 0
        if not length:
            length = _TEXT
            self._assume("longest sequence", f"{length} tokens")
        for name, part in model.named_modules():  # RoBERTa's kin count positions from the padding's number on
            if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
                length = min(length, part.num_embeddings - part.padding_idx - 1)
        return length

    def _spectrum(self) -> tuple[int, ...]:
        """Of sound, as Whisper (two frames a position) and Speech2Text (whose frames come first) take it."""
        frames = self._config.max_source_positions
        per_frame = getattr(self._config, "input_feat_per_channel", None)
        return (self._config.num_mel_bins, 2 * frames) if per_frame is None else (frames, per_frame)

    def _sound(self) -> tuple[int, ...]:
        if hasattr(self._config, "num_mel_bins") and hasattr(self._config, "max_length"):
            return (self._config.max_length, self._config.num_mel_bins)
        self._assume("longest sound", f"{_SOUND:,} values (10 s at 16 kHz)")
        return (_SOUND,)

    def _image(self) -> tuple[int, ...]:
        config = getattr(self._config, "vision_config", self._config)
        size = getattr(config, "image_size", None)
        if size is None:
            size = _SIDE
            self._assume("size of an image", f"{size} × {size} pixels")
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        return (*frames, getattr(config, "num_channels", 3), *sides)

    def _labels(self) -> Mapping[str, Input]:
        """What is to come out, by the kind of model; a decoder without labels is fed what it would decode."""
        kind = next((kind for task, kind in _KINDS.items() if _is_listed(self._model, [f"MODEL_FOR_{task}"])), None)
        main = next(iter(self._inputs.values())).shape
        decoder = getattr(self._text, "max_target_positions", None) or main[0]
        if kind == "span":
            last = Input(shape=(), high=self._inputs["input_ids"].shape[0])
            return {"start_positions": last, "end_positions": last}
        if kind == "tokens" and "input_ids" in self._inputs:
            return {"labels": self._inputs["input_ids"]}
        if kind == "decoded":
            return {"labels": self._tokens(decoder)}
        if kind == "spoken":
            return {"labels": self._tokens(max(1, self._frames() // _SPOKEN), low=1)}
        if kind in {"class", "token classes", "pixel classes"}:
            return {"labels": self._classes(kind, main)}
        return {"decoder_input_ids": self._tokens(decoder)} if "decoder_input_ids" in self._taken else {}

    def _frames(self) -> int:
        """Frames of sound that the convolutions at the model's entrance leave."""
        (length,) = self._inputs["input_values"].shape
        for kernel, stride in zip(self._config.conv_kernel, self._config.conv_stride, strict=True):
            length = (length - kernel) // stride + 1
        return length

    def _classes(self, kind: str, main: tuple[int, ...]) -> Input:
        count = self._config.num_labels
        if kind == "class" and getattr(self._config, "problem_type", None) == "multi_label_classification":
            return Input(shape=(count,), high=2, is_float=True)
        shape = {"class": (), "token classes": main[:1], "pixel classes": main[-2:]}[kind]
        return Input(shape=shape, high=None if count == 1 else count)


def _is_listed(name: str, tasks: Iterable[str]) -> bool:
    """Whether the auto classes of one of these tasks know a model's class."""
    from transformers.models.auto import modeling_auto

    lists = (getattr(modeling_auto, f"{task}_MAPPING_NAMES", {}).values() for task in tasks)
    return any(name in ((each,) if isinstance(each, str) else each) for listed in lists for each in listed)


class ModelTask(Adapted):
    """A PreTrainedModel by itself, with batches made up from its configuration: for `probe` and `estimate`.

    `make` is a factory, whose first model is `model`, or the model itself, which is then copied.
    """

    def __init__(self, model: Any, make: Any, where: str) -> None:
        super().__init__(where)
        is_made, name = not isinstance(make, nn.Module), where.rpartition(":")[2]
        self._batches = GeneratedBatches(model, where, f"{name}()" if is_made else f"copy.deepcopy({name})")
        self.make_batch, self.notes = self._batches.make, tuple(self._batches.assumed)
        self.build_model: Callable[[], nn.Module] = make if is_made else partial(real_copy, model)

    def compute_loss(self, model: nn.Module, batch: Mapping[str, object]) -> Tensor:
        """The model's own loss; of one that has none by itself, a loss of all that it puts out."""
        output = self.validate(model, batch)
        if not self._batches.has_own_loss:
            squares = [each.float().square().mean() for each in output.values() if isinstance(each, Tensor)]
            return torch.stack(squares).sum()
        loss: Tensor | None = getattr(output, "loss", None)
        if loss is None:
            raise self._batches.refused("it computes no loss of this batch")
        return loss

    def validate(self, model: nn.Module, batch: Mapping[str, object]) -> Any:
        """The forward pass alone."""
        try:
            return model(**batch)
        except _UNSUITED as error:
            text = str(error).strip().split("\n")[0][:200]
            raise self._batches.refused(f"the batch made up for it does not suit it ({text})") from error

    def require(self, purpose: Literal["probe", "tune"]) -> None:
        if purpose == "tune":
            raise self.refused("a model alone has no data to tune on; name a function that returns a Trainer")

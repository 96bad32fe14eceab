"""Which inputs and labels a model of transformers takes at most, read from its class and configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchtune.errors import UsageError

_KINDS = {  # the auto classes of transformers, in whose lists a model's class is looked for in this order
    "IMAGE_CLASSIFICATION": "image",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "SEQUENCE_CLASSIFICATION": "class",
    "TOKEN_CLASSIFICATION": "token classes",
    "QUESTION_ANSWERING": "span",
}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class GeneratedBatches:
    """Batches of the longest sequence or the largest image that a model's configuration allows, of random content.

    Args:
        model: a PreTrainedModel with a loss.
        where: how the user named it.

    Raises:
        UsageError: its inputs are none of those known here.
    """

    def __init__(self, model: Any, where: str) -> None:
        self._config, self._where = model.config, where
        self._kind = _kind_of(type(model).__name__)
        if self._kind is None:
            raise self._unknown(f"no batches are known for {type(model).__name__}")
        self._shape = self._image_shape() if self._kind == "image" else (self._length(model),)

    def _unknown(self, why: str) -> UsageError:
        return UsageError(f"{self._where}: {why}; write a task with make_batch(batch_size), or name a Trainer")

    def _image_shape(self) -> tuple[int, ...]:
        size = getattr(self._config, "image_size", None)
        if size is None:
            raise self._unknown("its configuration has no image_size")
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return (getattr(self._config, "num_channels", 3), *sides)

    def _length(self, model: nn.Module) -> int:
        text = self._config.get_text_config()
        found = [length for name in _LENGTHS if isinstance(length := getattr(text, name, None), int)]
        if not found:
            raise self._unknown("its configuration has no max_position_embeddings")
        length = found[0]
        for name, part in model.named_modules():  # RoBERTa's kin count positions from the padding's number on
            if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
                length = min(length, part.num_embeddings - part.padding_idx - 1)
        return length

    def make(self, batch_size: int) -> dict[str, Tensor]:
        """Inputs and labels for so many samples."""
        if self._kind == "image":
            return {"pixel_values": torch.randn(batch_size, *self._shape), "labels": self._classes(batch_size)}
        text = self._config.get_text_config()
        tokens = torch.randint(0, text.vocab_size, (batch_size, *self._shape))
        if isinstance(text.pad_token_id, int):
            tokens = torch.where(tokens == text.pad_token_id, (text.pad_token_id + 1) % text.vocab_size, tokens)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if self._kind == "span":
            return batch | {
                name: torch.zeros(batch_size, dtype=torch.long) for name in ("start_positions", "end_positions")
            }
        if self._kind == "tokens":
            return batch | {"labels": tokens}
        shape = (batch_size,) if self._kind == "class" else tuple(tokens.shape)
        return batch | {"labels": self._classes(*shape)}

    def _classes(self, *shape: int) -> Tensor:
        count = self._config.num_labels
        if getattr(self._config, "problem_type", None) == "multi_label_classification":
            return torch.randint(0, 2, (*shape, count)).float()
        return torch.randn(shape) if count == 1 else torch.randint(0, count, shape)


def _kind_of(name: str) -> str | None:
    from transformers.models.auto import modeling_auto

    for task, kind in _KINDS.items():
        for listed in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            if name in ((listed,) if isinstance(listed, str) else listed):
                return kind
    return None

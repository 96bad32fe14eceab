"""Architectures of timm and transformers with random weights, from names and configurations; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS = 8192


def timm(architecture: str, **options: Any) -> nn.Module:
    import timm as library

    return library.create_model(architecture, pretrained=False, num_classes=100, **options)


def pictures(size: int, side: int = 224) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, side, side), torch.randint(0, 100, (size,))


def small_pictures(size: int) -> tuple[Tensor, Tensor]:
    return pictures(size, 128)


def transformer(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


def text(size: int, length: int = 256) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (size, length)), "labels": torch.randint(3, WORDS, (size, length))}


def masked_text(size: int) -> dict[str, Tensor]:
    """With the mask that a tokenizer gives; nothing is padded, as in a worst batch."""
    return text(size) | {"attention_mask": torch.ones(size, 256, dtype=torch.long)}


def speech(size: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(size, 80, 3000), "labels": torch.randint(3, WORDS, (size, 64))}


def photos(size: int, side: int = 224) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(0, 100, (size,))}


def scenes(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size, 3, 256, 256), "labels": torch.randint(0, 20, (size, 256, 256))}


def captions(size: int) -> dict[str, Any]:
    pixels = torch.randn(size, 3, 128, 128)
    return {"input_ids": torch.randint(3, WORDS, (size, 32)), "pixel_values": pixels, "return_loss": True}


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).loss


_TINY = {"vocab_size": WORDS, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
_LLAMA = _TINY | {"intermediate_size": 1024, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": None}
_BERT = _TINY | {"intermediate_size": 1536}


def gpt2(**options: Any) -> nn.Module:
    shape = {"vocab_size": WORDS, "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 512, "use_cache": False}
    return transformer("GPT2LMHeadModel", "GPT2Config", **shape, **options)


def checkpointed_gpt2() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def llama(**options: Any) -> nn.Module:
    return transformer("LlamaForCausalLM", "LlamaConfig", **_LLAMA | options)


def bert(**options: Any) -> nn.Module:
    return transformer("BertForMaskedLM", "BertConfig", **_BERT | options)


def t5() -> nn.Module:
    shape = {"vocab_size": WORDS, "d_model": 384, "d_ff": 1024, "num_layers": 4, "num_heads": 6, "use_cache": False}
    return transformer("T5ForConditionalGeneration", "T5Config", **shape, decoder_start_token_id=0)


def bart() -> nn.Module:
    ends = {name + part: value for name in ("encoder_", "decoder_") for part, value in _ENDS.items()}
    return transformer(
        "BartForConditionalGeneration", "BartConfig", vocab_size=WORDS, d_model=384, use_cache=False, **ends
    )


_ENDS = {"layers": 4, "attention_heads": 6, "ffn_dim": 1536}


def whisper() -> nn.Module:
    ends = {name + part: value for name in ("encoder_", "decoder_") for part, value in _ENDS.items()}
    return transformer(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=WORDS,
        d_model=384,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
        **ends,
    )


def vit() -> nn.Module:
    return transformer("ViTForImageClassification", "ViTConfig", **_VIT)


_VIT = {k: v for k, v in _BERT.items() if k != "vocab_size"} | {"num_labels": 100}


def dinov2() -> nn.Module:
    return transformer("Dinov2ForImageClassification", "Dinov2Config", **_VIT | {"drop_path_rate": 0.1})


def deberta() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    return transformer("DebertaV2ForMaskedLM", "DebertaV2Config", **_BERT, **relative)


def albert() -> nn.Module:
    return transformer("AlbertForMaskedLM", "AlbertConfig", **_BERT)


def opt() -> nn.Module:
    shape = dict(_TINY.items()) | {"ffn_dim": 1536, "word_embed_proj_dim": 384}
    return transformer("OPTForCausalLM", "OPTConfig", **shape, use_cache=False)


def gpt_neox() -> nn.Module:
    return transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT, use_cache=False)


def gemma2() -> nn.Module:
    return transformer("Gemma2ForCausalLM", "Gemma2Config", **_LLAMA | {"head_dim": 64, "pad_token_id": 0})


def mixtral() -> nn.Module:
    return transformer("MixtralForCausalLM", "MixtralConfig", **_LLAMA, num_local_experts=4)


def mamba() -> nn.Module:
    return transformer(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=WORDS,
        hidden_size=256,
        num_hidden_layers=2,
        state_size=8,
        use_cache=False,
    )


def segformer() -> nn.Module:
    return transformer("SegformerForSemanticSegmentation", "SegformerConfig", num_labels=20)


def clip() -> nn.Module:
    words = _BERT | {"num_hidden_layers": 4, "max_position_embeddings": 32}
    sight = {name: value for name, value in words.items() if name not in ("vocab_size", "max_position_embeddings")}
    sight |= {"image_size": 128, "patch_size": 16}
    return transformer("CLIPModel", "CLIPConfig", text_config=words, vision_config=sight, projection_dim=256)


def quantiles(size: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(size, 16000), "labels": torch.randint(0, 12, (size,))}


def wav2vec() -> nn.Module:
    return transformer(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        **_BERT,
        num_labels=12,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )

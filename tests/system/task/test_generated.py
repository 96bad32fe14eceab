"""Models of transformers by themselves: each trains on a batch from its configuration, or is refused with lines."""

import importlib.util

import pytest
import torch

from batchtune.child.evaluate import Inference
from batchtune.child.trainer import Trainer
from batchtune.errors import UsageError
from batchtune.task.contract import Task

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of the libraries themselves
]
CPU = torch.device("cpu")

BODY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT = BODY | {"vocab_size": 99, "max_position_embeddings": 12}
LLAMA = BERT | {"num_key_value_heads": 1}
GPT2 = {"vocab_size": 99, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2}
XLNET = {"vocab_size": 99, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
T5 = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0}
ENCODER_DECODER = {"vocab_size": 99, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
ENCODER_DECODER |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
ENCODER_DECODER |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
BART = ENCODER_DECODER | {"max_position_embeddings": 12}
MARIAN = BART | {"pad_token_id": 98, "decoder_start_token_id": 98}
WHISPER = ENCODER_DECODER | {"max_source_positions": 20, "max_target_positions": 10, "num_mel_bins": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SPEECH = WHISPER | {"input_feat_per_channel": 8, "conv_channels": 16}
WAVES = BODY | {"vocab_size": 32, "conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (32, 32)}
WAVES |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
AST = BODY | {"max_length": 64, "num_mel_bins": 16}
VIT = BODY | {"image_size": 8, "patch_size": 4}
MAE = VIT | {f"decoder_{name}": value for name, value in BODY.items()}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 2}
CONVNEXT = {"hidden_sizes": [8], "depths": [1], "num_stages": 1, "image_size": 32}
RESNET = {"hidden_sizes": [8], "depths": [1], "embedding_size": 8}
SEGFORMER = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
TEXT = BERT | {"bos_token_id": 1, "eos_token_id": 2}
CLIP = {"text_config": TEXT, "vision_config": VIT, "projection_dim": 16}

TOKENS, LONG = {"input_ids": (2, 12)}, {"input_ids": (2, 512)}
FRAMES, SOUND, PIXELS = {"input_features": (2, 8, 40)}, {"input_values": (2, 160_000)}, {"pixel_values": (2, 3, 8, 8)}
PHOTO = {"pixel_values": (2, 3, 224, 224)}
TRAINS = {  # by class: configuration, shapes in a batch of two
    "BertModel": (BERT, TOKENS),
    "BertForMaskedLM": (BERT, TOKENS | {"labels": (2, 12)}),
    "BertForNextSentencePrediction": (BERT, TOKENS | {"labels": (2,)}),
    "BertForSequenceClassification": (BERT, TOKENS | {"labels": (2,)}),
    "BertForQuestionAnswering": (BERT, TOKENS | {"start_positions": (2,), "end_positions": (2,)}),
    "RobertaModel": (BERT, {"input_ids": (2, 10)}),  # the first two places are the padding's
    "DistilBertModel": (
        {"vocab_size": 99, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 12},
        TOKENS,
    ),
    "ElectraModel": (BERT, TOKENS),
    "GPT2Model": (GPT2, TOKENS),
    "GPT2LMHeadModel": (GPT2, TOKENS | {"labels": (2, 12)}),
    "LlamaForCausalLM": (LLAMA, TOKENS | {"labels": (2, 12)}),
    "MistralForCausalLM": (LLAMA, TOKENS | {"labels": (2, 12)}),
    "Qwen2ForCausalLM": (LLAMA, TOKENS | {"labels": (2, 12)}),
    "XLNetLMHeadModel": (XLNET, LONG | {"labels": (2, 512)}),
    "T5Model": (T5, LONG | {"decoder_input_ids": (2, 512)}),
    "T5EncoderModel": (T5, LONG),
    "T5ForConditionalGeneration": (T5, LONG | {"labels": (2, 512)}),
    "BartModel": (BART, TOKENS | {"decoder_input_ids": (2, 12)}),
    "BartForConditionalGeneration": (BART, TOKENS | {"labels": (2, 12)}),
    "MarianMTModel": (MARIAN, TOKENS | {"labels": (2, 12)}),
    "WhisperModel": (WHISPER, FRAMES | {"decoder_input_ids": (2, 10)}),
    "WhisperForConditionalGeneration": (WHISPER, FRAMES | {"labels": (2, 10)}),
    "WhisperForAudioClassification": (WHISPER, FRAMES | {"labels": (2,)}),
    "Speech2TextForConditionalGeneration": (SPEECH, {"input_features": (2, 20, 8), "labels": (2, 10)}),
    "Wav2Vec2Model": (WAVES, SOUND),
    "Wav2Vec2ForCTC": (WAVES, SOUND | {"labels": (2, 39)}),
    "Wav2Vec2ForSequenceClassification": (WAVES, SOUND | {"labels": (2,)}),
    "HubertForCTC": (WAVES, SOUND | {"labels": (2, 39)}),
    "WavLMModel": (WAVES, SOUND),
    "ASTForAudioClassification": (AST, {"input_values": (2, 64, 16), "labels": (2,)}),
    "ViTModel": (VIT, PIXELS),
    "ViTForImageClassification": (VIT, PIXELS | {"labels": (2,)}),
    "ViTMAEForPreTraining": (MAE, PIXELS),
    "DeiTModel": (VIT, PIXELS),
    "Dinov2Model": (VIT, PIXELS),
    "SwinModel": (SWIN, {"pixel_values": (2, 3, 16, 16)}),
    "ConvNextModel": (CONVNEXT, {"pixel_values": (2, 3, 32, 32)}),
    "ResNetForImageClassification": (RESNET, PHOTO | {"labels": (2,)}),
    "SegformerForSemanticSegmentation": (SEGFORMER, PHOTO | {"labels": (2, 224, 224)}),
    "VideoMAEForVideoClassification": (VIT | {"num_frames": 4}, {"pixel_values": (2, 4, 3, 8, 8), "labels": (2,)}),
    "CLIPModel": (CLIP, TOKENS | PIXELS),
    "CLIPTextModel": (TEXT, TOKENS),
    "CLIPVisionModel": (VIT, PIXELS),
    "SiglipModel": (CLIP, TOKENS | PIXELS),
}
REFUSED = {  # by class: configuration, and what is said of the lines to write
    "BertForPreTraining": (BERT, r"also takes .*labels, next_sentence_label\)"),
    "BertForMultipleChoice": (BERT, r"also takes .*labels\)"),
    "ElectraForPreTraining": (BERT, r'"input_ids": torch.randint\(0, 99, \(batch_size, 12\)\)'),
    "TapasForQuestionAnswering": (BERT, r"also takes .*table_mask, labels, "),
    "ViltForQuestionAnswering": (BERT | VIT, r'"pixel_values": torch.randn\(\(batch_size, 3, 8, 8\)\)'),
    "TimeSeriesTransformerForPrediction": ({"prediction_length": 4, "d_model": 16}, r"also takes past_values, "),
    "Wav2Vec2ForPreTraining": (WAVES, r"computes no loss .*also takes .*mask_time_indices, "),
    "ViTForMaskedImageModeling": (VIT, r"computes no loss .*also takes bool_masked_pos, "),
    "CLIPTextModelWithProjection": (TEXT, r"computes no loss .*also takes position_ids\)"),
}


@pytest.fixture
def alone():
    """The task of a model of this class by itself."""

    def made(name, configuration):
        import transformers as hf

        from batchtune.task.transformers import ModelTask

        kind = getattr(hf, name)
        model = kind(kind.config_class(**configuration))
        task = Task(ModelTask(model, model, "my_models.py:model"), "my_models.py:model")
        task.require("probe")
        return task

    return made


def assumed(task):
    return " ".join(task.source.notes)


@pytest.mark.parametrize("name", TRAINS)
def test_it_trains_on_what_its_configuration_says_and_tells_what_it_does_not_say(alone, name):
    configuration, shapes = TRAINS[name]
    task = alone(name, configuration)
    batch = task.worst_batch(2)
    masks = {"attention_mask", "return_loss"}
    assert {name: tuple(each.shape) for name, each in batch.items() if name not in masks} == shapes
    trainer = Trainer(task, CPU, "fp32")
    assert torch.isfinite(trainer.forward_backward(batch))
    assert any(parameter.grad is not None for parameter in trainer.model.parameters())
    trainer.update()
    Inference(task, CPU, "fp32").forward(batch)
    given = {512, 160_000, 224} & {size for shape in shapes.values() for size in shape}
    assert ("names no " in assumed(task)) is bool(given)
    assert ("computes no loss" in assumed(task)) is (task.model()(**batch).get("loss") is None)


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_cannot_the_lines_to_write_are_shown(alone, name):
    configuration, words = REFUSED[name]
    with pytest.raises(UsageError, match=rf"(?s)^my_models.py:model: {name}: .*{words}") as refused:
        Trainer(task := alone(name, configuration), CPU, "fp32").forward_backward(task.worst_batch(2))
    lines = str(refused.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == [
        "  def build_model()",
        "  def make_batch(batch_size)",
        "  def compute_loss(model, batch)",
    ]
    assert lines[0].endswith("return copy.deepcopy(model)")


def test_the_lines_are_a_task_once_what_is_missing_is_filled_in(alone, load):
    with pytest.raises(UsageError) as refused:
        alone("BertForPreTraining", BERT)
    lines = "\n".join(line.strip() for line in str(refused.value).splitlines()[1:])
    text = f"import copy, torch\nimport transformers as hf\nmodel = hf.BertForPreTraining(hf.BertConfig(**{BERT}))\n"
    more = '"labels": torch.ones(batch_size, 12).long(), "next_sentence_label": torch.ones(batch_size).long()'
    task = load(text + lines.replace("…", more))
    task.require("probe")
    assert torch.isfinite(Trainer(task, CPU, "fp32").forward_backward(task.worst_batch(2)))


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_labels_are_numbers_where_the_configuration_says_so(alone, kind):
    labels = {"regression": 1, "multi_label_classification": 3}[kind]
    task = alone("BertForSequenceClassification", BERT | {"num_labels": labels, "problem_type": kind})
    assert task.worst_batch(2)["labels"].is_floating_point()
    assert torch.isfinite(task.loss(task.model(), task.worst_batch(2)))

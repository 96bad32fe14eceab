"""What batchtune trains: a function that returns your Hugging Face Trainer, as it is. No batchtune import is needed.

The Trainer brings model, data, collator, loss, optimizer, clipping, schedule and metrics. batchtune trains in a loop of
its own: the Trainer's callbacks are not called, and bf16/fp16 in its arguments give way to config.yaml's precision.
"""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

TOKENS, LENGTH = 8, 16


class Sequences(Dataset):
    """Stands in for your tokenized data: which token has a third of a sequence's places?"""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, TOKENS, (count,), generator=generator)
        tokens = torch.randint(0, TOKENS, (count, LENGTH), generator=generator)
        tokens[:, : LENGTH // 3] = self.labels[:, None]
        self.tokens = tokens[:, torch.randperm(LENGTH, generator=generator)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_trainer():
    """Called once; each run starts from a copy of this model, or from what `model_init` makes."""
    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=TOKENS,
    )
    return Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(output_dir="trainer-output", per_device_train_batch_size=32, report_to=[]),
        train_dataset=Sequences(8192, seed=1),
        eval_dataset=Sequences(1024, seed=2),
        # compute_metrics=...: the metric of config.yaml is val_loss (the Trainer's eval_loss) or one of these
    )

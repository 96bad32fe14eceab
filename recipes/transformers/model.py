"""A small BERT that tells which token of a sequence comes most often, in a Hugging Face Trainer."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

TOKENS, LONGEST = 8, 24  # of the vocabulary, in a sequence
PADDING = 0


class Sequences(Dataset):
    """Sequences of 8 to 24 tokens in which one of them has a third of the places; generated, nothing to download."""

    def __init__(self, count, seed):
        """Draws the samples."""
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for _ in range(count):
            length = int(torch.randint(8, LONGEST + 1, (1,), generator=generator))
            label = int(torch.randint(0, TOKENS, (1,), generator=generator))
            tokens = torch.randint(0, TOKENS, (length,), generator=generator)
            tokens[: length // 3] = label
            order = torch.randperm(length, generator=generator)
            self.samples.append({"input_ids": (1 + tokens[order]).tolist(), "labels": label})

    def __len__(self):
        """Samples."""
        return len(self.samples)

    def __getitem__(self, index):
        """Lists of integers, as a tokenizer gives them."""
        return self.samples[index]


def pad(samples):
    """A batch as long as its longest sequence."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [PADDING] * (longest - len(sample["input_ids"])) for sample in samples]
    tokens = torch.tensor(rows)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}


def accuracy(prediction):
    """Share of the sequences whose most frequent token was found."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_trainer():
    """The Trainer, as a script would go on to call its train()."""
    config = BertConfig(
        vocab_size=TOKENS + 1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
        num_labels=TOKENS,
        pad_token_id=PADDING,
    )
    arguments = TrainingArguments(
        output_dir="trainer-output",
        per_device_train_batch_size=8,
        learning_rate=5e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        report_to=[],
    )
    return Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        data_collator=pad,
        train_dataset=Sequences(8192, seed=1),
        eval_dataset=Sequences(512, seed=2),
        compute_metrics=accuracy,
    )


if __name__ == "__main__":
    make_trainer().train()

"""LoRA adapters (peft) of a small GPT-2 in a Trainer, on rows of unequal length that the collator pads."""

import torch
from hf_trainer import LENGTH, Report
from hf_trainer import TEXT as ALL
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Lines(torch.utils.data.Dataset):
    def __init__(self, text):
        self.rows = [list(line[:LENGTH]) for line in text.split(b"\n") if len(line) > 3]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def make_trainer(callbacks=None, **given):
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4))
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True))
    arguments = TrainingArguments(
        "trainer-output",
        **{"per_device_train_batch_size": 8, "learning_rate": 1e-3, "lr_scheduler_type": "constant"} | given,
        num_train_epochs=100,
        label_names=["labels"],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = {"train_dataset": Lines(ALL[:-3000]), "eval_dataset": Lines(ALL[-3000:])}
    return Trainer(model, arguments, data_collator=pad, callbacks=callbacks, **data)


def train(batch_size, lr, report):
    make_trainer(
        [Report(report)], per_device_train_batch_size=batch_size, learning_rate=lr, logging_strategy="no"
    ).train()

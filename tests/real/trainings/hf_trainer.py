"""A small GPT-2 in a Hugging Face Trainer, on the bytes of two modules of Python."""

import site
from pathlib import Path

from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, default_data_collator

LENGTH = 48
TEXT = Path(site.__file__).read_bytes() + Path(site.__file__).with_name("pydoc.py").read_bytes()


class Bytes(Dataset):
    def __init__(self, text):
        self.rows = [list(text[at : at + LENGTH]) for at in range(0, len(text) - LENGTH, LENGTH // 4)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model_init():
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4))


def make_trainer(**given):
    callbacks = given.pop("callbacks", None)
    arguments = TrainingArguments(
        "trainer-output",
        **{"per_device_train_batch_size": 8, "learning_rate": 5e-4, "lr_scheduler_type": "constant"} | given,
        max_grad_norm=1.0,
        num_train_epochs=100,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        args=arguments,
        model_init=model_init,
        data_collator=default_data_collator,
        train_dataset=Bytes(TEXT[:-3000]),
        eval_dataset=Bytes(TEXT[-3000:]),
        callbacks=callbacks,
    )


class Report(TrainerCallback):
    def __init__(self, report):
        self.report = report

    def on_step_end(self, args, state, control, model=None, **_):
        control.should_training_stop = self.report(model)


def train(batch_size, lr, report):
    make_trainer(
        per_device_train_batch_size=batch_size, learning_rate=lr, callbacks=[Report(report)], logging_strategy="no"
    ).train()

"""A small T5 that reverses words: inputs and labels of two different lengths, padded by its own collate."""

import inspect
import pydoc
import re

import torch
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

WORDS = re.findall(r"[a-z_]{3,24}", inspect.getsource(pydoc))
PAIRS = [([97, *word.encode()], [*word[:4][::-1].encode(), 1]) for word in WORDS]


def pad(rows, filler):
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def collate(pairs):
    inputs, labels = zip(*pairs, strict=True)
    ids = pad(inputs, 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad(labels, -100)}


def t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=128, decoder_start_token_id=0, **sizes))


def train(batch_size, lr, report, epochs=20):
    model = t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in DataLoader(PAIRS[:-200], batch_size, shuffle=True, drop_last=True, collate_fn=collate):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model = t5


def train_dataset():
    return PAIRS[:-200]


def val_dataset():
    return PAIRS[-200:]

"""A small transformer on the functions of Python's own standard library, most of them short and some very long."""

import ast
import functools
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

LONGEST = 512  # characters of a function; those that are longer are left out
ROUNDED_TO = 16  # characters of a batch
WIDTH, HEADS, LAYERS = 64, 4, 2
VOCABULARY = 128  # ASCII; 0 stands for padding, which no text has
MODULES = ("argparse", "datetime", "difflib", "doctest", "enum", "inspect", "pdb", "pydoc", "socket", "subprocess")
MODULES += ("tarfile", "threading", "typing", "uuid", "zipfile")


@functools.cache
def _functions():
    """The source of each function, those of classes among them."""
    found = []
    library = Path(sysconfig.get_path("stdlib"))
    for file in (file for name in MODULES if (file := library / f"{name}.py").exists()):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        found += ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    ascii_only = [text.encode("ascii", errors="replace") for text in found]
    return [torch.tensor(list(each)) for each in ascii_only if len(each) <= LONGEST]


def train_dataset():
    """All but each tenth function: tensors of as many characters as it has."""
    return [each for number, each in enumerate(_functions()) if number % 10]


def val_dataset():
    """Each tenth function."""
    return _functions()[::10]


def sample_length(sample):
    """Its number of characters."""
    return len(sample)


def collate(samples):
    """Pads a batch to its longest sample, and that to a multiple of 16.

    A CPU keeps the kernels of every shape that it has trained, and memory with them: 512 lengths would take 100 MiB.
    """
    padded = pad_sequence(samples, batch_first=True)
    return nn.functional.pad(padded, (0, -padded.shape[1] % ROUNDED_TO))


class CharacterModel(nn.Module):
    """Embeddings, causal transformer layers, and a linear read-out."""

    def __init__(self):
        """Builds the layers."""
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.read_out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters):
        """Logits of shape [batch, time, VOCABULARY] for characters of shape [batch, time]."""
        time = characters.shape[1]
        places = torch.arange(time, device=characters.device)
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=characters.device)
        hidden = self.layers(self.token(characters) + self.place(places), mask=mask, is_causal=True)
        return self.read_out(hidden)


def build_model():
    """About 150 thousand parameters."""
    return CharacterModel()


def compute_loss(model, batch):
    """Cross-entropy of each next character, in nats; padding is not learned."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def build_optimizer(model, lr):
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr)

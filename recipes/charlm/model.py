"""A small character-level transformer on the source text of Python's own standard library: nothing to download."""

import functools
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

CONTEXT = 48  # characters
WIDTH, HEADS, LAYERS = 64, 4, 2
VOCABULARY = 128  # ASCII
MODULES = ("argparse", "ast", "datetime", "decimal", "difflib", "doctest", "inspect", "pydoc", "tarfile", "typing")


@functools.cache
def _text():
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in MODULES]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    return torch.tensor([min(byte, VOCABULARY - 1) for byte in text.encode("ascii", errors="replace")])


class Windows(Dataset):
    """Windows of CONTEXT + 1 characters at every `stride`-th place of a part of the text."""

    def __init__(self, start, end, stride):
        """Takes the part between two shares of the text."""
        text = _text()
        self.text = text[int(start * len(text)) : int(end * len(text))]
        self.stride = stride

    def __len__(self):
        """Windows in this part."""
        return (len(self.text) - CONTEXT - 1) // self.stride

    def __getitem__(self, index):
        """Shape [CONTEXT + 1], int64."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.text[index * self.stride : index * self.stride + CONTEXT + 1]


class CharacterModel(nn.Module):
    """Embeddings, causal transformer layers, and a linear read-out."""

    def __init__(self):
        """Builds the layers."""
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
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
    """About 120 thousand parameters."""
    return CharacterModel()


def train_dataset():
    """The first nine tenths of the text."""
    return Windows(0.0, 0.9, stride=7)


def val_dataset():
    """Windows from the last tenth, far apart."""
    return Windows(0.9, 1.0, stride=400)


def compute_loss(model, batch):
    """Cross-entropy of each next character, in nats."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def build_optimizer(model, lr):
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr)

"""A model that is built without its weights gets the very ones that building it as usual comes to."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from batchtune.child.ranks.deferred import build_deferred
from batchtune.errors import UserCodeError
from batchtune.task.state import seed_everything

KNOWN = nn.Linear(4, 4)
NUMBERS = KNOWN.weight.detach().numpy()


class Language(nn.Module):
    """Weights that are initialised twice, tied ones, a mask, tables in attributes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 16), nn.Parameter(torch.zeros(1, 8, 16))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.triu(torch.full((8, 8), -math.inf), 1))
        self.frequencies = 1 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.tables = [torch.ones(2), {"noise": torch.randn(3)}]
        self.apply(self._start)
        for block in self.blocks:
            nn.init.normal_(block.linear2.weight, std=0.02 / math.sqrt(6))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.head.weight.no_decay = True

    def _start(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Vision(nn.Module):
    """Layers that are copied, parametrized, changed in part, and made by values that are read."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.drops = nn.ModuleList(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.1, 3))
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.orthogonal_(self.convolution.weight)
        self.weighed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        with torch.no_grad():
            self.spectral.bias[0] = 3
            self.norm.bias += torch.tensor([1.0, 2.0, 3.0, 4.0])


def with_a_seed_of_its_own():
    torch.manual_seed(3)
    return nn.Linear(4, 4)


def with_random_numbers_set_apart():
    with torch.random.fork_rng(devices=[]):
        first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Linear(4, 4), copy.deepcopy(first))


def from_a_generator():
    model, generator = nn.Linear(4, 4), torch.Generator().manual_seed(5)
    nn.init.normal_(model.weight, generator=generator)
    nn.init.normal_(model.bias, generator=generator)
    return model


def in_half_precision():
    return nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)).to(torch.bfloat16)


def copied():
    return nn.Sequential(copy.deepcopy(KNOWN), nn.Linear(4, 4))


def with_known_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].load_state_dict(KNOWN.state_dict())
    model[1].load_state_dict(KNOWN.state_dict(), assign=True)
    model[2].weight.data = torch.from_numpy(NUMBERS.copy())
    return model


DEFERRED = (
    Language, Vision, with_a_seed_of_its_own, with_random_numbers_set_apart, from_a_generator, in_half_precision,
    copied, with_known_weights,
)  # fmt: skip


def hugging_face(name):
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        size = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
        return lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**size))
    if name == "llama":
        return lambda: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=50, num_key_value_heads=2, **small))
    return lambda: hf.BertForSequenceClassification(hf.BertConfig(vocab_size=50, **small))


def tensors_of(model):
    """All of them by name: parameters, buffers, and plain attributes."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}
    return found


def both_ways(build):
    """What building it as usual comes to, and without weights until it is filled; each with a number drawn after it."""
    seed_everything(1)
    usual = build(), (float(torch.rand(1)), random.random())
    seed_everything(1)
    model, fill = build_deferred(build)
    after = float(torch.rand(1)), random.random()
    were_fake = [isinstance(each, FakeTensor) for each in model.parameters()]
    fill(model)
    return usual, (model, after), were_fake


def require_alike(build, *, deferred):
    (usual, number), (model, other_number), were_fake = both_ways(build)
    assert any(were_fake) == deferred
    assert number == other_number
    expected, found = tensors_of(usual), tensors_of(model)
    assert list(found) == list(expected)
    for name, each in found.items():
        assert type(each) is type(expected[name]), name
        assert torch.equal(each, expected[name]), name
        assert (each.stride(), each.requires_grad) == (expected[name].stride(), expected[name].requires_grad), name
        assert vars(each) == vars(expected[name]), name
    return model


@pytest.mark.parametrize("build", DEFERRED, ids=lambda each: each.__name__)
def test_it_has_the_same_values_bit_by_bit_and_leaves_the_same_random_numbers(build):
    require_alike(build, deferred=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_so_do_models_of_hugging_face(name):
    require_alike(hugging_face(name), deferred=True)


def test_what_is_tied_or_in_containers_stays_so():
    model = require_alike(Language, deferred=True)
    assert model.head.weight is model.embedding.weight
    assert model.tables[0].tolist() == [1.0, 1.0]
    assert not isinstance(model.tables[1]["noise"], FakeTensor)


def test_each_block_gets_its_weights_by_itself():
    model, fill = build_deferred(Language)
    fill(model.blocks[1])
    assert not any(isinstance(each, FakeTensor) for each in model.blocks[1].parameters())
    assert all(isinstance(each, FakeTensor) for each in model.blocks[0].parameters())
    assert all(isinstance(each, FakeTensor) for each in model.head.parameters())


def from_a_file(path):
    def build():
        model = nn.Linear(4, 4)
        model.load_state_dict(torch.load(path))
        return model

    return build


class KeptElsewhere:
    def __init__(self):
        self.tensors = []

    def __call__(self):
        model = nn.Linear(4, 4)
        self.tensors.append(model.weight)
        return model


def by_what_was_drawn():
    model = nn.Linear(4, 4)
    nn.init.normal_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.bernoulli(model.weight[0].sigmoid()))
    return model


def by_shapes_that_depend_on_values():
    return nn.Linear(4, int((torch.randn(10) > 0).nonzero().shape[0]) + 1)


@pytest.mark.parametrize(
    "build", [KeptElsewhere(), by_what_was_drawn, by_shapes_that_depend_on_values], ids=lambda each: str(each)[:30]
)
def test_where_that_cannot_be_it_is_built_as_usual(build):
    require_alike(build, deferred=False)


def test_a_file_of_weights_is_loaded_as_usual(tmp_path):
    torch.save(KNOWN.state_dict(), tmp_path / "weights.pt")
    model = require_alike(from_a_file(tmp_path / "weights.pt"), deferred=False)
    assert torch.equal(model.weight, KNOWN.weight)


def test_what_the_users_code_raises_is_raised_as_usual():
    def build():
        raise ValueError("no such size")

    with pytest.raises(ValueError, match="no such size"):
        build_deferred(build)


def test_a_cache_that_keeps_tensors_from_one_call_to_the_next_is_named():
    cache = {}

    def build():
        model = nn.Linear(4, 4)
        model.register_buffer("table", cache.setdefault("table", torch.ones(4)))
        return model

    with pytest.raises(UserCodeError, match="build_model keeps tensors from one call to the next"):
        build_deferred(build)

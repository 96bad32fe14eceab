"""A graph network on batch objects of its own: many small graphs as one large one, with to() and no first dimension."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class Graph:
    x: torch.Tensor
    edges: torch.Tensor  # 2 × edges
    y: torch.Tensor
    batch: torch.Tensor | None = None

    def to(self, device, **options):
        return Graph(*(each.to(device, **options) for each in (self.x, self.edges, self.y, self.batch)))


def random_graph(seed):
    """Is there a triangle among random edges?"""
    generator = torch.Generator().manual_seed(seed)
    nodes = int(torch.randint(6, 24, (), generator=generator))
    dense = (torch.rand(nodes, nodes, generator=generator) < 1.6 / nodes).triu(1)
    dense = (dense | dense.T).float()
    label = int(dense.matrix_power(3).trace() > 0)
    return Graph(
        torch.cat([dense.sum(1, keepdim=True), torch.ones(nodes, 15)], 1), dense.nonzero().T, torch.tensor(label)
    )


def collate(graphs):
    starts = torch.tensor([0, *(len(each.x) for each in graphs)]).cumsum(0)
    numbers = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor([len(each.x) for each in graphs]))
    edges = [each.edges + start for each, start in zip(graphs, starts, strict=False)]
    x = torch.cat([each.x for each in graphs])
    return Graph(x, torch.cat(edges, 1), torch.stack([each.y for each in graphs]), numbers)


class GIN(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        sizes = [16, *[width] * layers]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, width), nn.ReLU(), nn.Linear(width, b), nn.LayerNorm(b), nn.ReLU())
            for a, b in pairwise(sizes)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, graph):
        x, (source, target) = graph.x, graph.edges
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).index_add(0, target, x[source]))
        pooled = x.new_zeros(len(graph.y), x.shape[1]).index_add(0, graph.batch, x)
        return self.head(pooled)


TRAIN, VAL = [random_graph(seed) for seed in range(1500)], [random_graph(seed) for seed in range(2000, 2300)]


def loss_of(model, graph):
    return nn.functional.cross_entropy(model(graph), graph.y)


def train(batch_size, lr, report, epochs=100):
    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for graph in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True, collate_fn=collate):
            optimizer.zero_grad()
            loss_of(model, graph).backward()
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model, compute_loss = GIN, loss_of


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL


def batch_size_of(graph):
    return len(graph.y)

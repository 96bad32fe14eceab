"""A graph network of torch_geometric on its own batches."""

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.utils import erdos_renyi_graph


def random_graph(seed):
    torch.manual_seed(seed)
    nodes = int(torch.randint(6, 24, ()))
    edges = erdos_renyi_graph(nodes, 1.6 / nodes)
    dense = torch.zeros(nodes, nodes)
    dense[edges[0], edges[1]] = 1
    label = torch.tensor([int(dense.matrix_power(3).trace() > 0)])
    return Data(torch.cat([dense.sum(1, keepdim=True), torch.ones(nodes, 15)], 1), edges, y=label)


class GIN(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()))
        self.second = GINConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()))
        self.third = GINConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()))
        self.head = nn.Linear(width, 2)

    def forward(self, x, edge_index, batch, size):
        for layer in (self.first, self.second, self.third):
            x = layer(x, edge_index)
        return self.head(global_add_pool(x, batch, size))


TRAIN, VAL = [random_graph(seed) for seed in range(1500)], [random_graph(seed) for seed in range(2000, 2300)]


def loss_of(model, data):
    return nn.functional.cross_entropy(model(data.x, data.edge_index, data.batch, data.num_graphs), data.y)


def train(batch_size, lr, report, epochs=100):
    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for data in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model, compute_loss, collate = GIN, loss_of, Batch.from_data_list


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL


def batch_size_of(data):
    return data.num_graphs

"""Tasks that the tests of the lane train: two linear layers, whose step takes memory for each sample."""

PERCEPTRON = """
import os, signal, time
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))

def make_batch(batch_size):
    return torch.zeros(batch_size, 1024)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""

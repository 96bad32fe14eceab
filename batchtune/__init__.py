"""batchtune finds the batch size, learning rate and precision that train a PyTorch model to its goal soonest."""

__version__ = "0.1.0"

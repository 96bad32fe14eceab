"""Optuna's sampler and pruner for batch size and learning rate; they work in any study of Optuna's."""

"""Batches for training on inputs of many lengths; no torch is imported here."""

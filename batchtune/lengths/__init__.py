"""Inputs of many lengths: which to bucket by, and peak memory as one polynomial over batch and length."""

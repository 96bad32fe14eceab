"""Training as the user does it: steps, precision, evaluation, checkpoints, ranks."""

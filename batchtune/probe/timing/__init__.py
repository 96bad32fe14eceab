"""How fast each size trains, what a sample costs, how fast batches come."""

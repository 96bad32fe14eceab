"""How fast each size trains: steps, the data loader, and several ranks."""

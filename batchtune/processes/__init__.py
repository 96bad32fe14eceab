"""The parent's side of the processes that train: on this machine, as ranks of one group, or on a Ray cluster."""

"""Which batch fits on which GPU, calculated without a GPU."""

"""From a trace to bytes: sizes by batch, torch's allocator, what a GPU holds besides. Loads no model."""

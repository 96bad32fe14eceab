"""A LightningModule as a task, and a callback that applies a result in Lightning."""

"""A Hugging Face Trainer or model as a task, and what applies a result there."""

"""What is settled before the study: sizes, learning rates, where to start, what must not change."""

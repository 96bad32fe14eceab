"""What the runs come to: how they are scored, and which setting is recommended."""

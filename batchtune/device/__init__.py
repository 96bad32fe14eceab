"""One device: its memory, its failures and its sensors."""

"""The configuration of a study: its keys, and how it is read."""

"""The largest batch that really trains: the search, its attempts, and the throughput curve."""

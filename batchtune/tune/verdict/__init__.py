"""What a study's trials come to: the recommendation, how sure it is, what to be warned of."""

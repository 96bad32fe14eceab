"""What a study wants the least of, until which value, and what its trials say of it."""

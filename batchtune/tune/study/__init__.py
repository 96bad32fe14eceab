"""The study itself: its trials, their limits, and what it believes on the way."""

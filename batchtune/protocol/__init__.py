"""What crosses from one process to another: the line between them, and what is said on it."""

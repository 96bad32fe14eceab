"""In a child: the user's training step on tensors without data, and every block it would take."""

"""What the ranks of a group share while they train one model together."""

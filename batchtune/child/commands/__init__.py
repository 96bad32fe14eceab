"""The commands that a parent gives a child, a file each."""

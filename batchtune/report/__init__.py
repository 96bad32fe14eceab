"""Results for people and for other programs; reads the result document only."""

"""The user's code: the contract it keeps and how it is loaded."""

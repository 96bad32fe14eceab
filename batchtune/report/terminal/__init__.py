"""The report in a terminal, and a run drawn as it goes."""

"""Real training in child processes: steps, runs, precision, and the worker that holds the device."""

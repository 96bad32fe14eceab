"""What runs in the process that holds the device and the user's code."""

"""The report as one HTML page, and the answer in a notebook."""

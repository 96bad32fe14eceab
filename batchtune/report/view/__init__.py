"""What every report reads in a result: which parts belong together, and the words for them."""

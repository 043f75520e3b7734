"""Linear layers with int8 weights: a room of its own, which attention does not need."""

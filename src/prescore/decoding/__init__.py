"""State of a generation, as values the caller owns."""

"""Times of attention against exact attention."""

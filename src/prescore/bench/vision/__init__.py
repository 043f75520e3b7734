"""Vision transformers at a budget of keys, and coverage of heavy entries."""

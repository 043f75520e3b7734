"""Keys in, scores out; one file, one scorer; a higher score is kept."""

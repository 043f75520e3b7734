"""Other people's models on our attention; one foreign library per file, undo always works."""

"""Vision transformers on images."""

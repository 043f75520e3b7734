"""Scores in, kept positions out; never sees keys or values."""

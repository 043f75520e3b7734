"""Queries, keys, values in, mergeable attention out; exact about its softmax, knows no model."""

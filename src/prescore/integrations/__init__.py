"""Adapters for model libraries. Importing this package imports none of them."""

"""Configurations in, records out; prints and plots nothing."""

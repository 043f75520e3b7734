"""Operators in C, called through `ctypes`; nothing needs them, and plain torch computes the same."""

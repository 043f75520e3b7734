"""Exact attention with its log-sum-exp on each device, and the softmax over a union of key sets; no policy."""

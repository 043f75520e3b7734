"""Tensors in, tensors out: operators on each device and how their results are put together; no policy."""

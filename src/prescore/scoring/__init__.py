"""Algorithm 1: scorers rank the keys, the clusters behind some of them, and the choice of the keys to keep."""

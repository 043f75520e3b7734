"""Algorithm 1: scorers rank the keys, the clusters that some of them make, and the choice of the keys to keep."""

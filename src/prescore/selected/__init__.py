"""Algorithm 2 and HyperAttention: attention over keys that a scorer selected before any query was seen."""

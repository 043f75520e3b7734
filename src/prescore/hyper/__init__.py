"""HyperAttention and Algorithm 2: queries over keys that were selected before any query was seen."""

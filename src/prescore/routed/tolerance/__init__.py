"""Routed attention to a tolerance: a sampled rest, its error bar, and who reads on."""

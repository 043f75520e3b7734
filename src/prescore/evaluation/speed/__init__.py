"""Times as ratios to exact attention."""

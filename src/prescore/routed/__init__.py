"""The default engine: queries read the keys that matter to them, centroids carry the others."""
